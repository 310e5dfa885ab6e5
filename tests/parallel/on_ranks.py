"""Code that a test's ranks run: a model split over them, compared with the whole model on each rank."""

from __future__ import annotations

import copy
import datetime
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from forgetful import Caches
from models import GPT, Experts, Masked
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from untouched import assert_untouched, look_of

from detrain_nb import parallel as par

IGNORED = -100


def made(model: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


def draw(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def tokens(rows: int, seed: int) -> Tensor:
    return torch.randint(0, 97, (rows, 16), generator=torch.Generator().manual_seed(seed))


class TokenLoss(nn.Module):
    """Cross entropy of all tokens except the ignored ones."""

    ignore_index = IGNORED

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        self.reduction = reduction

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=self.reduction, ignore_index=IGNORED)


def apart(stages: par.PipelineStages, whole: nn.Module) -> float:
    """Return the largest difference of a gradient, relative to the largest value of that gradient."""
    references = dict(whole.named_parameters(remove_duplicate=False))
    most = 0.0
    for name, parameter in stages.named_parameters():
        expected = references[name].grad
        assert parameter.grad is not None and expected is not None, name
        most = max(most, float((parameter.grad - expected).abs().max() / expected.abs().max()))
    return most


def gradients(stages: par.PipelineStages) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in stages.parameters() if parameter.grad is not None]


def train_gpt(schedule: str, num_stages: int, *, is_tied: bool, reduction: str = "mean") -> dict[str, Any]:
    """Alternate training, evaluation and prediction with one split; some targets are ignored, batch sizes vary."""
    model, loss = made(GPT(layers=4, is_tied=is_tied)), TokenLoss(reduction)
    whole = copy.deepcopy(model)
    x, y = tokens(8, 1), tokens(8, 2)
    y[0, :9] = y[5, 3:] = IGNORED
    stages = par.PipelineStages(
        par.split(model, x[:2], num_stages), schedule=schedule, num_microbatches=4, loss=loss, device="cpu"
    )
    before = stages.evaluate(x, y)
    trained = stages.train_step(x, y)
    expected = loss(whole(x), y)
    expected.backward()
    found: dict[str, Any] = {"stages": stages.indices, "gradients": apart(stages, whole)}
    kept = gradients(stages)
    after, output = stages.evaluate(x, y), stages.predict(x[:7])
    found["evaluation left gradients"] = all(map(torch.equal, kept, gradients(stages)))
    with torch.no_grad():
        if stages.is_last:
            found["losses"] = [float((each - expected).abs()) for each in (before, trained, after)]
            found["prediction"] = float((output - whole(x[:7])).abs().max())
        else:
            found["nothing elsewhere"] = [before, trained, after, output] == [None] * 4
    for rows in (6, 7):
        stages.train_step(x[:rows], y[:rows])
        loss(whole(x[:rows]), y[:rows]).backward()
    found["added up"] = apart(stages, whole)
    return found


