"""What the ranks of a test do: models and losses that do more than compute, laid out over a mesh."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from meshes import mesh_of
from on_ranks import draw, made
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from detrain_nb import parallel as par


class Switching(nn.Module):
    """Its own `train` does more than set a flag, and that of a part too, which is kept from training."""

    class Part(nn.Linear):
        switched = 0

        def train(self, mode: bool = True) -> Switching.Part:
            self.switched += 1
            super().train(mode)
            return self

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 16), self.Part(16, 16), nn.Linear(16, 8)])
        self.temperature = 2.0

    def train(self, mode: bool = True) -> Switching:
        super().train(mode)
        self.temperature = 2.0 if mode else 0.5
        return self

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x * self.temperature


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def lay_out(model: nn.Module, axes: dict[str, int], **options: Any) -> par.ParallelModel:
    given = {"example_inputs": draw(2, 8), "loss": F.mse_loss, "device": "cpu", **options}
    return par.parallelize(model, mesh_of(**axes), **given)


def evaluate_and_train(axes: dict[str, int]) -> list[float]:
    """How far a prediction, and a loss in training after it, are from those of the whole model."""
    model = made(Switching())
    model.layers[1].eval()
    whole = copy.deepcopy(model)
    laid_out, x, y = lay_out(model, axes), draw(4, 8), draw(4, 8, seed=2)
    before = [part.training for module in laid_out.modules for part in module.modules()]
    predicted = laid_out.predict(x)
    loss = laid_out.train_step(x, y)
    assert [part.training for module in laid_out.modules for part in module.modules()] == before
    expected = F.mse_loss(whole(x), y)
    whole.eval()
    if not laid_out.is_last:
        return []
    assert loss is not None
    return [float((predicted - whole(x)).abs().max()), float((loss - expected).abs())]


class Normalizing(nn.Module):
    """Each of its layers normalises its own weight before it is used; ``way``: of writing."""

    class Block(nn.Module):
        def __init__(self, way: str) -> None:
            super().__init__()
            self.up, self.down, self.way = nn.Linear(8, 16), nn.Linear(16, 8), way

        def forward(self, x: Tensor) -> Tensor:
            weight = self.up.weight
            norm = weight.detach().norm(dim=1, keepdim=True)
            if self.way == "data":
                weight.data.div_(norm)
            elif self.way == "copy" and self.training:
                with torch.no_grad():
                    weight.copy_(weight / norm)
            elif self.way == "evaluating" and not self.training:
                with torch.no_grad():
                    weight.div_(norm)
            result: Tensor = x + self.down(self.up(x).relu())
            return result

    def __init__(self, way: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Block(way) for _ in range(2))
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        result: Tensor = self.head(x)
        return result


class Following(Normalizing):
    """Keeps averages of its layers, in frozen parameters, that nobody reads but the user."""

    def __init__(self) -> None:
        super().__init__("none")
        self.averages = copy.deepcopy(self.layers).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                for average, parameter in zip(self.averages.parameters(), self.layers.parameters()):
                    average.lerp_(parameter, 0.1)
        return super().forward(x)


def apart_after_steps(model: nn.Module, axes: dict[str, int]) -> float:
    """The largest difference of a parameter, or of a prediction, from the whole model's, after two steps of each."""
    model = made(model)
    whole = copy.deepcopy(model)
    laid_out, x, y = lay_out(model, axes), draw(4, 8), draw(4, 8, seed=2)
    optimizers = [torch.optim.SGD(list(each.parameters()), lr=0.1) for each in (laid_out, whole)]
    for _ in range(2):
        laid_out.train_step(x, y)
        F.mse_loss(whole(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    references = dict(whole.named_parameters())
    named = laid_out.named_parameters()
    most = max(float((full(each.detach()) - references[name]).abs().max()) for name, each in named)
    with torch.no_grad():
        return max(most, float((laid_out.predict(x) - whole.eval()(x)).abs().max()))


def plan_alone(edited_on: int, *, is_refused: bool = False) -> None:
    """Lay out by plans of which one was edited, or is refused, on one rank alone."""
    model = made(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)))
    plan = par.tp_plan(model, draw(2, 8), tp=2)
    if dist.get_rank() == edited_on:
        plan = par.tp_plan(model, draw(2, 8), tp=4) if is_refused else plan
        plan.replicate("0")
    lay_out(model, {"tp": 2}, tp=plan)


class Scaled(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return self.scale * F.mse_loss(output, target)


SCALED = Scaled()
