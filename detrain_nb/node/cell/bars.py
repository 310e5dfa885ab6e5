"""tqdm's notebook bars as text: they would be widgets, and a rank has no front end to show them."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from typing import Any

_MODULE = "tqdm.notebook"


def use_text_bars() -> None:
    """Give ``tqdm.notebook`` text bars from now on."""
    sys.modules.pop(_MODULE, None)
    sys.meta_path.insert(0, _TextBars())


class _TextBars(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """A finder and loader of that one module, whatever its file contains."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.util.spec_from_loader(fullname, self) if fullname == _MODULE else None

    def exec_module(self, module: types.ModuleType) -> None:
        from tqdm import std

        class tqdm_notebook(std.tqdm):  # type: ignore[misc]  # it has no types
            """A text bar; arguments for the widget are ignored."""

            def __init__(self, *args: object, display: bool = True, **kwargs: object) -> None:
                super().__init__(*args, **kwargs)

        def tnrange(*args: int, **kwargs: Any) -> tqdm_notebook:
            return tqdm_notebook(range(*args), **kwargs)

        vars(module).update(tqdm_notebook=tqdm_notebook, tqdm=tqdm_notebook, tnrange=tnrange, trange=tnrange)
