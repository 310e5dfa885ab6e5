"""Loaders of dicts: the model is called with keywords, and the target is found, as transformers' users expect."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from detrain_nb import Session
from detrain_nb.errors import SpecError
from detrain_nb.training import Trainer

from .trainer_ranks import Headed, classes, net

SAMPLES = [{"x": x, "y": y} for x, y in classes(40)]


@pytest.fixture(autouse=True)
def metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DETRAIN_NB_METRICS", str(tmp_path / "metrics"))


class Keyed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        made: Tensor = self.net(x) * (1 if scale is None else scale)
        return made


def trainer(model: nn.Module, samples: list[dict[str, Any]], loss: Any = None, **options: Any) -> Trainer:
    loader = DataLoader(samples, 8)  # type: ignore[arg-type]
    return Trainer(
        model, train=loader, evaluate=loader, steps=5, loss=loss, optimizer="sgd", optimizer_options={"lr": 0.1},
        show_progress=False, **options,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["labels", "label", "targets", "target", "y"])
def test_dict_trains_as_the_pair_does(name: str) -> None:
    samples = [{"x": each["x"], name: each["y"]} for each in SAMPLES]
    found = trainer(Keyed(), samples, F.cross_entropy).fit()
    pairs = DataLoader(classes(40), 8)
    expected = Trainer(
        net(), train=pairs, evaluate=pairs, steps=5, loss=F.cross_entropy, optimizer="sgd",
        optimizer_options={"lr": 0.1}, show_progress=False,
    ).fit()  # fmt: skip
    assert found.losses == expected.losses
    assert found.evaluations == expected.evaluations and "accuracy" in found.evaluations[0]


def test_model_that_makes_its_loss_of_labels_needs_none() -> None:
    """And is called with what its samples call `label`, as transformers' collators have it."""
    for name in ("labels", "label"):
        samples = [{"x": each["x"], name: each["y"]} for each in SAMPLES]
        found = trainer(Headed(), samples).fit()
        assert found.losses == by_hand(Headed(), samples)
    model = Headed()
    with torch.no_grad():
        expected = model(torch.stack([each["x"] for each in samples[:20]]), labels=labels_of(samples[:20]))["loss"]
    scores = trainer(model, samples[:20]).evaluate()
    assert scores == {"loss": pytest.approx(float(expected))}, "over rows, also of a last batch that is shorter"


def labels_of(samples: list[dict[str, Any]]) -> Tensor:
    return torch.stack([each.get("labels", each.get("label")) for each in samples])


def by_hand(model: nn.Module, samples: list[dict[str, Any]]) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for begin in range(0, 40, 8):
        part = samples[begin : begin + 8]
        loss = model(torch.stack([each["x"] for each in part]), labels=labels_of(part))["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def test_loss_that_is_given_is_of_the_labels_alone() -> None:
    """The model is not called with them then."""
    samples = [{"x": each["x"], "labels": each["y"]} for each in SAMPLES]
    model = Headed()
    ours = trainer(model, samples, lambda output, target: F.cross_entropy(output["logits"], target))
    assert ours.fit().losses == by_hand(Headed(), samples)
    assert not model.has_had_labels


def test_prediction_leaves_the_target_of_a_dict_out() -> None:
    """And needs none."""
    model, x = Keyed(), torch.stack([each["x"] for each in SAMPLES[:8]])
    ours = trainer(model, SAMPLES, F.cross_entropy)
    with torch.no_grad():
        expected = model(x)
    for samples in (SAMPLES[:8], [{"x": each["x"]} for each in SAMPLES[:8]]):
        [found] = ours.predict(DataLoader(samples, 8))  # type: ignore[arg-type]
        assert torch.equal(found, expected)


def test_any_mapping_is_a_dict() -> None:
    """As transformers' BatchEncoding is."""
    loader = [UserDict(x=torch.zeros(2, 8), labels=torch.zeros(2, dtype=torch.long))]
    assert len(Trainer(Headed(), train=loader, steps=2, show_progress=False).fit().losses) == 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["causal", "masked", "sequence", "vision"])
