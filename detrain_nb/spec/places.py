"""Where data, models and checkpoints are, and where the nodes of a job meet."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from ..plan.choices import SILENCE_S, TIMEOUT_S
from ..plan.names import NAME_RULE
from ..storage import has_password_of_user
from .model import SpecModel
from .node import Address
from .words import (
    EACH_ONCE,
    NODE_PATH,
    ONE_LINE,
    PATH,
    JobName,
    as_set_of,
    check_node_path,
    is_one_line,
    is_path,
    like,
    only,
)


def _check_password(text: str) -> str:
    if has_password_of_user(text):
        raise ValueError(
            "contains a user or password, and a spec is stored: leave it out, and pass it in a variable of secrets"
        )
    return text


Url = Annotated[
    str, only(lambda text: is_path(text) and len(text) <= 2000), AfterValidator(_check_password), like(PATH)
]
_NodeUrl = Annotated[Url, AfterValidator(check_node_path), like(NODE_PATH)]
_Word = Annotated[
    str,
    only(lambda text: bool(text.strip()) and is_one_line(text) and len(text) <= 100),
    like(rf"(?=.*\S)(?!.{{101}}){ONE_LINE}"),
]
_Chunk = Annotated[str, only(lambda text: bool(text) and is_one_line(text)), like(f"(?=.){ONE_LINE}")]
_Chunks = Annotated[tuple[_Chunk, ...], BeforeValidator(as_set_of), Field(json_schema_extra=EACH_ONCE)]
URL = "a path or an fsspec URL, such as s3://bucket/folder, on one line, without keys and passwords"


class _Stored(SpecModel):
    url: _NodeUrl = Field(description=URL)
    format: _Word | None = Field(
        default=None, description="the name of its file format, such as parquet or safetensors"
    )
    chunks: _Chunks = Field(default=(), description="a list of the names of its parts, each once")


class Data(_Stored):
    """The training data."""


class Model(_Stored):
    """A model to start from, instead of a new one."""


class Checkpoint(SpecModel):
    """Where checkpoints are saved, how often, and whether a job resumes from them."""

    url: _NodeUrl = Field(description=URL)
    interval: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="a whole number, 1 or more: steps between checkpoints; unset: only one, at the end"
    )
    keep: Annotated[int, Field(ge=1)] | Literal["all"] = Field(
        default=3, description='a whole number, 1 or more: how many of the newest are kept; or "all"'
    )
    resume: bool = Field(default=True, description="true or false: resume from the newest checkpoint")
    asynchronous: bool = Field(default=False, description="true or false: continue training while one is written")


class Rendezvous(SpecModel):
    """How the nodes find each other, and how often a job restarts when a rank or a node fails."""

    id: JobName | None = Field(default=None, description=f"a name: {NAME_RULE}; unset: the job's")
    endpoint: Address | None = Field(
        default=None, description="the address or host name at which the others reach the first node; unset: detected"
    )
    port: Annotated[int, Field(ge=0, le=65535)] = Field(
        default=0, description="a number from 1 to 65535; 0: the first node picks a free one"
    )
    timeout_s: Annotated[float, Field(ge=1, le=86400)] = Field(
        default=TIMEOUT_S, description="seconds, 1 to 86400: how long to wait for all nodes"
    )
    silence_s: Annotated[float, Field(ge=3, le=3600)] = Field(
        default=SILENCE_S, description="seconds, 3 to 3600: a node that sends nothing for so long is lost"
    )
    max_restarts: Annotated[int, Field(ge=0, le=1000)] = Field(
        default=0, description="a whole number, 0 to 1000: how often all ranks restart when one fails"
    )
    min_nodes: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="a whole number, 1 or more: how many nodes suffice; unset: all"
    )
    max_nodes: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="a whole number, 1 or more: how many nodes run at most; unset: all"
    )

    @model_validator(mode="after")
    def _check_range(self) -> Self:
        if self.min_nodes is not None and self.max_nodes is not None and self.min_nodes > self.max_nodes:
            raise ValueError(f"min_nodes {self.min_nodes} is more than max_nodes {self.max_nodes}: lower it")
        return self

    @property
    def is_elastic(self) -> bool:
        """True when ranks may restart, or fewer than all nodes may run."""
        return self.max_restarts > 0 or self.min_nodes is not None or self.max_nodes is not None

    def fewest(self, there: int) -> int:
        """Return the smallest number of nodes that a round may have, of the ``there`` nodes of the spec."""
        return min(there, self.min_nodes or there, self.max_nodes or there)
