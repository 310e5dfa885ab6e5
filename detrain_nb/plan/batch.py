"""A global batch, split over replicas and into microbatches."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import SpecError
from .stages import StageLayout


@dataclass(frozen=True)
class Batch:
    """The samples of one step: ``replicas`` x ``microbatches`` x ``micro_size`` of them."""

    replicas: int
    microbatches: int
    micro_size: int

    @property
    def replica_size(self) -> int:
        """The number of samples per replica and step, which is the batch size of its loader."""
        return self.microbatches * self.micro_size

    @property
    def global_size(self) -> int:
        """The number of samples of one step, over all replicas."""
        return self.replicas * self.replica_size

    def __str__(self) -> str:
        factors = [(self.replicas, "replicas"), (self.microbatches, "microbatches"), (self.micro_size, "samples")]
        parts = " x ".join(f"{count} {what}" for count, what in factors if count > 1)
        return f"batch {self.global_size} = {parts}" if " x " in parts else f"batch {self.global_size}"


def split_batch(
    global_size: int,
    *,
    replicas: int = 1,
    microbatches: int | None = None,
    stages: StageLayout | None = None,
    pipeline_ranks: int = 1,
) -> Batch:
    """Split a batch over replicas and into microbatches.

    Without ``microbatches``: one, or for a pipeline of ``stages`` the usual number of its schedule, or the largest
    smaller number that divides the batch.
    Raises: SpecError when a number is below 1, the batch is not divisible, or the schedule cannot run the microbatches.
    """
    if global_size < 1:
        raise SpecError(f"batch size {global_size}: must be at least 1")
    size, rest = divmod(global_size, replicas)
    if rest:
        raise SpecError(
            f"batch size {global_size} is not divisible by {replicas} replicas: give {_near(global_size, replicas)}"
        )
    num_stages = stages.num_stages(pipeline_ranks) if stages else 1
    if microbatches is None:
        microbatches = _most_that_divide(size, stages, num_stages, pipeline_ranks) if stages else 1
    if stages:
        stages.require_microbatches(microbatches, num_stages=num_stages, num_ranks=pipeline_ranks)
    elif microbatches < 1:
        raise SpecError(f"{microbatches} microbatches: must be at least 1")
    if size % microbatches:
        cut = f"{replicas} replicas x {microbatches} microbatches" if replicas > 1 else f"{microbatches} microbatches"
        near = _near(global_size, replicas * microbatches)
        raise SpecError(
            f"batch size {global_size} is not divisible by {cut}: give {near}, or a number of microbatches that "
            f"divides {size}"
        )
    return Batch(replicas, microbatches, size // microbatches)


def _most_that_divide(size: int, stages: StageLayout, num_stages: int, pipeline_ranks: int) -> int:
    """Return the most microbatches, from the usual number down to the number of stages, that divide ``size``.

    When none does, return the usual number, which the error then names.
    """
    usual = stages.num_microbatches(num_stages)
    fitting = (count for count in range(usual, num_stages - 1, -1) if size % count == 0)
    return next((count for count in fitting if stages.accepts(count, num_ranks=pipeline_ranks)), usual)


def _near(size: int, divisor: int) -> str:
    """Format the multiples of ``divisor`` next to ``size``: ``16 or 24``."""
    below = size // divisor * divisor
    return f"{below} or {below + divisor}" if below else str(divisor)
