"""Code that a test's ranks run: two models that train each other in a custom loop, and losses over whole batches."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from meshes import mesh_of
from on_ranks import draw, made
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from detrain_nb import parallel as par

Call = Callable[[Tensor], Tensor]


def maker() -> nn.Module:
    return made(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8)))


def judge() -> nn.Module:
    return made(nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(), nn.Linear(16, 1)))


def train_each_other(make: Call, judges: Call, parameters: tuple[Any, Any], rows: slice) -> None:
    """Train three steps on ``rows`` of the batch."""
    makes, tells = (torch.optim.SGD(each, lr=0.1) for each in parameters)
    for step in range(3):
        real, noise = draw(8, 8, seed=step)[rows], draw(8, 4, seed=10 + step)[rows]
        tells.zero_grad()
        (F.softplus(-judges(real)).mean() + F.softplus(judges(make(noise).detach())).mean()).backward()
        tells.step()
        makes.zero_grad()
        F.softplus(-judges(make(noise))).mean().backward()
        makes.step()


def apart_after_own_loop(axes: dict[str, int]) -> float:
    """Return the largest difference of a parameter from those of whole models trained on all rows."""
    mesh = mesh_of(**axes)
    models, wholes = (maker(), judge()), (maker(), judge())
    make, judges = (
        par.parallelize(model, mesh, example_inputs=x, device="cpu")
        for model, x in zip(models, (draw(2, 4), draw(2, 8)))
    )
    is_parted = "tp" not in axes
    rows = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4) if is_parted else slice(8)
    train_each_other(make, judges, (list(make.parameters()), list(judges.parameters())), rows)
    train_each_other(*wholes, (wholes[0].parameters(), wholes[1].parameters()), slice(8))
    pairs = (
        (parameter.detach(), dict(whole.named_parameters())[name])
        for laid_out, whole in zip((make, judges), wholes)
        for name, parameter in laid_out.named_parameters()
    )
    return max(float((_full(own) - other).abs().max()) for own, other in pairs)


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def told_of(act: Callable[[], Any]) -> list[str]:
    """Return the warnings of this package; torch's schedules emit others."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        act()
    return [
        told for each in caught if "the loss of a batch" in (told := str(each.message)) or "was called directly" in told
    ]


def call_past(axes: dict[str, int]) -> list[str]:
    model = maker()
    par.parallelize(model, mesh_of(**axes), example_inputs=draw(2, 4), device="cpu")
    return told_of(lambda: model(draw(4, 4)).sum().backward())


def call_stages() -> None:
    par.parallelize(maker(), mesh_of(pp=2), example_inputs=draw(2, 4), device="cpu")(draw(4, 4))


def gathered(output: Tensor, target: Tensor) -> Tensor:
    """A contrastive loss over the rows of all replicas."""
    every = [torch.empty_like(output) for _ in range(dist.get_world_size())]
    dist.all_gather(every, output.detach())
    return F.cross_entropy(output @ torch.cat(every).T, dist.get_rank() * len(output) + torch.arange(len(output)))


WEIGHTS = torch.tensor([0.1, 1.0, 2.0, 0.5, 3.0, 0.2, 1.5, 0.7])
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "contrastive": lambda output, target: F.cross_entropy(output @ output.T, torch.arange(len(output))),
    "gathered": gathered,
    "root": lambda output, target: (output[:, 0] - target).square().mean().sqrt(),
    "weights": lambda output, target: F.cross_entropy(output, target, weight=WEIGHTS),
    "sum": lambda output, target: F.cross_entropy(output, target, reduction="sum"),
    "rows": lambda output, target: F.cross_entropy(1 * output, target),
    "random": lambda output, target: F.cross_entropy(F.dropout(output), target),
    "rough": lambda output, target: F.cross_entropy(output.bfloat16(), target),
}


