"""The variables predefined on every rank, and a check whether a cell has overwritten one."""

from __future__ import annotations

from typing import Any

import torch


class Given:
    """The predefined variables of one rank, in ``namespace``."""

    def __init__(self, namespace: dict[str, Any], **values: Any) -> None:
        self._namespace = namespace
        self._values: dict[str, Any] = {}
        self._told: set[str] = set()
        self.set(**values)

    def set(self, **values: Any) -> None:
        """Set them, or set them again."""
        self._values.update(values)
        self._namespace.update(values)

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def hide(self, hidden: dict[str, Any]) -> None:
        """Put them back into IPython's hidden names after ``%reset``, which restores variables from there."""
        for name, value in self._values.items():
            hidden.setdefault(name, value)

    def newly_overwritten(self) -> list[str]:
        """Return the overwritten ones; each is returned once."""
        found = [name for name in self._values if name not in self._told and not self._is_kept(name)]
        self._told.update(found)
        return found

    def _is_kept(self, name: str) -> bool:
        given, value = self._values[name], self._namespace.get(name)
        if isinstance(given, int):
            return isinstance(value, int) and value == given
        if isinstance(given, torch.device):
            return _is_device(value, given)
        return value is given


def _is_device(value: object, given: torch.device) -> bool:
    """Return whether it is the same device, also as "cuda" or "cpu": the rank's own is the current one."""
    try:
        device = torch.device(value) if isinstance(value, str) else value
    except RuntimeError:
        return False
    if not isinstance(device, torch.device):
        return False
    return device.type == given.type and device.index in (None, given.index or 0)
