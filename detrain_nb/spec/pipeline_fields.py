"""The fields of a pipeline: what is run, on which nodes, how the model is split, and which files are kept."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from ..plan.choices import ARTIFACTS
from ..plan.names import NAME_RULE
from .model import SpecModel
from .node import THIS_MACHINE, Node
from .nodes_file import find_twins
from .parallelism import Parallelism
from .places import Checkpoint, Data, Model, Rendezvous
from .source import Source
from .training import Training
from .words import (
    EACH_ONCE,
    PATH,
    FreeVariable,
    Inside,
    JobName,
    as_set_of,
    as_tuple,
    is_for_argv,
    is_one_line,
    is_path,
    like,
    only,
)

_MOST_NODES = 10_000


def _check_nodes(nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    if twins := find_twins(nodes):
        raise ValueError("; ".join(twins))
    return nodes


_Env = Annotated[
    dict[FreeVariable, Annotated[str, only(is_for_argv)]],
    Field(json_schema_extra={"additionalProperties": False}),
]


class PipelineFields(SpecModel):
    """The fields of a pipeline, validated as a whole; the base of `PipelineSpec`."""

    name: JobName = Field(description=f"{NAME_RULE}, such as mnist-2")
    description: Annotated[str, only(lambda text: is_one_line(text, allowed="\n\t") and len(text) <= 4000)] = Field(
        default="",
        json_schema_extra={"maxLength": 4000},
        description="a text of at most 4000 characters, without control characters",
    )
    parallelism: Parallelism = Field(default=Parallelism(), description="a table: the axes pp, dp_replicate, ...")
    training: Training = Field(default=Training(), description="a table: epochs or steps, batch_size, ...")
    nodes: Annotated[
        tuple[Node, ...], BeforeValidator(as_tuple), Field(max_length=_MOST_NODES), AfterValidator(_check_nodes)
    ] = Field(default=(), description="a list of nodes, each with its host; empty: this machine")
    source: Source = Field(description="a table with one of script, script_text, notebook, git, path, module")
    data: Data | None = Field(default=None, description="a table with the url of the data")
    model: Model | None = Field(default=None, description="a table with the url of a model")
    checkpoint: Checkpoint | None = Field(default=None, description="a table with the url of a folder")
    artifacts: Annotated[tuple[Inside, ...], BeforeValidator(as_set_of)] = Field(
        default=ARTIFACTS,
        json_schema_extra=EACH_ONCE,
        description='a list of patterns of files in the folder the ranks run in, such as "*.pt", each once, without ..',
    )
    env: _Env = Field(
        default={}, description="a table of environment variables with their values as texts, without secrets"
    )
    secrets: Annotated[tuple[FreeVariable, ...], BeforeValidator(as_set_of), Field(json_schema_extra=EACH_ONCE)] = (
        Field(default=(), description="a list of names of environment variables, each once, without values")
    )
    image: Annotated[str, only(lambda text: is_path(text) and " " not in text), like(rf"(?!.* ){PATH}")] | None = Field(
        default=None, description="the name of a container image, for exports that run in one"
    )
    rendezvous: Rendezvous = Field(default=Rendezvous(), description="a table: endpoint, port, timeout_s, ...")

    @model_validator(mode="after")
    def _check_style(self) -> Self:
        if self.source.argument_style == "detrain" and self.training.steps is not None:
            raise ValueError(
                f"training.steps {self.training.steps}: the arguments of DeTrain have only epochs: give "
                'training.epochs, or source.argument_style "plain"'
            )
        return self

    @model_validator(mode="after")
    def _check_variables(self) -> Self:
        if both := [name for name in self.secrets if name in self.env]:
            raise ValueError(f"{both[0]} is in both env and secrets: leave it out of env, whose values are stored")
        return self

    def python_of(self, node_rank: int) -> str:
        """Return the Python of a node, or of this machine when the spec has no nodes."""
        return (self.nodes[node_rank] if self.nodes else Node(host=THIS_MACHINE)).python

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults, as a document has them."""
        fields = self.to_fields()
        if self.nodes:
            fields["nodes"] = [node.to_fields() for node in self.nodes]
        return fields