def train_with(loss: str, axes: dict[str, int], num_microbatches: int, rows: int = 8) -> list[str]:
    """Evaluate and train one step; return the warnings of both."""
    x, target = draw(rows, 4), torch.arange(rows) % 8
    model = par.parallelize(
        maker(),
        mesh_of(**axes),
        example_inputs=draw(1, 4),
        loss=LOSSES[loss],
        num_microbatches=num_microbatches,
        device="cpu",
    )
    before = torch.get_rng_state()
    told = told_of(lambda: model.evaluate(x, target))
    assert loss == "random" or torch.equal(before, torch.get_rng_state())
    return told + told_of(lambda: model.train_step(x, target))


class Critic(nn.Module):
    """Blocks whose layers can be cut, and one number for each row."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.down = nn.LayerNorm(16), nn.Linear(32, 16)
            self.gate, self.up = nn.Linear(16, 32), nn.Linear(16, 32)

        def forward(self, x: Tensor) -> Tensor:
            normed = self.norm(x)
            result: Tensor = x + self.down(F.silu(self.gate(normed)) * self.up(normed))
            return result

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(self.Block(), self.Block())
        self.head = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.blocks(x))
        return result


def with_penalty(model: Call, x: Tensor) -> None:
    x = x.clone().requires_grad_()
    output = model(x)
    (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    (output.mean() + 10 * (gradient.norm(dim=-1) - 1).square().mean()).backward()


def twice_each(model: Call, x: Tensor) -> None:
    real, fake = model(x), model(0.5 * x)
    real.square().mean().backward()
    (fake - 1).square().mean().backward()


def twice_from_one(model: Call, x: Tensor) -> None:
    loss = model(x).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()


def penalty_apart(model: Call, x: Tensor) -> None:
    x = x.clone().requires_grad_()
    output = model(x)
    (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    output.mean().backward(retain_graph=True)
    gradient.square().mean().backward()


def penalty_alone(model: Call, x: Tensor) -> None:
    """Add a gradient penalty that gives the last bias no gradient, after a backward pass of the output."""
    model(x).mean().backward()
    for _ in range(2):
        x = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        gradient.square().mean().backward()


def kept_as_a_graph(model: Call, x: Tensor) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(x).mean().backward(create_graph=True)


def siamese(model: Call, x: Tensor) -> None:
    with torch.no_grad():
        target = model(x.flip(1))
    one, other = model(x), model(0.5 * x + 0.1)
    (one - other - target).square().mean().backward()


def accumulated(model: Call, x: Tensor) -> None:
    model(2 * x)  # no backward pass follows this call
    for part in (x, x.flip(1), 0.5 * x):
        model(part).square().mean().backward()


def attacked(model: Call, x: Tensor) -> None:
    x = x.clone().requires_grad_()
    loss = model(x).square().mean()
    (gradient,) = torch.autograd.grad(loss, x, retain_graph=True)
    model((x + 0.1 * gradient.sign()).detach()).square().mean().backward()
    loss.backward()


def written_into(model: Call, x: Tensor) -> None:
    output = model(x)
    output += 1
    output[:, 0] *= 3
    output.view(-1).square().mean().backward()


LOOPS: dict[str, Callable[[Call, Tensor], None]] = {
    "penalty": with_penalty,
    "twice each": twice_each,
    "twice from one": twice_from_one,
    "penalty apart": penalty_apart,
    "penalty alone": penalty_alone,
    "kept as a graph": kept_as_a_graph,
    "siamese": siamese,
    "accumulated": accumulated,
    "attacked": attacked,
    "written into": written_into,
}


def apart_after_loop(loop: str, axes: dict[str, int], **options: Any) -> float:
    """Return the largest relative difference of a gradient from the mean of both halves' gradients."""
    model, whole = made(Critic()), made(Critic())
    laid_out = par.parallelize(model, mesh_of(**axes), example_inputs=draw(2, 6, 16), device="cpu", **options)
    halves = draw(4, 6, 16).chunk(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "Grad strides")  # a warning of torch for second-order gradients
        for _ in range(2):
            LOOPS[loop](laid_out, torch.cat(halves) if "tp" in axes else halves[dist.get_rank()])
    for part in 2 * ([torch.cat(halves)] if "tp" in axes else halves):
        LOOPS[loop](whole, part)
    expected = {name: each.grad / (1 if "tp" in axes else 2) for name, each in whole.named_parameters()}
    return max(
        float((_full(each.grad) - expected[name]).abs().max() / expected[name].abs().max())
        for name, each in laid_out.named_parameters()
    )


