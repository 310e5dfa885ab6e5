"""The training loop, on one process and on ranks: metrics are global, each sample is used once, nan stops the loop."""

from __future__ import annotations

import functools
import math
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from detrain_nb import Session
from detrain_nb import parallel as par
from detrain_nb.errors import NotFinite, SpecError
from detrain_nb.metrics import log_metrics, read_metrics
from detrain_nb.training import Callback, Trainer, make_scheduler, save, set_seed
from detrain_nb.training.recipe import make_optimizer

from .trainer_ranks import Headed, TokenNet, by_hand, classes, net


@pytest.fixture(autouse=True)
def metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DETRAIN_NB_METRICS", str(tmp_path / "metrics"))
    return tmp_path / "metrics"


def test_torn_line_takes_no_other_with_it(metrics: Path) -> None:
    log_metrics(1, loss=1.0)
    with (metrics / "rank-0.jsonl").open("ab") as file:
        file.write(b'{"step": 2, "rank": 0, "loss": ' + b"[" * 200_000 + b"\n")
        file.write(b'{"step": 2, "lo')  # as after a full disk
    log_metrics(3, loss=3.0)
    assert [line["step"] for line in read_metrics()] == [1, 3]
    with pytest.raises(SpecError, match="the name rank is reserved"):
        log_metrics(4, {"rank": 7})
    for step in ("x", "4", 1.5, float("nan"), None, [4], 10**30):
        with pytest.raises(SpecError, match=r"^step .*: give a whole number of 64 bits$"):
            log_metrics(step, loss=1.0)  # type: ignore[arg-type]
    for values in ({("a", 1): 2.0}, {"loss": 10**5000}):
        with pytest.raises(SpecError, match=r"^cannot write step 4: "):
            log_metrics(4, values)  # type: ignore[arg-type]
    log_metrics(5, total_steps=20.0)
    assert read_metrics()[-1]["total_steps"] == 20 and type(read_metrics()[-1]["total_steps"]) is int
    with pytest.raises(SpecError, match=r"^total_steps 2\.5: give a whole number of 64 bits$"):
        log_metrics(6, total_steps=2.5)


def test_metrics_are_written_through_no_link_and_read_from_no_pipe(metrics: Path, tmp_path: Path) -> None:
    """In a folder that a group can write to, others can have created these."""
    metrics.mkdir()
    (metrics / "rank-0.jsonl").symlink_to(tmp_path / "profile")
    with pytest.raises(OSError, match="symbolic link"):
        log_metrics(1, loss=1.0)
    assert not (tmp_path / "profile").exists()
    (metrics / "rank-0.jsonl").unlink()
    os.mkfifo(metrics / "rank-0.jsonl")
    with pytest.raises(SpecError, match=r"rank-0\.jsonl is not a regular file: remove it"):
        log_metrics(1, loss=1.0)
    os.mkfifo(metrics / "rank-1.jsonl")
    assert read_metrics() == []


def trainer(**options: Any) -> Trainer:
    data = classes(103)
    given: dict[str, Any] = {
        "train": DataLoader(data, 10, shuffle=True),
        "steps": 12,
        "loss": F.cross_entropy,
        "optimizer_options": {"lr": 0.02},
        "show_progress": False,
    }
    return Trainer(options.pop("model", None) or net(), **{**given, **options})


def test_loop_is_that_of_a_book(metrics: Path) -> None:
    """Losses and parameters are bit for bit those of a loop by hand, including clipping and a schedule."""
    ours = trainer(clip=0.5, scheduler="cosine", scheduler_options={"warmup_steps": 3})
    result = ours.fit()
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = make_scheduler("cosine", optimizer, steps=12, warmup_steps=3)
    losses = []
    loader: Any = trainer().train.loader
    batches = [batch for _ in range(2) for batch in loader][:12]
    for x, y in batches:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(float(loss.detach()))
    assert result.losses == losses
    assert all(torch.equal(a, b) for a, b in zip(ours.model.parameters(), model.parameters()))
    lines = read_metrics(str(metrics))
    assert [line["loss"] for line in lines] == losses and [line["step"] for line in lines] == list(range(1, 13))
    assert {"grad_norm", "lr", "samples_per_s", "memory_bytes"} <= lines[0].keys()
    assert [line.get("total_steps") for line in lines] == [12] + [None] * 11, "who follows it knows how far it is"


def test_epochs_are_as_many_steps_as_they_have(metrics: Path) -> None:
    batches = DataLoader(classes(37), 8)
    result = Trainer(net(), train=batches, evaluate=batches, epochs=3, loss=F.cross_entropy, scheduler="cosine").fit()
    assert [record["step"] for record in result.evaluations] == [5, 10, 15]
    assert result.steps == 15 and result.history[-1]["lr"] < result.history[0]["lr"]
    for given in ({}, {"steps": 5, "epochs": 1}):
        with pytest.raises(SpecError, match="give either steps= or epochs="):
            Trainer(net(), train=batches, loss=F.cross_entropy, **given)
    with pytest.raises(SpecError, match="the training data have no length: give steps="):
        Trainer(net(), train=(each for each in batches), epochs=1, loss=F.cross_entropy)


