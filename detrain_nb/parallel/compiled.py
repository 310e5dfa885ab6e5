"""Compiled parts of a model: they run uncompiled while a model is only inspected, and copies are compiled again."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module is compiled, by ``torch.compile(module)`` or ``module.compile()``."""
    return _is_wrapped(module) or module._compiled_call_impl is not None


def parts_of_compiled(model: nn.Module) -> set[str]:
    """Return the names of all modules inside compiled ones."""
    compiled = [(name, module) for name, module in model.named_modules() if is_compiled(module)]
    return {f"{name}.{part}" for name, module in compiled for part, _ in module.named_modules() if part}


def as_written() -> contextlib.AbstractContextManager[Any]:
    """Run everything uncompiled in the block: torch would mark for good what it cannot compile during an inspection."""
    if "torch._dynamo.eval_frame" not in sys.modules:  # nothing is compiled, and the import takes a second
        return contextlib.nullcontext()
    stance: contextlib.AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


def compile_again(copied: nn.Module) -> None:
    """Make a copy of a compiled module call itself, compiled with the same options, instead of the original."""
    if _is_wrapped(copied):
        copied._initialize()  # type: ignore[operator]
    elif (original := copied._compiled_call_impl) is not None:
        compile_call = _options_of(original) or torch.compile
        copied._compiled_call_impl = compile_call(copied._call_impl)


def run_before(module: nn.Module, hook: Callable[..., None]) -> None:
    """Call ``hook(module, args, kwargs)`` before the module, outside of its compiled code."""
    compiled = module._compiled_call_impl
    if compiled is None:
        module.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
        return

    def call(*args: Any, **kwargs: Any) -> Any:
        hook(module, args, kwargs)
        return compiled(*args, **kwargs)

    module._compiled_call_impl = call


def leave_as_written(copied: nn.Module) -> None:
    """Make a copy of a module call itself, uncompiled."""
    if _is_wrapped(copied):
        copied.__dict__["forward"] = copied._modules["_orig_mod"]
    elif copied._compiled_call_impl is not None:
        copied._compiled_call_impl = None


def _is_wrapped(module: nn.Module) -> bool:
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")
    return eval_frame is not None and isinstance(module, eval_frame.OptimizedModule)


def _options_of(compiled: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return the object that compiles with the options of ``compiled``; only that function holds it."""
    kind = sys.modules["torch._dynamo.eval_frame"].OptimizeContext
    cells = (cell.cell_contents for cell in compiled.__closure__ or ())
    return next((each for each in cells if isinstance(each, kind)), None)
