"""Losses that get a target, and losses that need only the output."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from detrain_nb.errors import SpecError
from detrain_nb.parallel import WholeModel
from detrain_nb.parallel.losses import require_no_parameters


class Labelled(nn.Linear):
    """Returns its loss in the output, as models of transformers do."""

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
    with pytest.raises(SpecError, match=r"^(cross_entropy|MSELoss) needs a target, but there is no"):
        getattr(model, call)(torch.randn(6, 3))


def test_weight_of_a_forgotten_target_is_told() -> None:
    model = WholeModel(Labelled(3, 2), loss=lambda output, _: output["loss"], loss_weight=len, device="cpu")
    with pytest.raises(SpecError, match=r"^loss_weight needs a target, but there is none"):
        model.train_step({"x": torch.randn(6, 3), "labels": torch.randn(6, 2)})


INTS, FLOATS = torch.zeros(6, dtype=torch.long), torch.zeros(6)


@pytest.mark.parametrize(
    "loss, target, message",
    [
        (
            F.cross_entropy,
            FLOATS,
            r"cross_entropy takes class indices, but the targets are float32: pass target.lo",
        ),
        (nn.NLLLoss(), FLOATS.double(), r"NLLLoss takes class indices, but the targets are float64.*mse_loss"),
        (
            F.cross_entropy,
            INTS.int(),
            r"cross_entropy takes class indices, but the targets are int32: .*long\(\)$",
        ),
        (partial(F.cross_entropy, label_smoothing=0.1), INTS.bool(), "but the targets are bool"),
        (F.huber_loss, INTS, r"huber_loss takes floating-point targets, but these are int64: pass target\.fl"),
        (nn.L1Loss(), INTS.bool(), "L1Loss takes floating-point targets, but these are bool: pass target.float"),
        (
            nn.BCEWithLogitsLoss(),
            INTS.bool(),
            "BCEWithLogitsLoss takes floating-point targets, but these are bool",
        ),
        (
            F.huber_loss,
            torch.zeros(6, 2).double(),
            r"huber_loss of an output float32 \[6, 2\] and a target float64 \[6, 2\]: pass",
        ),
        (
            F.cross_entropy,
            INTS + 7,
            r"cross_entropy of an output float32 \[6, 2\] and a target int64 \[6\]: .*out of bounds",
        ),
        (
            F.cross_entropy,
            torch.zeros(6, 5),
            r"cross_entropy of an output float32 \[6, 2\] and a target float32 \[6, 5\]: ",
        ),
        (F.cross_entropy, INTS[:, None], r"cross_entropy of an output float32 \[6, 2\] and a target int64 \[6, 1\]: "),
    ],
)
@pytest.mark.parametrize("call", ["train_step", "evaluate"])
def test_target_that_is_none_for_this_loss_is_told(loss: Any, target: Tensor, message: str, call: str) -> None:
    model = WholeModel(nn.Linear(3, 2), loss=loss, device="cpu")
    with pytest.raises(SpecError, match=message):
        getattr(model, call)(torch.randn(6, 3), target)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    "loss, target",
    [
        (F.cross_entropy, INTS),
        (F.cross_entropy, INTS.to(torch.uint8)),
        (F.cross_entropy, torch.full((6, 2), 0.5)),
        (F.cross_entropy, torch.full((6, 2), 0.5).double()),
        (F.mse_loss, torch.zeros(6, 2).double()),
        (nn.MSELoss(), INTS[:, None].expand(6, 2)),
        (F.l1_loss, INTS[:, None].expand(6, 2).int()),
        (F.smooth_l1_loss, INTS[:, None].expand(6, 2).bool()),
        (lambda output, target: F.mse_loss(output[:, 0], target.float()), INTS),
    ],
)
def test_target_that_torch_takes_is_taken(loss: Any, target: Tensor) -> None:
    model, x = WholeModel(nn.Linear(3, 2), loss=loss, device="cpu"), torch.randn(6, 3)
    found = model.train_step(x, target)
    assert found is not None and torch.equal(found, loss(model.modules[0](x), target).detach())


def test_shares_of_classes_need_no_batch() -> None:
    model, x, shares = WholeModel(nn.Linear(3, 2), loss=F.cross_entropy, device="cpu"), torch.randn(3), torch.rand(2)
    shares /= shares.sum()
    found = model.train_step(x, shares)
    assert found is not None and torch.equal(found, F.cross_entropy(model.modules[0](x), shares).detach())


@pytest.mark.parametrize(
    "loss, message",
    [
        (lambda output, target: (output - target).square().mean(1), r"returned 6 numbers \(shape \(6,\)\), not one"),
        (lambda output, target: (output - target).square().mean().item(), "returned float, not a tensor"),
        (lambda output, target: None, "returned NoneType, not a tensor: return the number to minimize"),
    ],
)
@pytest.mark.parametrize("call", ["train_step", "evaluate"])
def test_loss_that_gives_no_number_is_told(loss: Any, message: str, call: str) -> None:
    model = WholeModel(nn.Linear(3, 2), loss=loss, device="cpu")
    with pytest.raises(SpecError, match=message):
        getattr(model, call)(torch.ones(6, 3), torch.ones(6, 2))


def test_loss_of_a_tensor_says_where_the_models_output_has_one() -> None:
    class Named(nn.Linear):
        def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
            return {"logits": super().forward(x)}

    model = WholeModel(Named(3, 2), loss=F.cross_entropy, device="cpu")
    said = r"cross_entropy takes a tensor, but the model returns a dict with logits: pass loss=lambda output, target: "
    with pytest.raises(SpecError, match=said):
        model.train_step(torch.randn(6, 3), INTS)


@pytest.mark.parametrize(
    "loss, message",
    [
        ("cross_entropy", "loss='cross_entropy' is a str: pass a function of the output and the target, such as torch"),
        (nn.MSELoss, r"loss=MSELoss is a class: pass an instance, MSELoss\(\)"),
    ],
)
def test_loss_that_is_none_is_told(loss: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        WholeModel(nn.Linear(3, 2), loss=loss, device="cpu")


@pytest.mark.parametrize("call", ["train_step", "evaluate"])
def test_missing_loss_is_told_in_words_of_the_user(call: str) -> None:
    with pytest.raises(
        SpecError, match=r"there is no loss to .*: pass loss=, .*or to the Trainer, for a plain"
    ) as error:
        getattr(WholeModel(nn.Linear(3, 2), device="cpu"), call)(torch.randn(6, 3), INTS)
    assert "WholeModel" not in str(error.value)


class Writing(nn.Linear):
    """Writes its own parameter into its input, as models with mask tokens do."""

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


class Weighted(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return self.scale * (output - target).square().mean()


def test_loss_that_trains_a_parameter_of_its_own_is_refused() -> None:
    """This holds wherever the loss keeps it. Parameters of the model and frozen ones are allowed."""
    model, loss = nn.Linear(4, 4), Weighted()
    for given in (loss, loss.forward, partial(loss), lambda output, target: 2 * loss(output, target)):
        with pytest.raises(SpecError, match=r"a trainable parameter that is not in the model, Weighted\.scale: "):
            require_no_parameters(given, model)
    loss.requires_grad_(False)
    for given in (loss, nn.MSELoss(), F.mse_loss, model.forward, lambda output, target: loss(model(output), target)):
        require_no_parameters(given, model)