def optimize_gpt() -> float:
    """Train tied parameters for three steps of AdamW; return the largest difference of a parameter."""
    model, loss = made(GPT(layers=2, is_tied=True)), TokenLoss()
    whole = copy.deepcopy(model)
    stages = par.PipelineStages(par.split(model, tokens(2, 1), 2), loss=loss, device="cpu")
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3) for each in (stages, whole)]
    for step in range(3):
        x, y = tokens(8, step), tokens(8, step + 10)
        stages.train_step(x, y)
        loss(whole(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    references = dict(whole.named_parameters(remove_duplicate=False))
    return max(float((parameter - references[name]).abs().max()) for name, parameter in stages.named_parameters())


def start_apart(rank: int) -> bool:
    """Make stages on ranks with different random numbers; return whether the tied parameter equals rank 0's."""
    torch.manual_seed(rank)
    stages = par.PipelineStages(par.split(GPT(layers=1, is_tied=True), tokens(2, 1), 2), device="cpu")
    name = "wte.weight" if stages.is_first else "head.weight"
    torch.manual_seed(0)
    return torch.equal(dict(stages.named_parameters())[name], GPT(layers=1, is_tied=True).wte.weight)


def stages_without(at: list[str] | None, frozen: str = "") -> list[str]:
    """Return the warnings on this rank for stages of two layers and two functions; one may have no parameters."""
    model = made(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh()))
    for parameter in model.get_submodule(frozen).parameters() if frozen else ():
        parameter.requires_grad_(False)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        stages = par.PipelineStages(par.split(model, draw(2, 8), None if at else 2, at=at), device="cpu")
    assert at or torch.optim.SGD(stages.parameters(), lr=0.1)
    return [str(each.message) for each in told]


def use_masks(rows: int) -> float:
    """Train with keyword inputs and a tensor that is not part of the batch, whatever its size is."""
    model = made(Masked())
    whole = copy.deepcopy(model)
    example, batch = ({"x": draw(size, 8), "mask": torch.arange(8.0)} for size in (2, rows))
    stages = par.PipelineStages(par.split(model, example, 2), loss=F.mse_loss, num_microbatches=2, device="cpu")
    stages.train_step(batch, draw(rows, 8, seed=2))
    F.mse_loss(whole(**batch), draw(rows, 8, seed=2)).backward()
    return apart(stages, whole)


def count_batches() -> tuple[Any, ...]:
    """Return the batch count of a BatchNorm on the second stage, and how far its mean is from the whole model's."""
    model = made(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.BatchNorm1d(4), nn.Linear(4, 2)))
    whole = copy.deepcopy(model)
    stages = par.PipelineStages(
        par.split(model, draw(2, 4), at=["2"]), loss=F.mse_loss, num_microbatches=4, device="cpu"
    )
    for _ in range(2):
        stages.train_step(draw(8, 4), draw(8, 2, seed=2))
        stages.evaluate(draw(8, 4), draw(8, 2, seed=2))
        for part in draw(8, 4).chunk(4):
            whole(part)
    if not stages.is_last:
        return ()
    norm, reference = stages.modules[0][2], whole[2]
    return int(norm.num_batches_tracked), float((norm.running_mean - reference.running_mean).abs().max())


def use_experts() -> float:
    """Train a model whose blocks branch on values, with more rows than the example had."""
    model = made(Experts())
    whole = copy.deepcopy(model)
    stages = par.PipelineStages(
        par.split(model, draw(2, 6, 8), at=["blocks.1"]), loss=F.mse_loss, num_microbatches=2, device="cpu"
    )
    stages.train_step(draw(8, 6, 8), draw(8, 6, 8, seed=2))
    F.mse_loss(whole(draw(8, 6, 8)), draw(8, 6, 8, seed=2)).backward()
    return apart(stages, whole)


class CutToKeep(nn.Module):
    """The shape between the stages depends on an argument or, without it, on values."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, keep: int | None = None) -> Tensor:
        if keep is None and bool((x > 1e6).any()):
            raise ValueError("too large")
        result: Tensor = self.b(self.a(x[:, :keep]))
        return result


def keep_some() -> list[tuple[int, ...] | None]:
    """Return the shapes of predictions for batches that differ only in a number."""
    model = CutToKeep()
    stages = par.PipelineStages(par.split(model, {"x": draw(2, 6, 8), "keep": 6}, 2), device="cpu")
    given = [stages.predict({"x": draw(4, 6, 8), "keep": keep}) for keep in (6, 3, 6)]
    return [None if each is None else tuple(each.shape) for each in given]


def alone() -> torch.distributed.ProcessGroup:
    """Return a group of this rank alone, so that an error on one rank leaves no other waiting."""
    return torch.distributed.new_group([torch.distributed.get_rank()], use_local_synchronization=True)


class KeepByValue(nn.Module):
    """The shape of its output is unknown without its values."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return x[:, :3] if bool((x > 1e6).any()) else x


