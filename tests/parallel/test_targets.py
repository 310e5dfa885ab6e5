"""Losses that are given a target, and those that find all they need in the output."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from detrain_nb.errors import SpecError
from detrain_nb.parallel import WholeModel


class Labelled(nn.Linear):
    """As models of transformers do, it has the loss in its output."""

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return {"loss": F.mse_loss(super().forward(x), labels)}


def test_loss_in_the_output_needs_no_target() -> None:
    torch.manual_seed(0)
    x, labels = torch.randn(6, 3), torch.randn(6, 2)
    model = WholeModel(Labelled(3, 2), loss=lambda output, _: output["loss"], num_microbatches=3, device="cpu")
    batch = {"x": x, "labels": labels}
    evaluated, trained = model.evaluate(batch), model.train_step(batch)
    expected = model.modules[0](x, labels)["loss"]
    made = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    whole = torch.autograd.grad(expected, list(model.parameters()))
    assert evaluated is not None and trained is not None and len(made) == 2
    torch.testing.assert_close([evaluated, trained, *made], [expected.detach()] * 2 + [*whole])


@pytest.mark.parametrize("loss", [F.cross_entropy, nn.MSELoss(), partial(F.cross_entropy, label_smoothing=0.1)])
@pytest.mark.parametrize("call", ["train_step", "evaluate"])
def test_forgotten_target_is_told(loss: Any, call: str) -> None:
    model = WholeModel(nn.Linear(3, 2), loss=loss, device="cpu")
    with pytest.raises(SpecError, match=r"^(cross_entropy|MSELoss) compares the output with a target, and there is no"):
        getattr(model, call)(torch.randn(6, 3))


def test_weight_of_a_forgotten_target_is_told() -> None:
    model = WholeModel(Labelled(3, 2), loss=lambda output, _: output["loss"], loss_weight=len, device="cpu")
    with pytest.raises(SpecError, match=r"^loss_weight looks at the target, and there is none"):
        model.train_step({"x": torch.randn(6, 3), "labels": torch.randn(6, 2)})


class Writing(nn.Linear):
    """It writes its own parameter into what it is given, as models with mask tokens do."""

    def forward(self, x: Tensor) -> Tensor:
        x += self.bias[0]
        x[:, 0] = self.bias[1]
        return super().forward(x)


@pytest.mark.parametrize("count", [1, 3])
def test_model_may_write_into_its_microbatch(count: int) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(6, 3), torch.randn(6, 2)
    model = WholeModel(Writing(3, 2), loss=F.mse_loss, num_microbatches=count, device="cpu")
    expected = torch.autograd.grad(F.mse_loss(model.modules[0](x.clone()), y), list(model.parameters()))
    model.train_step(x, y)
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], [*expected])
