"""Code that a rank runs with a model of the zoo: it is laid out and trained, next to the whole model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from meshes import mesh_of
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from detrain_nb import parallel as par
from detrain_nb.parallel.tensor.apply import plan_of

from .entry import Entry, float_leaves, on
from .everything import ENTRIES
from .looks import first_difference, look_at

ROWS = 4  # of a replica
Part = tuple[dict[str, Any], Tensor]


def train(name: str, axes: dict[str, int], device: str = "cpu") -> dict[str, Any]:
    """Predict, train two steps and predict again; return the relative differences from the whole model.

    The whole model runs the same parts of the batch in sequence; the statistics of the first replica count. ``cut``:
    how many of its tensors tensor parallel ranks have parts of, and the number of all.
    """
    entry, mesh = ENTRIES[name], mesh_of(torch.device(device).type, **axes)
    model, whole = entry.model(), entry.model().to(device)
    is_pipeline = axes.get("pp", 1) > 1
    before = look_at(model) if is_pipeline else {}
    laid_out = par.parallelize(
        model,
        mesh,
        example_inputs=entry.inputs(2),
        loss=weighted,
        num_microbatches=2 if is_pipeline else 1,
        device=device,
    )
    found: dict[str, Any] = {"output": 0.0, "loss": 0.0, "gradient": 0.0}
    if difference := first_difference(before, look_at(model) if is_pipeline else {}):
        found["the model given"] = difference
    me = laid_out.replica
    replicas = _Replicas(whole, laid_out.num_replicas, me)
    optimizers = [_optimizer(entry, each) for each in (laid_out, whole)]
    for step in range(2):
        rows = ROWS * laid_out.num_replicas
        batch, weights = on(device, (entry.inputs(rows), torch.linspace(0.5, 1.5, rows) + step))
        mine = _cut(batch, weights, laid_out.num_replicas)[me]
        output = laid_out.predict(mine[0])
        right = replicas.predict(_cut(*mine, laid_out.num_microbatches))
        if laid_out.is_last:
            found["output"] = max(found["output"], _outputs_apart(output, right))
        laid_out.back_to_training()
        loss = laid_out.train_step(*mine)
        expected = replicas.train_step(_cut(batch, weights, laid_out.num_replicas), laid_out.num_microbatches)
        if loss is not None:
            found["loss"] = max(found["loss"], abs(float(full(loss) / expected) - 1))
        found["gradient"] = max(found["gradient"], _apart(laid_out, whole, lambda parameter: parameter.grad))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found["parameter"] = _apart(laid_out, whole, lambda parameter: parameter.detach())
    output = laid_out.predict(mine[0])  # from here on statistics too are the first replica's
    right = replicas.predict(_cut(*mine, laid_out.num_microbatches))
    if laid_out.is_last:
        found["output"] = max(found["output"], _outputs_apart(output, right))
    found["buffer"] = _buffers_apart(laid_out, replicas)
    if missing := _missing(laid_out, whole):
        found["on no rank"] = missing
    plan = plan_of(laid_out.modules[0])
    if plan is not None:
        found["cut"] = len(plan.layouts), len(dict(whole.named_parameters()))
    return found


class _Replicas:
    """The whole model in place of all replicas: one set of parameters, and buffers for each replica."""

    def __init__(self, whole: nn.Module, count: int, me: int) -> None:
        self.whole = whole
        self._buffers = [self._state() for _ in range(count)]
        self._me = me

    def mine(self) -> nn.Module:
        """Return the model with the buffers of this replica."""
        self._take(self._me)
        return self.whole

    def train_step(self, batches: Sequence[Part], num_microbatches: int) -> float:
        total = 0.0
        for replica, batch in enumerate(batches):
            self._take(replica)
            for inputs, weights in _cut(*batch, num_microbatches):
                loss = weighted(self.whole(**inputs), weights) / (num_microbatches * len(batches))
                loss.backward()
                total += float(loss.detach())
            self._buffers[replica] = self._state()
        return total

    @torch.no_grad()
    def predict(self, parts: Sequence[Part]) -> list[Tensor]:
        """Return predictions of the microbatches, joined as for a user.

        From here on all replicas have the buffers of the first one.
        """
        self._take(0)
        self._buffers = [self._state() for _ in self._buffers]
        modes = [module.training for module in self.whole.modules()]
        self.whole.eval()
        every = [float_leaves(self.whole(**inputs)) for inputs, _ in parts]
        for module, mode in zip(self.whole.modules(), modes):
            module.training = mode
        self._buffers[self._me] = self._state()
        return [torch.cat(leaves) if leaves[0].dim() else torch.stack(leaves).mean() for leaves in zip(*every)]

    def _state(self) -> list[Tensor]:
        return [buffer.clone() for buffer in self.whole.buffers()]

    def _take(self, replica: int) -> None:
        for buffer, value in zip(self.whole.buffers(), self._buffers[replica]):
            buffer.copy_(value)


def weighted(output: Any, weights: Tensor) -> Tensor:
    """Weight every number differently: with a plain mean many gradients would be almost zero."""
    total = weights.new_zeros(())
    for leaf in float_leaves(output):
        numbers = torch.view_as_real(leaf) if leaf.is_complex() else leaf.float()
        if numbers.dim() and len(numbers) == len(weights):
            of_rows = numbers.reshape(len(weights), -1)
            scale = torch.linspace(-1, 1, of_rows.shape[1], device=weights.device).sin()
            total = total + (((of_rows * scale).sum(1) + of_rows.square().mean(1)) * weights).mean()
        else:
            total = total + numbers.square().mean() * weights.mean()
    return total


def full(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor):  # on the CPU, as gloo fails where ranks share a GPU
        tensor = tensor.cpu().full_tensor().to(tensor.device)
    whole = tensor
    return whole.to_dense() if whole.is_sparse else whole


def _optimizer(entry: Entry, model: Any) -> torch.optim.Optimizer:
    # Without a large eps, rounding errors in a gradient make full steps. FSDP2 reports zero gradients as none.
    more = {"eps": 0.1, "weight_decay": 0.0} if entry.optimizer == "AdamW" else {}
    made: torch.optim.Optimizer = getattr(torch.optim, entry.optimizer)(list(model.parameters()), lr=1e-2, **more)
    return made


def _cut(batch: dict[str, Any], weights: Tensor, count: int) -> list[Part]:
    """Cut the tensors that have the batch's rows; everything else goes whole into each part."""
    rows, parts = len(weights), list[Part]()
    for index, part in enumerate(weights.chunk(count)):
        is_of_rows = {
            key: isinstance(each, Tensor) and each.dim() > 0 and len(each) == rows for key, each in batch.items()
        }
        parts.append(
            ({key: each.chunk(count)[index] if is_of_rows[key] else each for key, each in batch.items()}, part)
        )
    return parts