def look_at_large_values() -> None:
    model = nn.Sequential(KeepByValue(), nn.Linear(8, 8))
    stages = par.PipelineStages(par.split(model, draw(2, 6, 8), at=["1"]), alone(), schedule="LoopedBFS", device="cpu")
    stages.predict(draw(4, 6, 8))
    stages.predict(1e9 * draw(4, 6, 8))


def change_autocast() -> list[float]:
    """Return the differences of predictions from the whole model's, with and without autocast in turns."""
    model = made(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    whole = copy.deepcopy(model)
    stages = par.PipelineStages(par.split(model, draw(2, 8), 2), device="cpu")
    found = []
    for is_on in (True, False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_on), torch.no_grad():
            output, expected = stages.predict(draw(4, 8)), whole(draw(4, 8))
        found.append(0.0 if output is None else float((output - expected).abs().max()))
    return found


def weigh(kind: str) -> tuple[float, float]:
    """Train with losses that count elements differently; return the differences of gradients and of the loss."""
    weight = torch.arange(1.0, 98.0)
    losses = {
        "function": lambda: F.cross_entropy,
        "classes": lambda: nn.CrossEntropyLoss(weight=weight),
        "nothing counts in one": nn.CrossEntropyLoss,
        "no rows": lambda: lambda output, target: (output * target).mean(),
    }
    loss = losses[kind]()
    model = made(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 97)))
    whole = copy.deepcopy(model)
    x, y = draw(8, 8), torch.tensor([-100, -100, 5, -100, 96, 3, 50, 2])
    target: Any = torch.tensor(2.0) if kind == "no rows" else y
    stages = par.PipelineStages(par.split(model, x[:2], 2), loss=loss, num_microbatches=4, device="cpu")
    trained = stages.train_step(x, target)
    expected = loss(whole(x), target)
    expected.backward()
    return apart(stages, whole), 0.0 if trained is None else float((trained - expected).abs())


def freeze_tied() -> float:
    """Return by how much AdamW has changed a frozen tied parameter: it must not."""
    model = made(GPT(layers=1, is_tied=True))
    model.wte.weight.requires_grad_(False)
    before = model.wte.weight.clone()
    stages = par.PipelineStages(par.split(model, tokens(2, 1), 2), loss=TokenLoss(), device="cpu")
    optimizer = torch.optim.AdamW(stages.parameters(), lr=0.1, weight_decay=0.1)
    stages.train_step(tokens(8, 1), tokens(8, 2))
    optimizer.step()
    return float((model.wte.weight - before).abs().max())


def keep_modes() -> bool:
    """Return whether only the layer that the user set to evaluation mode is still in it after an evaluation."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.BatchNorm1d(8))
    stages = par.PipelineStages(par.split(model, draw(2, 8), at=["2"]), loss=F.mse_loss, device="cpu")
    frozen = stages.modules[0][1 if stages.is_first else 3].eval()
    stages.train_step(draw(8, 8), draw(8, 8))
    stages.evaluate(draw(8, 8), draw(8, 8))
    was_evaluating = not any(part.training for part in stages.modules[0].modules())
    stages.train_step(draw(8, 8), draw(8, 8))
    others = [part for part in stages.modules[0].modules() if part is not frozen]
    return was_evaluating and not frozen.training and stages.modules[0].training and any(o.training for o in others)


def failing_loss(number: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a mean square error that raises in its ``number``-th call only."""
    calls = itertools.count(1)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if next(calls) == number:
            raise ValueError("no loss today")
        return F.mse_loss(output, target)

    return loss


