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
            "has a user or password in it, and a spec is stored: leave that out, and name a variable in secrets that "
            "lets the script in"
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
URL = "a path or an fsspec URL, as s3://bucket/folder, on one line; keys and passwords stay out of it"


class _Stored(SpecModel):
    url: _NodeUrl = Field(description=URL)
    format: _Word | None = Field(default=None, description="a word for how it is written, as parquet or safetensors")
    chunks: _Chunks = Field(default=(), description="a list of the names of its parts, each once")


class Data(_Stored):
    """What is trained on."""


class Model(_Stored):
    """What is trained, where it is not made anew."""


class Checkpoint(SpecModel):
    """Where checkpoints go, how often, and whether a job goes on from them."""

    url: _NodeUrl = Field(description=URL)
    interval: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="a whole number, 1 or more: steps between two; none: one at the end"
    )
    keep: Annotated[int, Field(ge=1)] | Literal["all"] = Field(
        default=3, description='a whole number, 1 or more: so many of the newest stay; or "all"'
    )
    resume: bool = Field(default=True, description="true or false: go on from the newest one that is there")
    asynchronous: bool = Field(default=False, description="true or false: train on while one is written")


class Rendezvous(SpecModel):
    """How the nodes find each other, and how often a job begins anew when a rank or a node fails."""

    id: JobName | None = Field(default=None, description=f"a name: {NAME_RULE}; none: the job's")
    endpoint: Address | None = Field(
        default=None, description="the address or host name at which the others reach the first node; none: found out"
    )
    port: Annotated[int, Field(ge=0, le=65535)] = Field(
        default=0, description="a number from 1 to 65535; 0: the first node picks a free one"
    )
    timeout_s: Annotated[float, Field(ge=1, le=86400)] = Field(
        default=TIMEOUT_S, description="seconds, 1 to 86400: within them all nodes come"
    )
    silence_s: Annotated[float, Field(ge=3, le=3600)] = Field(
        default=SILENCE_S, description="seconds, 3 to 3600: a node that says nothing for so long is lost"
    )
    max_restarts: Annotated[int, Field(ge=0, le=1000)] = Field(
        default=0, description="a whole number, 0 to 1000: how often all ranks begin anew when one fails"
    )
    min_nodes: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="a whole number, 1 or more: so many nodes suffice; none: all"
    )
    max_nodes: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="a whole number, 1 or more: there can be so many nodes; none: all"
    )

    @model_validator(mode="after")
    def _check_range(self) -> Self:
        if self.min_nodes is not None and self.max_nodes is not None and self.min_nodes > self.max_nodes:
            raise ValueError(f"min_nodes {self.min_nodes} is more than max_nodes {self.max_nodes}: lower it")
        return self

    @property
    def is_elastic(self) -> bool:
        """Ranks may begin anew, or nodes be fewer than all."""
        return self.max_restarts > 0 or self.min_nodes is not None or self.max_nodes is not None

    def fewest(self, there: int) -> int:
        """How few of the nodes that are ``there`` a round may have."""
        return min(there, self.min_nodes or there, self.max_nodes or there)