def test_lines_of_the_last_run_stand_apart_from_those_before(metrics: Path) -> None:
    log_metrics(1, loss=9.0)
    losses = [trainer(steps=steps).fit().losses for steps in (4, 3)]
    assert len(read_metrics()) == 8
    assert [line["loss"] for line in read_metrics(run="last")] == losses[1]
    first = min(line["run"] for line in read_metrics() if "run" in line)
    assert [line["loss"] for line in read_metrics(run=first)] == losses[0]


def test_evaluation_is_over_every_sample() -> None:
    model = net()
    data = classes(37)
    ours = trainer(model=model, evaluate=DataLoader(data, 8), evaluate_every=5)
    result = ours.fit()
    assert [record["step"] for record in result.evaluations] == [5, 10, 12]
    model.eval()
    x, y = data.tensors
    with torch.no_grad():
        output = model(x)
    assert result.evaluations[-1]["loss"] == pytest.approx(float(F.cross_entropy(output, y)), rel=1e-6)
    assert result.evaluations[-1]["accuracy"] == int((output.argmax(1) == y).sum()) / 37
    assert "12 steps in" in str(result) and "accuracy" in str(result)


class Labelled(nn.Linear):
    """A model with the loss in its output, like those of transformers."""

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return {"loss": F.cross_entropy(super().forward(x), labels)}


class OfLabels(Trainer):
    def unpack(self, given: Any) -> tuple[Any, Any]:
        x, labels = given
        return {"x": x, "labels": labels}, None


def test_evaluation_of_a_model_that_makes_its_loss_is_over_every_sample() -> None:
    """The evaluation runs in microbatches, and its last batch is shorter."""
    data = classes(20)
    model = par.WholeModel(Labelled(8, 3), loss=lambda output, _: output["loss"], num_microbatches=4, device="cpu")
    found = OfLabels(model, train=DataLoader(data, 8), steps=1).evaluate(DataLoader(data, 16))
    with torch.no_grad():
        expected = model.modules[0](*data.tensors)["loss"]
    assert found == {"loss": pytest.approx(float(expected), rel=1e-6)}


def test_target_that_is_forgotten_in_an_evaluation_is_told_on_every_rank() -> None:
    class Forgets(Trainer):
        def unpack(self, given: Any) -> tuple[Any, Any]:
            return given[0], None

    data = DataLoader(classes(8), 4)
    model = par.WholeModel(net(), loss=F.cross_entropy, device="cpu")
    predicted: list[Any] = []
    model.predict = predicted.append  # type: ignore[method-assign]  # where other ranks would wait for this one
    with pytest.raises(SpecError, match="cross_entropy needs a target, but there is none"):
        Forgets(model, train=data, steps=1).evaluate(data)
    assert not predicted


def test_prediction_before_leaves_no_layer_evaluating() -> None:
    """The model is in evaluation mode at first, as from_pretrained returns it."""
    model = net().eval()
    laid_out = par.WholeModel(model, loss=F.cross_entropy, device="cpu")
    laid_out.predict(classes(4).tensors[0])
    modes = []
    model[0].register_forward_hook(lambda module, args, output: modes.append(module.training))
    Trainer(laid_out, train=DataLoader(classes(20), 10), steps=2).fit()
    assert modes == [True, True]


def test_targets_that_a_partial_loss_ignores_are_not_scored() -> None:
    x, y = classes(12).tensors
    loss = functools.partial(F.cross_entropy, ignore_index=0)
    ours = trainer(loss=loss, train=DataLoader(classes(40), 10), steps=1)
    scores = ours.evaluate(DataLoader(TensorDataset(x, y), 12))
    with torch.no_grad():
        right = (ours.model.modules[0](x).argmax(1) == y)[y != 0]
    assert scores["accuracy"] == pytest.approx(float(right.float().mean()))


def test_nan_stops_before_the_step_it_would_spoil() -> None:
    x, y = torch.randn(40, 8), torch.randint(0, 3, (40,))
    x[25] = math.nan
    model = net()
    ours = trainer(model=model, train=DataLoader(TensorDataset(x, y), 10))
    with pytest.raises(
        NotFinite, match=r"step 3: loss nan, grad_norm nan; .*rank 0 in '0.weight'.*unchanged since step 2"
    ):
        ours.fit()
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    assert len(ours.result.history) == 2


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, left: Tensor, right: Tensor, *, scale: float = 1.0) -> Tensor:
        result: Tensor = scale * (self.left(left) + self.right(right))
        return result


def test_part_of_which_all_is_ignored_is_evaluated_too() -> None:
    model = par.WholeModel(net(), loss=F.cross_entropy, num_microbatches=2, device="cpu")
    x, target = torch.randn(4, 8), torch.tensor([0, 1, -100, -100])
    assert model.evaluate(x, target) == model.train_step(x, target)
    assert torch.isfinite(model.evaluate(x, target))


