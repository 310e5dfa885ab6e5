"""How the ranks share the model: the axes of their mesh, and what is done along them."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from ..plan.choices import SCHEDULES, ActivationsKept, PrecisionName, ScheduleName, SyncAlgorithm
from .model import SpecModel
from .words import is_path, only

_Axis = Annotated[int, Field(ge=-1, le=1 << 16)]
_AXIS = "a number of ranks, 1 or more, or -1 for what is left"


class Parallelism(SpecModel):
    """The mesh, from its outermost axis to the innermost, and how `parallelize` lays the model out over it."""

    pp: _Axis = Field(default=1, description=f"pipeline stages: {_AXIS}")
    dp_replicate: _Axis = Field(default=1, description=f"whole copies of the model: {_AXIS}")
    dp_shard: _Axis = Field(default=-1, description=f"shards of parameters and optimizer state: {_AXIS}")
    tp: _Axis = Field(default=1, description=f"parts of each layer: {_AXIS}")
    schedule: ScheduleName | Annotated[str, only(lambda text: is_path(text) and text.endswith(".csv"))] = Field(
        default="1F1B", description=f"who runs which stage when: {', '.join(SCHEDULES)}, or a file *.csv"
    )
    microbatches: Annotated[int, Field(ge=1, le=1 << 20)] | None = Field(
        default=None, description="into how many parts a batch is cut, 1 or more; none: as many as there are stages"
    )
    activations: ActivationsKept = Field(
        default="none", description='what is computed again in the backward pass: "none", "selective" or "full"'
    )
    compile: bool = Field(default=False, description="true or false: each block by torch.compile")
    precision: PrecisionName | None = Field(default=None, description='what is computed in: "bf16" or "fp32"')
    algorithm: SyncAlgorithm = Field(default="sync", description='how replicas agree: "sync"')

    @model_validator(mode="after")
    def _check(self) -> Self:
        open_axes = [axis for axis, size in self.axes.items() if size == -1]
        if zero := [axis for axis, size in self.axes.items() if size == 0]:
            raise ValueError(f"{zero[0]} is 0: give {_AXIS}")
        if len(open_axes) > 1:
            raise ValueError(
                f"{' and '.join(open_axes)} are both -1: only one axis has what is left, give the others a number"
            )
        if self.algorithm != "sync":
            raise ValueError(f"algorithm {self.algorithm!r} is not available yet: give 'sync'")
        return self

    @property
    def axes(self) -> dict[str, int]:
        """The size of every axis; -1 is what is left."""
        return {"pp": self.pp, "dp_replicate": self.dp_replicate, "dp_shard": self.dp_shard, "tp": self.tp}
