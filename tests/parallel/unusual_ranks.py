"""What the ranks of a test do: models and losses that do more than compute, laid out over a mesh."""

from __future__ import annotations

import copy
from typing import Any

import torch.nn.functional as F
from meshes import mesh_of
from on_ranks import draw, made
from torch import Tensor, nn

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