def test_subclass_takes_dicts_and_scores_its_own_way() -> None:
    class Ours(Trainer):
        def unpack(self, given: Any) -> tuple[Any, Any]:
            x, y = given
            return {"left": x, "right": x, "scale": 0.5}, y

        def score(self, output: Any, target: Any) -> dict[str, tuple[Tensor, Tensor]]:
            return {"mean_output": (output.sum(), torch.tensor(output.numel()))}

    loader = DataLoader(classes(20), 5)
    ours = Ours(Pairs(), train=loader, evaluate=loader, steps=3, loss=F.cross_entropy, show_progress=False)
    assert ours.fit().evaluations[0].keys() == {"step", "loss", "mean_output"}


@pytest.mark.parametrize("make", [iter, tuple, lambda found: (each for each in found), lambda found: map(id_of, found)])
def test_callbacks_may_come_from_anything_that_gives_them(make: Any) -> None:
    steps: list[int] = []

    class Watch(Callback):
        def on_step(self, trainer: Trainer, record: dict[str, float]) -> None:
            steps.append(trainer.step)

    trainer(callbacks=make([Watch(), Watch()]), steps=2).fit()
    assert steps == [1, 1, 2, 2]


def id_of(given: Any) -> Any:
    return given


def test_whole_numbers_may_be_floats_and_of_numpy(tmp_path: Path) -> None:
    """An argument that is accepted before training must also work at its end."""
    ours = trainer(
        steps=np.int64(3),
        keep=2.0,
        save_every=np.int32(1),
        clip=torch.tensor(1.0),
        seed=np.int64(4),
        checkpoint=str(tmp_path / "saved"),
        peak_flops=np.float32(1e9),
        flops_per_sample=np.int64(5),
        scheduler="linear",
        scheduler_options={"warmup_steps": 1.0, "min_ratio": np.float32(0.5)},
    )
    ours.fit()
    assert len(list((tmp_path / "saved").iterdir())) == 2
    assert [type(each) for each in (ours.steps, ours.keep, ours.save_every, ours.clip)] == [int, int, int, float]
    assert trainer(steps=None, epochs=2.0, evaluate=[1], evaluate_every=np.int8(2)).evaluate_every == 2


def test_tensors_are_batches_of_one_who_unpacks_them() -> None:
    class Ours(Trainer):
        def unpack(self, given: Any) -> tuple[Any, Any]:
            return given, given[:, :3].argmax(1)

    data = [torch.randn(4, 8)] * 2
    result = Ours(net(), train=data, evaluate=data, steps=2, loss=F.cross_entropy, show_progress=False).fit()
    assert result.steps == 2 and "accuracy" in result.evaluations[0]


@pytest.mark.parametrize(
    "position", [None, 12, "x", [1], {"step": 3}, {"epoch": None}, {"epoch": -1}, {"epoch": 10**30}]
)
def test_position_of_a_loop_of_ones_own_is_told_and_the_data_begin_anew(tmp_path: Path, position: Any) -> None:
    first = trainer(steps=2)
    first.fit()
    save(str(tmp_path / "saved"), first.model, first.optimizer, step=2, data_position=position)
    with pytest.warns(UserWarning, match="has no data position: the data start at their beginning"):
        assert trainer(steps=3, checkpoint=str(tmp_path / "saved")).fit().history[0]["step"] == 3


def test_callbacks_see_every_step_and_may_stop() -> None:
    seen: list[Any] = []

    class Watch(Callback):
        def on_begin(self, trainer: Trainer) -> None:
            seen.append("begin")

        def on_step(self, trainer: Trainer, record: dict[str, float]) -> None:
            seen.append(trainer.step)
            if trainer.step == 3:
                trainer.stop()

        def on_evaluation(self, trainer: Trainer, record: dict[str, float]) -> None:
            seen.append("evaluation")

        def on_end(self, trainer: Trainer, result: Any) -> None:
            seen.append(result.steps)

    trainer(callbacks=[Watch()], evaluate=DataLoader(classes(9), 3)).fit()
    assert seen == ["begin", 1, 2, 3, "evaluation", 3]


def test_what_was_interrupted_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    """This includes dropout, shuffling and the schedule: the losses are equal to the bit."""

    def make(steps: int, **options: Any) -> Trainer:
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))
        return trainer(model=model, steps=20, scheduler="linear", callbacks=[_StopAt(steps)], **options)

    whole = make(20).fit()
    first = make(7, checkpoint=str(tmp_path / "saved"), save_every=3).fit()
    torch.rand(7)  # numbers that are drawn between the two runs
    rest = make(20, checkpoint=str(tmp_path / "saved"))
    result = rest.fit()
    assert first.losses + result.losses == whole.losses
    assert result.history[0]["step"] == 8 and "7" in result.resumed_from
    assert make(20, checkpoint=str(tmp_path / "saved")).fit().history == []


class _StopAt(Callback):
    def __init__(self, step: int) -> None:
        self._step = step

    def on_step(self, trainer: Trainer, record: dict[str, float]) -> None:
        if trainer.step == self._step:
            trainer.stop()


