"""Loaders of dicts: the model is called with keywords, and the target is found, as transformers' users expect."""

from __future__ import annotations

from collections import UserDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from detrain_nb.errors import SpecError
from detrain_nb.parallel import WholeModel
from detrain_nb.training import Trainer

from .trainer_ranks import Headed, by_hand, classes, labels_of, net

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
    """Samples may also have the labels as ``label``; the model is called with ``labels``, as with transformers."""
    for name in ("labels", "label"):
        samples = [{"x": each["x"], name: each["y"]} for each in SAMPLES]
        found = trainer(Headed(), samples).fit()
        assert found.losses == by_hand(Headed(), samples)
    model = Headed()
    with torch.no_grad():
        expected = model(torch.stack([each["x"] for each in samples[:20]]), labels=labels_of(samples[:20]))["loss"]
    scores = trainer(model, samples[:20]).evaluate()
    assert scores == {"loss": pytest.approx(float(expected))}, "over rows, also of a last batch that is shorter"


def test_loss_that_is_given_is_of_the_labels_alone() -> None:
    """With a separate loss, the model is called without the labels."""
    samples = [{"x": each["x"], "labels": each["y"]} for each in SAMPLES]
    model = Headed()
    ours = trainer(model, samples, lambda output, target: F.cross_entropy(output["logits"], target))
    assert ours.fit().losses == by_hand(Headed(), samples)
    assert not model.has_had_labels


def test_prediction_leaves_the_target_of_a_dict_out() -> None:
    """The samples may also have no target."""
    model, x = Keyed(), torch.stack([each["x"] for each in SAMPLES[:8]])
    ours = trainer(model, SAMPLES, F.cross_entropy)
    with torch.no_grad():
        expected = model(x)
    for samples in (SAMPLES[:8], [{"x": each["x"]} for each in SAMPLES[:8]]):
        [found] = ours.predict(DataLoader(samples, 8))  # type: ignore[arg-type]
        assert torch.equal(found, expected)


def test_prediction_names_what_the_model_does_not_take() -> None:
    with pytest.raises(SpecError, match="the loader yielded a dict with 'index', but the model takes x, scale: leave"):
        list(trainer(Keyed(), SAMPLES, F.cross_entropy).predict([{"x": torch.zeros(2, 8), "index": torch.zeros(2)}]))


class Answers(nn.Module):
    """A model with a loss of start positions, like those of transformers that answer questions."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor, start_positions: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.net(x)
        return {"logits": logits} if start_positions is None else {"loss": F.cross_entropy(logits, start_positions)}


def test_model_that_makes_its_loss_of_positions_needs_none() -> None:
    found = trainer(Answers(), [{"x": each["x"], "start_positions": each["y"]} for each in SAMPLES]).fit()
    assert found.losses == by_hand(Headed(), [{"x": each["x"], "labels": each["y"]} for each in SAMPLES])


class Shifted(nn.Module):
    """A model that is called with the target, which a separate loss uses too."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        assert target.dtype == torch.long
        made: Tensor = self.net(x)
        return made


def test_model_that_has_to_have_the_target_is_called_with_it() -> None:
    samples = [{"x": each["x"], "target": each["y"]} for each in SAMPLES]
    assert trainer(Shifted(), samples, F.cross_entropy).fit().losses == by_hand(
        Headed(), [{"x": each["x"], "labels": each["y"]} for each in SAMPLES]
    )


def test_prediction_of_a_model_that_was_laid_out_with_labels_has_them() -> None:
    """The forward does not name the labels, as that of a stage never does; ``called_with`` does."""

    class AnyKeyword(Keyed):
        def forward(self, x: Tensor, **more: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x) + more["labels"][:, None]

    model = WholeModel(AnyKeyword(), loss=F.cross_entropy, device="cpu")
    model.called_with = frozenset({"x", "labels"})
    [found] = Trainer(model, train=[], steps=1).predict([{"x": torch.zeros(2, 8), "labels": torch.ones(2)}])
    with torch.no_grad():
        assert torch.equal(found, net()(torch.zeros(2, 8)) + 1)


def test_any_mapping_is_a_dict() -> None:
    """An example is the BatchEncoding of transformers."""
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
            r"dict of x, class, without a target: name it labels, or override Trainer\.unpack",
        ),
        (
            Keyed,
            [{**each, "index": 1} for each in SAMPLES],
            F.cross_entropy,
            r"dict with 'index', but the model takes x, scale: leave the others out in collate_fn, or override",
        ),
        (
            Headed,
            [{"x": each["x"]} for each in SAMPLES],
            None,
            r"no loss was given, and the model's output has none: give loss=, .* or a loader of dicts with the labels",
        ),
        (Keyed, SAMPLES, None, r"there is no loss to train with: pass loss="),
    ],
)
def test_dict_that_does_not_go_with_the_model_is_told(model: Any, samples: Any, loss: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        trainer(model(), samples, loss).fit()
