"""The saved state of a learning rate scheduler, compared with the scheduler that is to take it.

torch's schedulers set every attribute that a state names, whatever its value: after a state of another kind, or with an
invalid value, the next step fails, or trains with an arbitrary learning rate.
"""

from __future__ import annotations

from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from ..errors import SpecError
from ..storage import shown

_INNER = "_schedulers"  # of schedulers that are composed of others
_OF_ANY_LENGTH = ("milestones", "_milestones")
_NO_LONGER = ("verbose",)  # attributes that torch's schedulers had, and some still have


def require_state(scheduler: Any, kind: str | None, saved: Any, name: str) -> None:
    """Check that ``saved`` is a state of ``scheduler``. Raises: SpecError when it is not.

    ``kind``: the saved class's name, None in older checkpoints, which do not have it; ``name``: the checkpoint's.
    """
    here = type(scheduler).__name__
    if kind is not None and kind != here:
        raise SpecError(f"{name} was saved with {shown(str(kind), most=40)}; the given scheduler is {here}")
    if wrong := _misfit(scheduler, scheduler.state_dict(), saved):
        raise SpecError(f"{name} has {wrong}, which does not fit the given {here}")


def _misfit(scheduler: Any, own: Any, saved: Any) -> str:
    """Return what of ``saved`` does not fit ``own``; empty when everything does."""
    is_of_torch = isinstance(scheduler, LRScheduler)
    if not isinstance(own, dict) or not isinstance(saved, dict):
        return "" if type(own) is type(saved) else f"a {type(saved).__name__} as its scheduler state"
    for key in map(str, saved.keys() - own.keys() - set(_NO_LONGER)):
        if hasattr(scheduler, key) or (is_of_torch and not key.startswith("_")):
            return f"{shown(key, most=40)!r} in its scheduler state"
    if not is_of_torch:
        return ""
    for key, value in own.items():
        if key not in saved:
            if key == _INNER or not (key.startswith("_") or key in _NO_LONGER):
                return f"no {key!r} in its scheduler state"
        elif not _is_like(value, saved[key], is_of_any_length=key in _OF_ANY_LENGTH):
            return f"{shown(repr(saved[key]), most=40)} as {key!r} in its scheduler state"
    inner = zip(getattr(scheduler, _INNER, ()), own.get(_INNER, ()), saved.get(_INNER, ()))
    return next((wrong for each in inner if (wrong := _misfit(*each))), "")


def _is_like(own: Any, saved: Any, *, is_of_any_length: bool) -> bool:
    """Return whether ``saved`` may be the same attribute at another time."""
    if own is None or saved is None:
        return True
    if isinstance(own, (list, tuple)):
        is_list = isinstance(saved, (list, tuple)) and (is_of_any_length or len(own) == len(saved))
        return is_list and all(_is_like(own[0], each, is_of_any_length=True) for each in saved if own)
    if _is_number(own):
        return _is_number(saved)
    return isinstance(saved, dict if isinstance(own, dict) else type(own))


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 1 << 63)