def _step_lr(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 4)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"steps": 0}, "steps=0: give a whole number, 1 or more"),
        ({"steps": "10"}, "steps='10': give a whole number, 1 or more"),
        ({"steps": None, "epochs": -1}, "epochs=-1: give a whole number"),
        ({"steps": True}, "steps=True: give a whole number"),
        ({"steps": math.inf}, "steps=inf: give a whole number"),
        ({"clip": "1"}, "clip='1': give a norm above 0"),
        ({"clip": math.nan}, "clip=nan: give a norm above 0"),
        ({"seed": "a"}, "seed='a': give a 64-bit integer"),
        ({"seed": 2**70}, "seed=1180591620717411303424: give a 64-bit integer"),
        ({"keep": 2.5}, "keep=2.5: give a whole number, 1 or more"),
        ({"steps": np.float64(1.5)}, "steps=.*1.5.*: give a whole number, 1 or more"),
        (
            {"resume": "old"},
            r"resume='old': give True or False; .* checkpoint=; .* training\.load\(\.\.\.\) before",
        ),
        ({"resume": None}, "resume=None: give True or False"),
        ({"peak_flops": "1e12"}, "peak_flops='1e12': give a number above 0"),
        ({"checkpoint": True}, "checkpoint=True: give a folder or a URL"),
        ({"metrics_folder": 5}, "metrics_folder=5: give a folder or a URL"),
        ({"save_every": 3}, "save_every=3 needs checkpoint=: give a URL"),
        ({"evaluate_every": 3}, "evaluate_every=3 needs evaluate=: give a loader"),
        # optimizers and schedulers
        ({"optimizer": "adamv"}, "did you mean 'adam"),
        ({"optimizer": [1]}, r"optimizer='\[1\]' is a list: give a name, such as 'adamw', or a function of the param"),
        ({"optimizer": None}, "optimizer='None' is a NoneType: give a name"),
        ({"optimizer": lambda parameters, lr: parameters}, "<lambda> returned a list, not a torch.optim"),
        ({"optimizer": torch.optim.SGD, "optimizer_options": {"rate": 1}}, "optimizer SGD with .*argument 'rate'"),
        ({"optimizer_options": {"rate": 1}}, "unexpected keyword argument 'rate'"),
        ({"optimizer_options": [0.1]}, r"optimizer_options=\[0\.1\]: give a dict of options"),
        ({"optimizer_options": {"lr": "0.1"}}, r"optimizer 'adamw' with \{'lr': '0.1'\}: "),
        ({"scheduler": "cosinus"}, "choose one of constant, linear, cosine, wsd"),
        ({"scheduler": [1]}, r"scheduler='\[1\]' is a list: choose one of constant, .*, or give a function"),
        ({"scheduler": lambda optimizer: None}, "scheduler: <lambda> returned a NoneType, not a scheduler"),
        ({"scheduler": torch.optim.lr_scheduler.StepLR}, r"scheduler=lambda optimizer: StepLR\(optimizer, \.\.\.\)"),
        ({"scheduler": "wsd", "scheduler_options": {"warmup_steps": 10, "decay_steps": 5}}, "do not fit into 12"),
        (
            {"scheduler": "linear", "scheduler_options": {"warmup": 1}},
            "options warmup: choose from warmup_steps, decay",
        ),
        ({"scheduler": "linear", "scheduler_options": [3]}, r"scheduler_options=\[3\]: give a dict of options"),
        (
            {"scheduler": "linear", "scheduler_options": {"steps": 5}},
            "options have steps, which the Trainer sets",
        ),
        ({"scheduler": "linear", "scheduler_options": {"warmup_steps": 1.5}}, "warmup_steps=1.5: give a whole number"),
        ({"scheduler": "linear", "scheduler_options": {"warmup_steps": "1"}}, "warmup_steps='1': give a whole number"),
        ({"scheduler": "linear", "scheduler_options": {"decay_steps": 3}}, "decay_steps=3 applies only to 'wsd'"),
        ({"scheduler": "linear", "scheduler_options": {"min_ratio": 2}}, "min_ratio=2: give a fraction of the rate"),
        (
            {"scheduler": _step_lr, "scheduler_options": {"warmup_steps": 1}},
            "options apply only to a scheduler given by name",
        ),
        # callbacks, data, losses, models
        (
            {"callbacks": [object()]},
            r"callbacks\[0\] is a object, not a Callback: derive its class from detrain_nb.trai",
        ),
        ({"callbacks": [print]}, r"callbacks\[0\] is a builtin_function_or_method, not a Callback"),
        (
            {"callbacks": [Callback(), Callback]},
            r"callbacks\[1\] is the class Callback: pass an instance, Callback\(\)",
        ),
        ({"callbacks": Callback()}, "callbacks=a Callback: give a list of Callbacks"),
        ({"train": classes(4)}, "train is a TensorDataset, which yields samples: wrap it in a DataLoader"),
        ({"train": "data.csv"}, "train='data.csv' yields no batches: give a DataLoader"),
        ({"train": [torch.zeros(2, 8), torch.zeros(2)]}, r"train is a list of tensors: give batches, such as \[\("),
        ({"train": {"x": 5}}, r"train=\{'x': 5\} yields no batches: give a DataLoader"),
        ({"train": 5}, "train=5 cannot be iterated"),
        ({"evaluate": classes(4)}, "evaluate is a TensorDataset, which yields samples"),
        ({"train": [], "steps": None, "epochs": 2}, "the training data have no batches"),
        ({"evaluate": DataLoader([])}, "the evaluation data have no batches"),
        ({"loss": "mse"}, "loss='mse' is a str: pass a function of the output and the target"),
        ({"loss": nn.MSELoss}, r"loss=MSELoss is a class: pass an instance, MSELoss\(\)"),
        ({"model": nn.Linear}, "the model is the class Linear: pass an instance"),
        ({"model": "bert"}, "the model is 'bert': give an nn.Module or the result of parallelize"),
    ],
)
def test_wrong_arguments_are_told(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        trainer(**options)


@pytest.mark.parametrize(
    "options, message",
    [
        (
            {"precision": "bf16"},
            "precision= is an argument of parallelize: pass precision= to parallelize, and its result",
        ),
        ({"bf16": True}, "bf16= is an argument of parallelize: pass precision= to parallelize"),
        ({"gradient_accumulation_steps": 4}, "pass num_microbatches= to parallelize"),
        ({"batch_size": 4}, "batch_size= is an argument of the DataLoader"),
        ({"lr": 0.1}, r"lr= belongs to the optimizer: give optimizer_options=\{\"lr\": \.\.\.\}"),
        ({"learning_rate": 0.1}, r"give optimizer_options=\{\"lr\": "),
        ({"warmup_steps": 3}, r"belongs to the scheduler: give scheduler_options=\{\"warmup_steps\": "),
        ({"compute_metrics": len}, "is not an argument: override Trainer.score"),
        ({"resume_from_checkpoint": "x"}, r"resume_from_checkpoint= is unknown: did you mean checkpoint=\?"),
        ({"max_steps": 3}, r"max_steps= is unknown: did you mean steps=\?"),
        ({"optimiser": "sgd"}, r"optimiser= is unknown: did you mean optimizer=\?"),
        ({"qwertz": 1, "lr": 2}, "qwertz= is unknown: choose from model, train, steps, .*; lr= belongs"),
    ],
)
def test_argument_of_another_place_is_told_where_it_belongs(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        trainer(**options)


def test_names_of_a_subclass_are_its_own() -> None:
    class Ours(Trainer):
        def __init__(self, model: Any, precision: str, **more: Any) -> None:
            super().__init__(model, **more)
            self.precision = precision

    ours = Ours(net(), "low", train=[], steps=1, loss=F.cross_entropy)
    assert ours.precision == "low"
    with pytest.raises(SpecError, match="all arguments after the model are keyword-only"):
        Trainer(net(), [], 1)  # type: ignore[misc]


def test_missing_loss_is_told_in_words_of_the_user() -> None:
    data = DataLoader(classes(8), 4)
    for model in (net(), par.WholeModel(net(), device="cpu")):
        with pytest.raises(SpecError, match="there is no loss to train with: pass loss=") as error:
            trainer(model=model, train=data, loss=None).fit()
        assert "WholeModel" not in str(error.value)


@pytest.mark.parametrize(
    "scored, message",
    [
        (0.5, r"score returned a float, not a dict of \(sum, count\) by name"),
        ({"accuracy": 0.5}, r"score returned 0.5 for 'accuracy': return \(sum, count\)"),
    ],
)
def test_score_that_is_none_is_told(scored: Any, message: str) -> None:
    class Ours(Trainer):
        def score(self, output: Any, target: Any) -> Any:
            return scored

    data = DataLoader(classes(8), 4)
    with pytest.raises(SpecError, match=message):
        Ours(net(), train=data, steps=1, loss=F.cross_entropy).evaluate(data)


def test_generator_is_trained_on_once_and_evaluated_on_once() -> None:
    batches = [(torch.zeros(2, 8), torch.zeros(2, dtype=torch.long))] * 3
    with pytest.raises(SpecError, match="the training data were exhausted after epoch 1: give a loader that can be"):
        trainer(train=(each for each in batches), steps=4).fit()
    ours = trainer(train=batches, evaluate=(each for each in batches), steps=2, evaluate_every=1)
    with pytest.raises(SpecError, match="the evaluation has no scores"):
        ours.fit()


def test_data_that_is_no_pair_or_nothing_is_told() -> None:
    for given in (torch.zeros(2, 8), (torch.zeros(2, 8),) * 3):
        with pytest.raises(
            SpecError, match=r"the loader yielded .*not a pair of inputs and target.*override Trainer\.unp"
        ):
            trainer(train=[given, "x"]).fit()
    with pytest.raises(SpecError, match="the training data have no batches"):
        trainer(train=[]).fit()


def test_schedules_rise_stay_and_fall() -> None:
    def rates(name: str, **options: Any) -> list[float]:
        optimizer = make_optimizer("sgd", [nn.Parameter(torch.zeros(1))], lr=1.0)
        scheduler = make_scheduler(name, optimizer, steps=10, **options)
        found = []
        for _ in range(11):
            found.append(round(optimizer.param_groups[0]["lr"], 3))
            optimizer.step()
            scheduler.step()
        return found

    assert rates("wsd", warmup_steps=2, decay_steps=4) == [0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0]
    assert rates("linear", min_ratio=0.5) == [1, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5]
    cosine = rates("cosine", warmup_steps=2)
    assert cosine[:3] == [0.5, 1, 1] and cosine[6] == 0.5 and cosine[-1] == 0
    assert rates("constant", warmup_steps=4) == [0.25, 0.5, 0.75] + [1.0] * 8


# ---- speed


def test_speed_is_told_in_samples_tokens_and_flops(metrics: Path) -> None:
    """Batches have 6 and 4 rows; result and lines have the same figures, for a peak of 1e9 FLOPs a second per rank."""
    data = TensorDataset(torch.randint(0, 11, (10, 7)), torch.zeros(10, dtype=torch.long))
    ours = trainer(model=TokenNet(), train=DataLoader(data, 6), steps=4, flops_per_sample=5e3, peak_flops=1e9)
    result = ours.fit()
    for record in result.history:
        assert record["tokens_per_s"] == pytest.approx(7 * record["samples_per_s"])
        assert record["mfu"] == pytest.approx(3 * 5e3 * record["samples_per_s"] / 1e9), "forward, and twice backward"
    in_steps_s = sum(rows / record["samples_per_s"] for rows, record in zip((6, 4, 6, 4), result.history))
    assert 0 < in_steps_s <= result.seconds
    assert [line["mfu"] for line in read_metrics()] == [record["mfu"] for record in result.history]


@pytest.mark.parametrize("given", [{}, {"flops_per_sample": 5e3}, {"peak_flops": 1e9}])
def test_what_is_not_known_of_speed_is_left_out(given: dict[str, float]) -> None:
    """Rows of floats are no tokens, and the share of peak FLOPs (mfu) needs both numbers."""
    record = trainer(steps=1, **given).fit().history[0]
    assert "samples_per_s" in record and not {"mfu", "tokens_per_s"} & record.keys()


# ---- seeds, optimizers and schedulers of the user's own


def test_seed_is_that_of_every_generator() -> None:
    def drawn(seed: int) -> list[float]:
        set_seed(seed)
        return [random.random(), float(np.random.rand()), float(torch.rand(()))]

    first = drawn(3)
    assert drawn(3) == first
    assert all(one != other for one, other in zip(drawn(4), first))
    assert drawn(2**32 + 3)[1] == first[1], "numpy's seeds have 32 bits"


def test_optimizer_and_scheduler_may_be_names_objects_or_functions() -> None:
    """A name, an object and a function make the same steps; a StepLR given as a function halves the rate."""
    named = trainer(optimizer="sgd", optimizer_options={"lr": 0.2, "momentum": 0.9}, scheduler="linear").fit()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    scheduler = make_scheduler("linear", optimizer, steps=12)
    ours = trainer(model=model, optimizer=optimizer, optimizer_options=None, scheduler=scheduler)
    assert ours.optimizer is optimizer and ours.scheduler is scheduler
    assert ours.fit().losses == named.losses
    made = trainer(
        optimizer=functools.partial(torch.optim.SGD, momentum=0.9),
        optimizer_options={"lr": 0.2},
        scheduler=lambda optimizer: make_scheduler("linear", optimizer, steps=12),
    )
    assert made.fit().losses == named.losses
    halves = trainer(scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)).fit()
    assert [record["lr"] for record in halves.history] == [0.02] * 4 + [0.01] * 4 + [0.005] * 4


def _sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    "options, message",
    [
        (lambda model: {"optimizer": _sgd(net())}, "the optimizer has parameters of another model"),
        (
            lambda model: {"optimizer": _sgd(model), "optimizer_options": {"lr": 1}},
            "lr do not apply to an existing optimizer",
        ),
        (
            lambda model: {"scheduler": torch.optim.lr_scheduler.StepLR(_sgd(model), 4)},
            "the scheduler belongs to another optimizer: pass that one",
        ),
        (
            lambda model: {"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau},
            "ReduceLROnPlateau steps per evaluation, not per optimizer step",
        ),
        (lambda model: {"optimizer": torch.optim.LBFGS(model.parameters())}, "LBFGS evaluates the loss again"),
        (lambda model: {"optimizer": "lbfgs"}, "LBFGS evaluates the loss again within its step"),
        (lambda model: {"optimizer": torch.optim.LBFGS}, "LBFGS evaluates the loss again within its step"),
        (lambda model: {"optimizer": functools.partial(torch.optim.LBFGS, lr=1)}, "LBFGS evaluates the loss again"),
    ],
)
def test_optimizers_and_schedulers_that_cannot_be_are_told(options: Any, message: str) -> None:
    model = net()
    with pytest.raises(SpecError, match=message):
        trainer(model=model, **{"optimizer_options": None, **options(model)})


# ---- on ranks


@pytest.fixture(scope="module")
def session(two_ranks: Session, tmp_path_factory: pytest.TempPathFactory) -> Session:
    two_ranks.run_cell("import os, trainer_ranks", timeout_s=60)
    two_ranks.run_cell(f"os.environ['DETRAIN_NB_METRICS'] = {str(tmp_path_factory.mktemp('ranks'))!r}")
    return two_ranks


@pytest.mark.parametrize("axes", ["dp_replicate", "dp_shard", "pp", "tp"])
def test_ranks_train_as_one_process_does(session: Session, axes: str, tmp_path: Path) -> None:
    """103 samples in batches of 10 make the last batch uneven; losses, accuracy and norms are over all samples."""
    found = session.run_cell(f"trainer_ranks.train({{{axes!r}: 2}}, {str(tmp_path)!r})", timeout_s=40).values
    alone = session.run_cell(f"trainer_ranks.train_alone({2 if 'dp' in axes else 1})", ranks=[0]).values[0]
    for rank in range(2):
        assert found[rank]["losses"] == pytest.approx(alone["losses"], rel=2e-5)
        assert found[rank]["norms"] == pytest.approx(alone["norms"], rel=2e-4)
        assert found[rank]["evaluation"]["loss"] == pytest.approx(alone["evaluation"]["loss"], rel=2e-4)
        assert found[rank]["evaluation"]["accuracy"] == alone["evaluation"]["accuracy"]
    assert [line["rank"] for line in read_metrics(str(tmp_path))] == [0] * 13


def test_stages_that_see_other_samples_are_told(session: Session) -> None:
    with pytest.raises(Exception, match="ranks 0 and 1 share one copy of the model but see different samples"):
        session.run_cell("trainer_ranks.train_on_other_orders()", timeout_s=30)
    session.run_cell("1")


def test_ranks_that_would_evaluate_unequal_numbers_of_batches_are_told(session: Session) -> None:
    with pytest.raises(Exception, match=r"ranks have unequal batch counts \(2, 3\) and would deadlock"):
        session.run_cell("trainer_ranks.evaluate_unequal_lists()", timeout_s=30)


@pytest.mark.parametrize(
    "axes, kind, said",
    [
        (
            "dp_replicate",
            "epochs",
            "steps is 5 on rank 0 and 4 on rank 1, and they would deadlock: give the same",
        ),
        ("dp_replicate", "steps", "steps is 5 on rank 0 and 4 on rank 1"),
        ("pp", "batches", r"ranks of one model copy have unequal batch counts per epoch \(5, 4\) and"),
    ],
)
def test_ranks_that_would_make_unequal_numbers_of_steps_are_told(
    session: Session, axes: str, kind: str, said: str
) -> None:
    with pytest.raises(Exception, match=said):
        session.run_cell(f"trainer_ranks.train_unequally({axes!r}, {kind!r})", timeout_s=30)
    session.run_cell("1")


@pytest.mark.parametrize("axes", ["dp_replicate", "dp_shard", "tp"])
def test_ranks_that_would_make_other_parameters_of_the_same_ones_are_told(session: Session, axes: str) -> None:
    told = r"the optimizer has lr=0\.5 on rank 0 and 0\.4 on rank 1, for the same parameters"
    with pytest.raises(Exception, match=told):
        session.run_cell(f"trainer_ranks.train_unequally({axes!r}, 'rate')", timeout_s=30)


def test_stages_may_have_rates_of_their_own(session: Session) -> None:
    session.run_cell("trainer_ranks.train_unequally('pp', 'rate')", timeout_s=30)


def test_one_rank_may_stop_before_the_first_step(session: Session) -> None:
    assert session.run_cell("trainer_ranks.stop_at_once()", timeout_s=30).values == {0: 0, 1: 0}


def test_prediction_is_on_the_rank_of_the_last_stage(session: Session) -> None:
    """Layers are in evaluation mode during the prediction, batch by batch, and in training mode afterwards."""
    found = session.run_cell("trainer_ranks.predict()", timeout_s=30).values
    assert found[0] == ([], True)
    apart, is_training = found[1]
    assert len(apart) == 3 and max(apart) < 1e-6 and is_training


@pytest.mark.parametrize("axes", ["pp", "dp_shard"])
def test_optimizer_of_the_users_own_is_of_what_a_rank_has(session: Session, axes: str) -> None:
    for named, given, made in session.run_cell(f"trainer_ranks.optimize({axes!r})", timeout_s=40).values.values():
        assert named == given == made and named[-1] < named[0]


@pytest.mark.parametrize("axes, replicas", [("pp", 1), ("dp_replicate", 2)])
def test_speed_is_of_all_replicas_and_of_all_ranks(session: Session, axes: str, replicas: int) -> None:
    """Each replica has 4 rows of 7 tokens in 2 s; a row takes 5000 FLOPs, and each rank can do 1e9 a second."""
    for record in session.run_cell(f"trainer_ranks.report({axes!r})", timeout_s=30).values.values():
        assert (record["samples_per_s"], record["tokens_per_s"]) == (2 * replicas, 14 * replicas)
        assert record["mfu"] == pytest.approx(3 * 5e3 * 2 * replicas / (2 * 1e9))


def test_bar_is_on_the_first_rank_alone(session: Session) -> None:
    for axes in ("dp_replicate", "pp"):
        cell = session.run_cell(f"trainer_ranks.show_bar({axes!r})", timeout_s=30).cell
        shown = [session.log.text(cell, rank, "stderr") for rank in range(2)]
        assert "training: 100%" in shown[0] and "3/3" in shown[0] and "loss=" in shown[0]
        assert "training:" not in shown[1]
    hidden = session.run_cell("trainer_ranks.show_bar('pp', show_progress=False)", timeout_s=30).cell
    assert "training:" not in session.log.text(hidden, 0, "stderr")


def test_rank_whose_gradient_is_no_number_is_named(session: Session) -> None:
    with pytest.raises(Exception, match=r"gradients are not finite on rank 1 in '2.weight'"):
        session.run_cell("trainer_ranks.meet_nan()", timeout_s=30)


@pytest.mark.parametrize("first, then", [(2, 1), (1, 2)])
def test_fused_layers_are_saved_as_the_whole_model_has_them(
    session: Session, first: int, then: int, tmp_path: Path
) -> None:
    for losses, expected, apart in session.run_cell(
        f"trainer_ranks.change_layout({first}, {then}, {str(tmp_path)!r})", timeout_s=60
    ).values.values():
        assert losses == pytest.approx(expected, rel=1e-5)
        assert apart < 1e-6


def test_page_of_the_docs_does_what_it_says(session: Session, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/training.md").read_text(encoding="utf-8")
    code, *_ = re.findall(r"```python\n%%distributed\n(.*?)```", page, re.DOTALL)
    code = code.replace('"checkpoints"', repr(str(tmp_path / "checkpoints"))) + "result.evaluations[-1]['accuracy']"
    found = session.run_cell(code, timeout_s=60).values
    assert found[0] == found[1] > 0.9
    assert len(list((tmp_path / "checkpoints").iterdir())) == 3


# ---- loaders of dicts on ranks (in one process: test_unpacking.py)


@pytest.mark.parametrize("axes", ["pp", "dp_shard"])
@pytest.mark.parametrize("has_labels", [True, False])
def test_model_is_called_with_the_labels_that_its_example_had(session: Session, axes: str, has_labels: bool) -> None:
    """The model is laid out with a loss of its output or with one of the target; losses are those of one process."""
    samples = [{"x": x, "labels": y} for x, y in classes(40)]
    expected = by_hand(Headed(), samples)
    found = session.run_cell(f"trainer_ranks.train_on_dicts({axes!r}, {has_labels})", timeout_s=40).values
    assert found[0] == found[1] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("axes", ["pp", "dp_shard"])
def test_targets_of_another_dtype_are_told_on_every_rank(session: Session, axes: str) -> None:
    with pytest.raises(Exception, match=r"ranks 0-1 on .*cross_entropy takes class indices, but the targets are fl"):
        session.run_cell(f"trainer_ranks.train_on_floats({axes!r})", timeout_s=40)


# ---- restarts by torchrun

SCRIPT = """
import os, signal, sys
import torch.distributed as dist
from detrain_nb import parallel as par, training
sys.path.insert(0, {folder!r})
import trainer_ranks

class Die(training.Callback):
    def on_step(self, trainer, record):
        if {dies} and trainer.step == 7 and dist.get_rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)

dist.init_process_group("gloo")
example = trainer_ranks.classes(2)[0][0][None]
model = par.parallelize(trainer_ranks.net(), par.make_mesh(dp_shard=2), example_inputs=example,
                        loss=trainer_ranks.F.cross_entropy, device="cpu")
loader = trainer_ranks.DataLoader(trainer_ranks.classes(103), 5, shuffle=True)
result = training.Trainer(model, train=loader, steps=12, checkpoint={url!r}, save_every=3, callbacks=[Die()],
                          show_progress=False).fit()
if dist.get_rank() == 0:
    print("losses", result.history[0]["step"], *result.losses, flush=True)
dist.destroy_process_group()
os._exit(0)  # a thread of gloo that lets go of a tensor while Python ends would abort it, and torchrun start once more
"""


def _torchrun(tmp_path: Path, name: str, *, dies: bool, **env: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / f"{name}.py"
    script.write_text(SCRIPT.format(folder=str(Path(__file__).parent), dies=dies, url=str(tmp_path / name)))
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=3"]
    return subprocess.run(
        [*argv, str(script)],
        env={**os.environ, **env, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        cwd=tmp_path,
    )


@pytest.mark.slow
def test_killed_rank_leads_to_a_resume_from_the_last_checkpoint(tmp_path: Path) -> None:
    cure = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    whole = _torchrun(tmp_path, "whole", dies=False, **cure).stdout.split()
    again = _torchrun(tmp_path, "again", dies=True, **cure)
    assert again.returncode == 0, f"{again.stderr[:4000]}\n...\n{again.stderr[-2000:]}"
    shown = again.stdout.split()
    assert int(shown[1]) >= 4, "it went on from a checkpoint"
    assert shown[2:] == whole[2 + int(shown[1]) - 1 :], "as if nobody had died"
    assert "TORCH_DISABLE" not in again.stderr


@pytest.mark.slow
def test_torchrun_that_may_start_again_without_the_cure_is_warned(tmp_path: Path) -> None:
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun" in _torchrun(tmp_path, "warned", dies=False).stderr
