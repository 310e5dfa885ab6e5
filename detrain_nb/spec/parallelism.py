"""How the ranks share the model: the axes of their mesh, and what happens along them."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, model_validator

from ..plan.choices import SCHEDULES, ActivationsKept, PrecisionName, ScheduleName, SyncAlgorithm
from .model import SpecModel
from .words import NODE_PATH, check_node_path, is_path, like, only

_MOST_RANKS, _MOST_MICROBATCHES = 1 << 16, 1 << 20
_Axis = Annotated[
    int,
    Field(ge=-1, le=_MOST_RANKS),
    WithJsonSchema({"type": "integer", "minimum": -1, "maximum": _MOST_RANKS, "not": {"const": 0}}),
]
_ANY_CASE = "|".join("".join(f"[{char.lower()}{char.upper()}]" for char in name) for name in SCHEDULES)
_ScheduleFile = Annotated[
    str,
    only(lambda text: is_path(text) and text.endswith(".csv")),
    like(rf"{_ANY_CASE}|(?=.*\.csv$){NODE_PATH}"),  # names are accepted in any case
]
_AXIS = f"a number of ranks, 1 to {_MOST_RANKS:,}, or -1 for the rest"


def _as_written(value: Any) -> Any:
    """Return the name of a schedule as torch spells it, in whatever case it is given."""
    return next((name for name in SCHEDULES if isinstance(value, str) and name.lower() == value.lower()), value)


class Parallelism(SpecModel):
    """The mesh, from its outermost to its innermost axis, and how `parallelize` splits the model over it."""

    pp: _Axis = Field(default=1, description=f"{_AXIS}: pipeline stages")
    dp_replicate: _Axis = Field(default=1, description=f"{_AXIS}: whole copies of the model")
    dp_shard: _Axis = Field(default=-1, description=f"{_AXIS}: shards of parameters and optimizer state")
    tp: _Axis = Field(default=1, description=f"{_AXIS}: parts of each layer")
    schedule: Annotated[ScheduleName | _ScheduleFile, BeforeValidator(_as_written), AfterValidator(check_node_path)] = (
        Field(default="1F1B", description=f"{', '.join(SCHEDULES)}, or a file *.csv: which rank runs which stage when")
    )
    microbatches: Annotated[int, Field(ge=1, le=_MOST_MICROBATCHES)] | None = Field(
        default=None,
        description=f"a whole number, 1 to {_MOST_MICROBATCHES:,}: the parts of a batch; unset: as the schedule needs",
    )
    activations: ActivationsKept = Field(
        default="none", description='"none", "selective" or "full": what the backward pass recomputes'
    )
    compile: bool = Field(default=False, description="true or false: compile each block with torch.compile")
    precision: PrecisionName | None = Field(default=None, description='"bf16" or "fp32": the dtype of the computation')
    algorithm: Annotated[SyncAlgorithm, WithJsonSchema({"type": "string", "const": "sync"})] = Field(
        default="sync", description='"sync": replicas synchronize in every step'
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        open_axes = [axis for axis, size in self.axes.items() if size == -1]
        if zero := [axis for axis, size in self.axes.items() if size == 0]:
            raise ValueError(f"{zero[0]} is 0: give {_AXIS}")
        if len(open_axes) > 1:
            raise ValueError(
                f"{' and '.join(open_axes)} are both -1: only one axis can have the rest, give the others a number"
            )
        if self.algorithm != "sync":
            raise ValueError(f"algorithm {self.algorithm!r} is not available yet: give 'sync'")
        return self

    @property
    def axes(self) -> dict[str, int]:
        """The size of every axis; -1 is the rest."""
        return {"pp": self.pp, "dp_replicate": self.dp_replicate, "dp_shard": self.dp_shard, "tp": self.tp}