def _outputs_apart(output: Any, expected: Sequence[Tensor]) -> float:
    leaves = float_leaves(output)
    if len(leaves) != len(expected):
        return float("inf")
    return max((_relative(full(leaf), right) for leaf, right in zip(leaves, expected) if right.numel()), default=0.0)


def _relative(found: Tensor, expected: Tensor, *, least: float = 1e-12) -> float:
    """Return the largest relative difference; it never raises, as another rank would wait for this one."""
    is_alike = (found.shape, found.dtype) == (expected.shape, expected.dtype)
    if not is_alike or not torch.equal(found.isnan(), expected.isnan()):
        return float("inf")
    return float((found - expected).nan_to_num().abs().max()) / max(float(expected.nan_to_num().abs().max()), least)


def _apart(laid_out: par.ParallelModel, whole: nn.Module, of: Callable[[Tensor], Tensor | None]) -> float:
    """Return the largest difference, relative to its tensor or to a hundredth of all; a missing one is infinite."""
    references = {name: of(each) for name, each in whole.named_parameters(remove_duplicate=False)}
    references = {name: None if each is None else full(each) for name, each in references.items()}
    largest = max(float(each.abs().max()) for each in references.values() if each is not None and each.numel())
    plan, most = plan_of(laid_out.modules[0]), 0.0
    for name, parameter in laid_out.named_parameters():
        found, expected = of(parameter), references[name]
        if found is None:
            most = max(most, float("inf") if expected is not None and expected.any() else 0.0)
            continue
        if plan is not None:
            found = par.to_saved_order(name, found.cpu(), plan).to(found.device)  # on the CPU as in full()
        found = full(found)
        expected = torch.zeros_like(found) if expected is None else expected
        most = max(most, _relative(found, expected, least=1e-2 * largest))
    return most


def _buffers_apart(laid_out: par.ParallelModel, replicas: _Replicas) -> float:
    references, most = dict(replicas.mine().named_buffers(remove_duplicate=False)), 0.0
    for module in laid_out.modules:
        for name, buffer in module.named_buffers():
            pair = [each if each.dtype.is_floating_point else each.double() for each in (buffer, references[name])]
            if buffer.numel() and not buffer.is_meta and not buffer.is_complex():
                most = max(most, _relative(full(pair[0]), pair[1]))
    return most


def _missing(laid_out: par.ParallelModel, whole: nn.Module) -> str:
    """Return the parameters of the whole model that no rank has under any of their names.

    Collective: all ranks.
    """
    here = [name for name, _ in laid_out.named_parameters()]
    there = {name for names in laid_out.gather(here, of_one_copy=True) for name in names}
    names: dict[int, list[str]] = {}
    for name, parameter in whole.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return ", ".join(each[0] for each in names.values() if there.isdisjoint(each))
