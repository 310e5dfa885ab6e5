"""Compiled parts of a model: they run as written where we only look, and copies of them are compiled again."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def is_compiled(module: nn.Module) -> bool:
    """By ``torch.compile(module)``, or by ``module.compile()``."""
    return _is_wrapped(module) or module._compiled_call_impl is not None


def parts_of_compiled(model: nn.Module) -> set[str]:
    """The names of all modules inside of compiled ones."""
    compiled = [(name, module) for name, module in model.named_modules() if is_compiled(module)]
    return {f"{name}.{part}" for name, module in compiled for part, _ in module.named_modules() if part}


def as_written() -> contextlib.AbstractContextManager[Any]:
    """In here nothing is compiled: torch would take what only looks at a model for what it cannot compile, for good."""
    if "torch._dynamo.eval_frame" not in sys.modules:  # nobody has compiled anything; importing it takes a second
        return contextlib.nullcontext()
    stance: contextlib.AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


def compile_again(copied: nn.Module) -> None:
    """Have a copy of a module call itself, with the options of the original, which it would call otherwise."""
    if _is_wrapped(copied):
        copied._initialize()  # type: ignore[operator]
    elif (original := copied._compiled_call_impl) is not None:
        compile_call = _options_of(original) or torch.compile
        copied._compiled_call_impl = compile_call(copied._call_impl)


def run_before(module: nn.Module, hook: Callable[..., None]) -> None:
    """Call ``hook(module, args, kwargs)`` before the module, and never as a part of what is compiled of it."""
    compiled = module._compiled_call_impl
    if compiled is None:
        module.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
        return

    def call(*args: Any, **kwargs: Any) -> Any:
        hook(module, args, kwargs)
        return compiled(*args, **kwargs)

    module._compiled_call_impl = call


def leave_as_written(copied: nn.Module) -> None:
    """Have a copy of a module call itself, uncompiled."""
    if _is_wrapped(copied):
        copied.__dict__["forward"] = copied._modules["_orig_mod"]
    elif copied._compiled_call_impl is not None:
        copied._compiled_call_impl = None


def _is_wrapped(module: nn.Module) -> bool:
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")
    return eval_frame is not None and isinstance(module, eval_frame.OptimizedModule)


def _options_of(compiled: Callable[..., Any]) -> Callable[..., Any] | None:
    """What compiles as this function was; torch keeps it in the function alone."""
    kind = sys.modules["torch._dynamo.eval_frame"].OptimizeContext
    cells = (cell.cell_contents for cell in compiled.__closure__ or ())
    return next((each for each in cells if isinstance(each, kind)), None)
