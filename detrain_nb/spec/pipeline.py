"""A whole pipeline as one document: what is run, on which nodes, how the model is shared, and what comes of it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from ..documents import read_document, write_document
from ..errors import FieldError
from ..plan import Plan
from ..plan.fields import set_fields
from ..plan.job import JobSpec
from ..storage import shown
from .checking import check_spec
from .findings import Finding
from .model import SpecModel
from .node import Node
from .overrides import read_overrides
from .parallelism import Parallelism
from .places import Checkpoint, Data, Model, Rendezvous
from .planning import plan_spec, program_arguments, resolve_job
from .source import Source
from .training import Training
from .words import (
    Variable,
    Variables,
    as_set_of,
    as_tuple,
    is_for_argv,
    is_inside,
    is_job_name,
    is_one_line,
    is_path,
    only,
)

_OURS = re.compile(r"DETRAIN_NB_.*|TORCHELASTIC_.*|(?:LOCAL_|GROUP_|ROLE_)?(?:RANK|WORLD_SIZE)|MASTER_(?:ADDR|PORT)")
_MOST_NODES = 10_000


def _check_nodes(nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    places: dict[str, int] = {}
    for index, node in enumerate(nodes):
        if (first := places.setdefault(node.name, index)) != index:
            raise ValueError(
                f"[{first}] and [{index}] have the same name {node.name!r}: give each a name of its own; one machine "
                "is named once, with ranks = N for several ranks"
            )
    return nodes


def _check_variable(name: str) -> str:
    if _OURS.fullmatch(name):
        raise ValueError(f"{name} is set for every rank by torchrun or by us: give it another name")
    return name


_Env = dict[Annotated[Variable, AfterValidator(_check_variable)], Annotated[str, only(is_for_argv)]]


class PipelineSpec(SpecModel):
    """What to run: frozen, and checked as a whole.

    Raises: FieldError, a SpecError, with one line for each field that cannot be.
    """

    name: Annotated[str, only(is_job_name)] = Field(
        description="letters, digits and . _ -, at most 63, the first a letter or a digit"
    )
    description: Annotated[str, only(lambda text: is_one_line(text, allowed="\n\t") and len(text) <= 4000)] = Field(
        default="", description="a text of at most 4000 characters, without control codes"
    )
    parallelism: Parallelism = Field(default=Parallelism(), description="a table: the axes pp, dp_replicate, ...")
    training: Training = Field(default=Training(), description="a table: epochs or steps, batch_size, ...")
    nodes: Annotated[
        tuple[Node, ...], BeforeValidator(as_tuple), Field(max_length=_MOST_NODES), AfterValidator(_check_nodes)
    ] = Field(default=(), description="a list of nodes, each with its host; none: this machine")
    source: Source = Field(description="a table with one of script, script_text, notebook, git, path, module")
    data: Data | None = Field(default=None, description="a table with the url of the data")
    model: Model | None = Field(default=None, description="a table with the url of a model")
    checkpoint: Checkpoint | None = Field(default=None, description="a table with the url of a folder")
    artifacts: Annotated[tuple[Annotated[str, only(is_inside)], ...], BeforeValidator(as_set_of)] = Field(
        default=("*.pt", "*.safetensors", "artifacts/"),
        description='a list of patterns of files below the folder the ranks run in, as "*.pt", each once, without ..',
    )
    env: _Env = Field(default={}, description="a table of environment variables with texts; secrets stay out of it")
    secrets: Annotated[Variables, AfterValidator(lambda names: tuple(map(_check_variable, names)))] = Field(
        default=(), description="a list of names of environment variables, each once: values stay out of it"
    )
    image: Annotated[str, only(lambda text: is_path(text) and " " not in text)] | None = Field(
        default=None, description="the name of a container image, for where jobs run in one"
    )
    rendezvous: Rendezvous = Field(default=Rendezvous(), description="a table: endpoint, port, timeout_s, ...")

    @model_validator(mode="after")
    def _check_variables(self) -> Self:
        if both := [name for name in self.secrets if name in self.env]:
            raise ValueError(f"{both[0]} stands in env and in secrets: leave it out of env, whose values are stored")
        return self

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Make it of what a document has; ``$schema``, by which editors complete it, is left out. Raises: SpecError."""
        return cls(**{name: value for name, value in data.items() if name != "$schema"})

    @classmethod
    def load(cls, url: str | os.PathLike[str]) -> Self:
        """Read it from a path or an fsspec URL, as JSON, TOML or YAML by the suffix. Raises: SpecError."""
        try:
            return cls.from_dict(read_document(url))
        except FieldError as exc:
            raise FieldError(exc.faults, where=shown(os.fspath(url))) from None

    def save(self, url: str | os.PathLike[str]) -> None:
        """Write it to a path or an fsspec URL, as JSON, TOML or YAML by the suffix. Raises: SpecError."""
        write_document(url, self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """Return what is not as by default, as a document has it."""
        fields = self.to_fields()
        if self.nodes:
            fields["nodes"] = [node.to_fields() for node in self.nodes]
        return fields

    @classmethod
    def parse_overrides(cls, words: Sequence[str]) -> dict[str, Any]:
        """Read ``--training.epochs 2 --nodes gpu1,gpu2`` as values for `with_overrides`. Raises: SpecError."""
        return read_overrides(cls, words)

    def with_overrides(self, values: Mapping[str, Any]) -> Self:
        """Return it with other ``values`` of fields, as ``{"training.epochs": 2}``; what a field stands instead of, as
        ``training.steps``, is left out then. Raises: SpecError.
        """
        return self.from_dict(set_fields(self.to_dict(), values)) if values else self

    def plan(self, *, gpus: Mapping[str, int | Sequence[int]] | None = None) -> Plan:
        """Return which rank is where, and what of the pipeline it has.

        ``gpus``: how many there are on a node, by its name ("" for this machine where no node is named), or their
        indices. A node that is not named has those that the spec asks for, else none. Raises: SpecError.
        """
        return plan_spec(self, gpus=gpus or {})

    def check(self) -> list[Finding]:
        """Return what is wrong with it, as far as that can be known without its nodes; an empty list is good."""
        return check_spec(self)

    def job_spec(self, plan: Plan) -> JobSpec:
        """Return what the script reads with `detrain_nb.job_spec`."""
        return resolve_job(self, plan)

    def program_arguments(self, plan: Plan) -> tuple[str, ...]:
        """Return the arguments of the script, in the style that the source says. Raises: SpecError."""
        return program_arguments(self, plan)