def test_models_of_transformers_train_as_in_a_loop_by_hand(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    text = {"input_ids": torch.randint(0, 30, (16, 6)), "attention_mask": torch.ones(16, 6, dtype=torch.long)}

    def make() -> tuple[Any, dict[str, Tensor]]:
        torch.manual_seed(0)
        no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        if kind == "causal":
            config = transformers.LlamaConfig(vocab_size=30, **sizes)
            return transformers.LlamaForCausalLM(config), {**text, "labels": text["input_ids"]}
        if kind == "vision":
            config = transformers.ViTConfig(image_size=8, patch_size=4, num_labels=3, **sizes, **no_dropout)
            pictures = torch.ones(16, 3, 8, 8)
            return transformers.ViTForImageClassification(config), {
                "pixel_values": pictures,
                "labels": torch.arange(16) % 3,
            }
        config = transformers.BertConfig(vocab_size=30, num_labels=3, **sizes, **no_dropout)
        if kind == "masked":
            return transformers.BertForMaskedLM(config), {**text, "labels": text["input_ids"]}
        return transformers.BertForSequenceClassification(config), {**text, "labels": torch.arange(16) % 3}

    model, columns = make()
    samples = [{name: column[row] for name, column in columns.items()} for row in range(16)]
    found = trainer(model, samples).fit()
    model, _ = make()
    model.train()
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(5):
        batch = {name: column[8 * (step % 2) : 8 * (step % 2) + 8] for name, column in columns.items()}
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert found.losses == losses and found.losses[-1] != found.losses[0]


@pytest.mark.parametrize(
    "model, samples, loss, message",
    [
        (
            Keyed,
            [{"x": each["x"], "class": each["y"]} for each in SAMPLES],
            F.cross_entropy,
            r"dict of x, class, and the target is none of them: call it labels, or override Trainer\.unpack",
        ),
        (
            Keyed,
            [{**each, "index": 1} for each in SAMPLES],
            F.cross_entropy,
            r"dict with 'index', and the model takes x, scale: leave the others out in collate_fn, or override",
        ),
        (
            Headed,
            [{"x": each["x"]} for each in SAMPLES],
            None,
            r"no loss was given, and the model has made none: give loss=, .* or a loader of dicts with the labels",
        ),
        (Keyed, SAMPLES, None, r"there is no loss to train with: give parallelize, or the Trainer"),
    ],
)
def test_dict_that_does_not_go_with_the_model_is_told(model: Any, samples: Any, loss: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        trainer(model(), samples, loss).fit()


# ---- on ranks


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    with Session.start(2, device="cpu") as started:
        started.run_cell(f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import os, trainer_ranks")
        started.run_cell(f"os.environ['DETRAIN_NB_METRICS'] = {str(tmp_path_factory.mktemp('ranks'))!r}")
        yield started


@pytest.mark.parametrize("axes", ["pp", "dp_shard"])
@pytest.mark.parametrize("has_labels", [True, False])
def test_model_is_called_with_the_labels_that_its_example_had(session: Session, axes: str, has_labels: bool) -> None:
    """Laid out with a loss of its output, or with one of the target; losses are those of one process."""
    samples = [{"x": each["x"], "labels": each["y"]} for each in SAMPLES]
    expected = by_hand(Headed(), samples)
    found = session.run_cell(f"trainer_ranks.train_on_dicts({axes!r}, {has_labels})", timeout_s=40).values
    assert found[0] == found[1] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("axes", ["pp", "dp_shard"])
def test_targets_of_another_dtype_are_told_on_every_rank(session: Session, axes: str) -> None:
    with pytest.raises(
        Exception, match=r"ranks 0-1 on .*cross_entropy takes numbers of classes, and the targets are fl"
    ):
        session.run_cell(f"trainer_ranks.train_on_floats({axes!r})", timeout_s=40)