def fail_once() -> float:
    """Let the loss of one step fail; return the difference of the gradients that the next step gives."""
    loss = failing_loss(3)
    model = made(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    whole = copy.deepcopy(model)
    stages = par.PipelineStages(par.split(model, draw(2, 8), 2), alone(), schedule="LoopedBFS", loss=loss, device="cpu")
    try:
        stages.train_step(draw(8, 8), draw(8, 8))
    except ValueError:
        for parameter in stages.parameters():
            parameter.grad = None
    stages.train_step(draw(8, 8), draw(8, 8))
    F.mse_loss(whole(draw(8, 8)), draw(8, 8)).backward()
    return apart(stages, whole)


def fail_on_the_last() -> par.PipelineStages:
    """Return two stages of 1F1B whose loss fails on the second microbatch, when the first stage awaits a gradient."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    return par.PipelineStages(par.split(model, draw(2, 8), 2), schedule="1F1B", loss=failing_loss(2), device="cpu")


def wait_in_vain(schedule: str, num_stages: int, microbatch: int) -> str:
    """Return the error on this rank when the loss fails for a microbatch; the group's timeout is 5 s.

    With a shorter timeout a rank of a loaded machine may not have had its turn, and a different message times out.
    """
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(num_stages)))
    group = torch.distributed.new_group(timeout=datetime.timedelta(seconds=5))
    loss = failing_loss(microbatch + 1)
    found = par.split(model, draw(2, 8), num_stages)
    stages = par.PipelineStages(found, group, schedule=schedule, num_microbatches=4, loss=loss, device="cpu")
    try:
        stages.train_step(draw(8, 8), draw(8, 8))
    except (ValueError, RuntimeError) as exc:
        return f"{type(exc).__name__}: {exc}"
    return "nothing"


class Keeps(nn.Module):
    """A model that keeps a tensor which is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.kept = nn.Linear(8, 8), nn.Linear(8, 8), torch.zeros(8)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.b(self.a(x) + self.kept)
        return result


def send_fake() -> None:
    model = Keeps()
    stages = par.PipelineStages(par.split(model, draw(2, 8), at=["b"]), alone(), schedule="LoopedBFS", device="cpu")
    kept = FakeTensorMode(allow_non_fake_inputs=True).from_tensor(torch.zeros(8))
    for stage in stages.modules:
        stage.kept = kept
    stages.predict(draw(4, 8))


def use_caches() -> float:
    """Train two stages, one with function caches; check that the model is untouched.

    Returns the largest relative difference of a gradient from the whole model's.
    """
    model = made(nn.Sequential(Caches(), nn.Linear(8, 8)))
    whole = copy.deepcopy(model)
    before = look_of(model)
    stages = par.PipelineStages(par.split(model, draw(2, 8), at=["1"]), loss=F.mse_loss, device="cpu")
    assert_untouched(model, before)
    stages.train_step(draw(8, 8), draw(8, 8, seed=2))
    F.mse_loss(whole(draw(8, 8)), draw(8, 8, seed=2)).backward()
    return apart(stages, whole)


class Turn(nn.Module):
    """Returns a non-contiguous view and such a gradient; kind "view" returns a view only."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Identity() if kind == "view" else nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "view":
            return x.view_as(x)
        if self.kind == "transpose":
            return self.linear(x.transpose(1, 2)).tanh().transpose(1, 2)
        if self.kind == "permute":
            return self.linear(x.permute(2, 0, 1)).tanh().permute(1, 2, 0)
        if self.kind == "expand":
            return self.linear(x.mean(1, keepdim=True).expand_as(x)).tanh().mean(1, keepdim=True).expand_as(x)
        result: Tensor = self.linear(x)
        return result


def turns(*kinds: str) -> nn.Module:
    return made(nn.Sequential(*map(Turn, kinds)))


def train_at_edges(
    model: nn.Module, schedule: str, *, num_frozen: int = 0, cuts: list[str] | None = None
) -> tuple[list[str], float]:
    """Train two batches through stages of one layer each; return the parameters here that have a gradient.

    Also returns the largest difference of gradients and outputs from the whole model's. The first ``num_frozen`` layers
    are frozen.
    """
    model[:num_frozen].requires_grad_(False)
    whole, x = copy.deepcopy(model), draw(8, 8, 8)
    stages = par.PipelineStages(
        par.split(model, x[:2], at=cuts or [str(index) for index in range(1, len(model))]),
        schedule=schedule, loss=F.mse_loss, num_microbatches=4, device="cpu",
    )  # fmt: skip
    for seed in (1, 2):
        y = draw(8, 8, 8, seed=seed + 10)
        stages.train_step(draw(8, 8, 8, seed=seed), y)
        F.mse_loss(whole(draw(8, 8, 8, seed=seed)), y).backward()
    references, found, names = dict(whole.named_parameters()), [0.0], []
    for name, parameter in stages.named_parameters():
        expected = references[name].grad
        assert (parameter.grad is None) == (expected is None), name
        if expected is not None:
            names.append(name)
            found.append(float((parameter.grad - expected).abs().max() / expected.abs().max()))
    output = stages.predict(x)
    if stages.is_last:
        found.append(float((output - whole(x).detach()).abs().max()))
    return names, max(found)


def evaluate_at_dropout() -> float:
    """Return the largest difference of evaluation losses and of gradients.

    The second stage starts with dropout, which changes nothing in evaluation, or with an identity.
    """
    found = [0.0]
    for first in (nn.Dropout(0.5), nn.Identity()):
        model = made(nn.Sequential(nn.Linear(8, 8), first, nn.Linear(8, 8)))
        whole = copy.deepcopy(model).eval()
        split = par.split(model, draw(2, 8), at=["1"])
        stages = par.PipelineStages(split, loss=F.mse_loss, num_microbatches=4, device="cpu")
        expected = F.mse_loss(whole(draw(8, 8)), draw(8, 8, seed=2))
        loss = stages.evaluate(draw(8, 8), draw(8, 8, seed=2))
        found += [] if loss is None else [float((loss - expected).abs())]
        stages.train_step(draw(8, 8), draw(8, 8, seed=2))
        if isinstance(first, nn.Identity):
            expected.backward()
            found.append(apart(stages, whole))
    return max(found)


def drop() -> tuple[float, float, bool]:
    """Run dropout in both stages of a pipeline on this rank alone, and in the whole model on the same microbatches.

    Returns the differences of the loss and of any gradient, and whether another seed gives another loss. The schedule
    runs all microbatches through the first stage first, so the whole model runs in that order too.
    """
    model = made(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.4), nn.Linear(8, 8), nn.Dropout(0.4), nn.Linear(8, 8)))
    whole = copy.deepcopy(model)
    x, y = draw(8, 8), draw(8, 8, seed=2)
    stages = par.PipelineStages(
        par.split(model, x[:2], at=["2"]),
        alone(),
        schedule="LoopedBFS",
        loss=F.mse_loss,
        num_microbatches=4,
        device="cpu",
    )
    torch.manual_seed(5)
    trained = stages.train_step(x, y)
    torch.manual_seed(5)
    between = [whole[:2](part) for part in x.chunk(4)]
    losses = [F.mse_loss(whole[2:](each), target) / 4 for each, target in zip(between, y.chunk(4))]
    torch.stack(losses).sum().backward()
    assert trained is not None
    difference = float((trained - torch.stack(losses).sum().detach()).abs())
    gradient = apart(stages, whole)
    torch.manual_seed(6)
    return difference, gradient, bool(stages.train_step(x, y) != trained)


def end_in_any_batch(schedule: str) -> tuple[list[float], float]:
    """Train on batches that get smaller; return the differences of the losses and of the accumulated gradients."""
    model, loss = made(GPT(layers=2)), TokenLoss()
    whole = copy.deepcopy(model)
    stages = par.PipelineStages(
        par.split(model, tokens(2, 1), 4), schedule=schedule, loss=loss, num_microbatches=8, device="cpu"
    )
    losses = []
    for rows in (8, 5, 3, 1):
        found = stages.train_step(tokens(rows, 1), tokens(rows, 2))
        expected = loss(whole(tokens(rows, 1)), tokens(rows, 2))
        expected.backward()
        losses.append(float((found - expected).abs()) if stages.is_last else 0.0)
        assert (found is not None) == stages.is_last
    return losses, apart(stages, whole)
