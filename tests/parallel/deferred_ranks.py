"""Code that a test's ranks run: a deferred model laid out over a mesh, compared with one made as usual."""

from __future__ import annotations

import functools
import resource
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from families import OF_TRANSFORMERS
from meshes import mesh_of
from mixed_ranks import full, place_of
from models import GPT
from on_ranks import TokenLoss, tokens
from torch import Tensor, nn

from detrain_nb import parallel as par
from detrain_nb.parallel.tensor.apply import plan_of

SEED = 11


class Model(GPT):
    """A GPT with an initializer of its own, a non-persistent buffer and a persistent one."""

    def __init__(self, *, layers: int = 2, is_tied: bool = True) -> None:
        super().__init__(layers=layers, is_tied=is_tied)
        self.register_buffer("frequencies", 1 / 100 ** (torch.arange(0, 32, 2) / 32), persistent=False)
        self.register_buffer("scale", torch.rand(32))
        self.apply(initialize)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) * self.scale + torch.cat([self.frequencies, -self.frequencies])
        x = x + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        logits: Tensor = self.head(self.ln_f(x))
        return logits


def initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.3)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.5)


class LossOfLogits(TokenLoss):
    def forward(self, output: Any, targets: Tensor) -> Tensor:
        return super().forward(getattr(output, "logits", output), targets)


def make_family(family: str) -> nn.Module:
    import transformers

    return OF_TRANSFORMERS[family][0](transformers, "sdpa", layers=2)


def apart(
    axes: dict[str, int], *, other_seed: bool = False, family: str | None = None, **options: Any
) -> dict[str, Any]:
    """Lay out a deferred model and one made as usual; compare their values, buffers and two losses.

    ``other_seed``: every rank but the first has a different seed. ``family``: a model of transformers instead of
    `Model`.
    """
    layers = 4 if "schedule" in options else 2  # a rank has two of these stages
    build: Callable[[], nn.Module] = functools.partial(Model, layers=layers)
    if family is not None:
        build = functools.partial(make_family, family)
    mesh = mesh_of(**axes)
    num_replicas, me = place_of(mesh)
    x, y = (tokens(8 * num_replicas, seed).chunk(num_replicas)[me] for seed in (1, 2))
    losses, laid_out = {}, {}
    makers: dict[str, Callable[[], nn.Module]] = {"usual": build, "deferred": lambda: par.deferred(build)}
    for kind, make in makers.items():
        torch.manual_seed(SEED + (dist.get_rank() if other_seed and kind == "deferred" else 0))
        model = make()
        state = torch.get_rng_state()
        laid_out[kind] = par.parallelize(
            model,
            mesh,
            example_inputs=as_batch(tokens(2, 1), family),
            loss=LossOfLogits(),
            num_microbatches=4,
            device="cpu",
            **options,
        )
        assert torch.equal(torch.get_rng_state(), state) or "tp" in axes
    usual, mine = (dict(each.named_parameters()) for each in laid_out.values())
    assert list(usual) == list(mine)
    different = [
        name
        for name, parameter in mine.items()
        if type(parameter) is not type(usual[name])
        or not torch.equal(full(parameter.detach()), full(usual[name].detach()))
        or parameter.is_meta
    ]
    buffers = [[dict(module.named_buffers()) for module in each.modules] for each in laid_out.values()]
    different += [
        name for whole, own in zip(*buffers) for name, buffer in own.items() if not torch.equal(buffer, whole[name])
    ]
    for kind, each in laid_out.items():
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        losses[kind] = []
        for _ in range(2):
            loss = each.train_step(as_batch(x, family), y)
            optimizer.step()
            optimizer.zero_grad()
            losses[kind].append(None if loss is None else float(full(loss)))
    num_buffers = sum(len(own) for own in buffers[1])
    plan = plan_of(laid_out["deferred"].modules[0])
    return {
        "different": different,
        "losses": losses,
        "buffers": num_buffers,
        "parameters": len(mine),
        "packed": 0 if plan is None else len(plan.packed),
    }


def as_batch(ids: Tensor, family: str | None) -> Any:
    return ids if family is None else {"input_ids": ids, "use_cache": False}


def lay_out(make: Callable[[], nn.Module], **axes: int) -> par.ParallelModel:
    mesh = mesh_of(**axes)
    return par.parallelize(make(), mesh, example_inputs=tokens(2, 1), loss=TokenLoss(), device="cpu")


class Wide(nn.Module):
    """A model of 100 million parameters, in tensors of 4 million."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2048, 2048, bias=False) for _ in range(24))
        self.apply(initialize)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


def peak_growth() -> tuple[int, int]:
    """Make and shard `Wide`; return the growth of this rank's peak memory, and the bytes of the whole model."""
    mesh = mesh_of(dp_shard=4)
    lay_out(Model, dp_shard=4)  # imports and compiles beforehand what would count as growth
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    torch.manual_seed(SEED)
    model = par.deferred(Wide)
    whole = sum(parameter.nbytes for parameter in model.parameters())
    laid_out = par.parallelize(model, mesh, example_inputs=torch.zeros(1, 2048), device="cpu")
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert not any(parameter.is_meta for parameter in laid_out.parameters())
    return grown * 1024, whole


class Scaled(Model):
    def __init__(self, factor: float = 1) -> None:
        super().__init__()
        self.scale *= factor