def apart_after_thaw(frozen: str, axes: dict[str, int], *, is_called: bool) -> float:
    """Like ``apart_after_loop``, with a part of the model frozen during parallelize and trained later."""
    model, whole = made(Critic()), made(Critic())
    for each in (model, whole):
        each.get_submodule(frozen).requires_grad_(False)
    laid_out = par.parallelize(model, mesh_of(**axes), example_inputs=draw(2, 6, 16), loss=F.mse_loss, device="cpu")
    halves, targets = draw(4, 6, 16).chunk(2), draw(4, 6, 1, seed=1).chunk(2)
    own = dist.get_rank()
    for each in (model, whole):
        each.requires_grad_(True)
    for _ in range(2):
        for x, target in zip(halves, targets):
            (F.mse_loss(whole(x), target) / 2).backward()
        if is_called:
            F.mse_loss(laid_out(halves[own]), targets[own]).backward()
        else:
            laid_out.train_step(halves[own], targets[own])
    expected = {name: each.grad for name, each in whole.named_parameters()}
    return max(
        float((_full(each.grad) - expected[name]).abs().max() / expected[name].abs().max())
        for name, each in laid_out.named_parameters()
    )


class Failing(Critic.Block):
    """A block that fails in its backward pass while ``is_on``."""

    is_on = False

    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        if self.is_on and result.requires_grad:
            result.register_hook(self.fail)
        return result

    def fail(self, gradient: Tensor) -> None:
        raise ArithmeticError("of the user")


def apart_after_failed_pass(axes: dict[str, int], *, is_called: bool) -> float:
    """Like ``apart_after_loop``, after a pass that has failed and whose gradients were cleared."""
    model, whole = Critic(), made(Critic())
    model.blocks[1] = failing = Failing()
    laid_out = par.parallelize(
        made(model), mesh_of(**axes), example_inputs=draw(2, 6, 16), loss=F.mse_loss, device="cpu"
    )
    parameters = list(laid_out.parameters())
    halves, targets = draw(4, 6, 16).chunk(2), draw(4, 6, 1, seed=1).chunk(2)
    x, target = halves[dist.get_rank()], targets[dist.get_rank()]

    def step() -> None:
        if is_called:
            F.mse_loss(laid_out(x), target).backward()
        else:
            laid_out.train_step(x, target)

    failing.is_on = True
    with contextlib.suppress(ArithmeticError):
        step()
    failing.is_on = False
    for parameter in parameters:
        parameter.grad = None
    step()
    for half, target in zip(halves, targets):
        (F.mse_loss(whole(half), target) / 2).backward()
    expected = {name: each.grad for name, each in whole.named_parameters()}
    return max(float((each.grad - expected[name]).abs().max()) for name, each in laid_out.named_parameters())


def call_with_hook(kind: str, axes: dict[str, int], *, is_called: bool) -> None:
    """Register a hook on a parameter after the model was laid out, then run a pass."""
    laid_out = par.parallelize(
        made(Critic()), mesh_of(**axes), example_inputs=draw(2, 6, 16), loss=F.mse_loss, device="cpu"
    )
    getattr(dict(laid_out.named_parameters())["head.weight"], kind)(lambda _: None)
    if is_called:
        laid_out(draw(2, 6, 16)).mean().backward()
    else:
        laid_out.train_step(draw(2, 6, 16), draw(2, 6, 1))
