"""Sequence parallelism: between the layers of a tensor plan each rank has its part of the sequence, norms included."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import nn

from ...errors import SpecError
from .plan import Pair, SequenceParts, TensorPlan, is_inside
from .proof import find_fault
from .proof_runs import Call

_SEQUENCE_DIM = 1  # after that of the batch


def with_sequence_parts(
    plan: TensorPlan, model: nn.Module, call: Call, *, entered: Sequence[str], parent_of: Callable[[Pair], str]
) -> TensorPlan:
    """Return ``plan`` with the sequence, dimension 1, cut from the first of the repeated blocks to the end of the last.

    ``entered``: the modules in the order in which they run; ``parent_of``: returns the module that contains a pair. The
    whole model is proved. Raises: SpecError if the sequence cannot be cut.
    """
    blocks = _repeated_blocks(plan, entered)
    if not blocks:
        raise SpecError(
            "sequence_parallel needs cut layers in repeated blocks, but none were found; leave sequence_parallel out"
        )
    for name in [name for name in plan.alone if is_inside(name, blocks)]:
        plan.replicate(name).reasons[name] = "its input is a part of the sequence"
    owners = Counter(
        parent_of(replace(pair, row=pair.columns[0])) for pair in plan.pairs if is_inside(pair.row, blocks)
    )
    gathering = tuple(name for name, count in owners.items() if count == 1 and name not in blocks)
    cut = {name for pair in plan.pairs for name in pair.names}
    summed = tuple(
        name for name in plan.modules if name not in cut and is_inside(name, blocks) and not is_inside(name, gathering)
    )
    found = replace(plan, sequence=SequenceParts(tuple(blocks), _SEQUENCE_DIM, gathering, summed))
    fault = find_fault(model, replace(found, shard_head=None), call)
    if fault is not None:
        raise SpecError(f"the sequence cannot be cut between layers: not proved: {fault}; leave out sequence_parallel")
    return found


def _repeated_blocks(plan: TensorPlan, entered: Sequence[str]) -> list[str]:
    """Return the members, in running order, of the list that contains most of the pairs."""
    lists = Counter(found.group(1) for pair in plan.pairs if (found := re.match(r"(.*?)(?:^|\.)\d+\.", pair.row)))
    if not lists:
        return []
    ((prefix, _),) = lists.most_common(1)
    pattern = re.compile(re.escape(f"{prefix}." if prefix else "") + r"\d+")
    return [name for name in dict.fromkeys(entered) if pattern.fullmatch(name)]
