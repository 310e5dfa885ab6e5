"""How long to train, with what, and how often to report."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from ..plan.choices import SCHEDULERS, SchedulerName
from .model import SpecModel
from .words import ONE_LINE, Module, is_one_line, like, only

_MOST = 10**12
_Count = Annotated[int, Field(ge=1, le=_MOST)]
_COUNT = f"a whole number, 1 to {_MOST:,}"


class Training(SpecModel):
    """What a script reads with ``job_spec().training``; fields that are None are up to the script."""

    epochs: _Count | None = Field(default=None, description=f"{_COUNT}: passes over the data")
    steps: _Count | None = Field(default=None, description=f"{_COUNT}: steps of the optimizer")
    batch_size: _Count | None = Field(default=None, description=f"{_COUNT}: samples per step, over all replicas")
    learning_rate: Annotated[float, Field(gt=0)] = Field(default=1e-3, description="a number above 0")
    optimizer: Module = Field(
        default="adamw", description="the name of an optimizer in torch.optim, such as adamw or sgd"
    )
    loss: Annotated[str, only(lambda text: bool(text) and is_one_line(text)), like(f"(?=.){ONE_LINE}")] | None = Field(
        default=None, description="a name that the script knows, such as cross_entropy"
    )
    scheduler: SchedulerName | None = Field(
        default=None, description=f"{', '.join(SCHEDULERS)}: how the learning rate changes"
    )
    warmup_steps: Annotated[int, Field(ge=0, le=_MOST)] = Field(
        default=0, description=f"a whole number, 0 to {_MOST:,}: steps in which the learning rate rises"
    )
    clip: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="a number above 0: the maximum norm of all gradients together"
    )
    seed: Annotated[int, Field(ge=0, lt=1 << 32)] = Field(default=0, description="a whole number, 0 to 4294967295")
    log_every: _Count = Field(default=10, description=f"{_COUNT}: steps between two lines of metrics")
    evaluate_every: _Count | None = Field(default=None, description=f"{_COUNT}: steps between two evaluations")
    dev: bool = Field(default=False, description="true or false: three steps and no checkpoint, to try a script")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.epochs is not None and self.steps is not None:
            raise ValueError(f"epochs {self.epochs} and steps {self.steps} are both given: leave out one")
        if self.steps is not None and self.warmup_steps > self.steps:
            raise ValueError(f"warmup_steps {self.warmup_steps} is more than steps {self.steps}: lower it")
        return self
