"""What no model in parts can do, and would do in silence."""

from __future__ import annotations

from torch import nn

from ..errors import SpecError

__all__ = ["require_fit"]


def require_fit(model: nn.Module, *, axis: str) -> None:
    """Raises: SpecError for what a model cannot do in parts, with the name of what does it.

    ``axis``: of the mesh, which cuts it: "tp" or "dp_shard".
    """
    otherwise = f"keep the model whole (dp_replicate in the place of {axis})"
    for name, module in model.named_modules():
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            continue
        where = name or "the model"
        if module.max_norm is not None:
            raise SpecError(
                f"{where} writes into its weight (max_norm={module.max_norm}), of which each rank has a part that "
                f"would not see it: {otherwise}"
            )
        if module.sparse and module.weight.requires_grad and axis == "dp_shard":
            raise SpecError(f"{where} has sparse gradients, which FSDP2 cannot send: sparse=False, or {otherwise}")
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            instead = "change gradients behind train_step"
            if axis == "tp":
                instead = "register it on named_parameters() of what parallelize returns, where it sees that of a part"
            raise SpecError(f"{name} has a hook on its gradient, which {axis} would drop: {instead}, or {otherwise}")
