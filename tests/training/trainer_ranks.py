"""Code that the ranks of a test run: a Trainer on a mesh, and the same training in one process."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from detrain_nb import parallel as par
from detrain_nb import training
from detrain_nb.parallel.tensor.apply import plan_of
from detrain_nb.training.reports import Reports, Result


def classes(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(samples, 8, generator=generator)
    return TensorDataset(x, x[:, :3].argmax(1))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


class TokenNet(nn.Module):
    """A model whose inputs are token ids, as those of a language model are."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(11, 8), nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.head(self.table(tokens).mean(1))
        return result


def train(axes: dict[str, int], folder: str) -> dict[str, Any]:
    mesh = par.make_mesh(**axes, device_type="cpu")
    model = par.parallelize(
        net(), mesh, example_inputs=torch.zeros(2, 8), loss=F.cross_entropy, num_microbatches=2, device="cpu"
    )
    size = 5 if model.num_replicas == 2 else 10
    return fit(model, DataLoader(classes(103), size), metrics_folder=folder)


def train_alone(num_replicas: int) -> dict[str, Any]:
    return fit(par.WholeModel(net(), loss=F.cross_entropy, device="cpu"), DataLoader(classes(103), 10))


def fit(model: par.ParallelModel, loader: Any, **options: Any) -> dict[str, Any]:
    trainer = training.Trainer(
        model,
        train=loader,
        evaluate=DataLoader(classes(37), 4),
        steps=12,
        optimizer="sgd",
        optimizer_options={"lr": 0.1},
        clip=0.5,
        show_progress=False,
        **options,
    )
    result = trainer.fit()
    norms = [record["grad_norm"] for record in result.history]
    return {"losses": result.losses, "norms": norms, "evaluation": result.evaluations[-1]}


def stages() -> par.ParallelModel:
    mesh = par.make_mesh(pp=2, device_type="cpu")
    return par.parallelize(net(), mesh, example_inputs=torch.zeros(2, 8), loss=F.cross_entropy, device="cpu")


def train_on_other_orders() -> None:
    """Train with a loader that has another order on each rank."""
    order = torch.randperm(40, generator=torch.Generator().manual_seed(dist.get_rank())).tolist()
    loader = [next(iter(DataLoader(Subset(classes(40), order), 8)))]
    training.Trainer(stages(), train=loader, steps=1, show_progress=False).fit()


def train_unequally(axes: str, kind: str) -> None:
    """Train with one batch or one step fewer on the second rank than on the first, or with a lower learning rate."""
    mesh = par.make_mesh(**{axes: 2}, device_type="cpu")
    model = par.parallelize(net(), mesh, example_inputs=torch.zeros(2, 8), loss=F.cross_entropy, device="cpu")
    fewer = 5 - dist.get_rank()
    batches = [(torch.zeros(4, 8), torch.zeros(4, dtype=torch.long))] * (5 if kind in ("steps", "rate") else fewer)
    how: dict[str, Any] = {
        "epochs": {"epochs": 1},
        "steps": {"steps": fewer},
        "batches": {"steps": 7},
        "rate": {"steps": 1, "optimizer_options": {"lr": fewer / 10, "eps": 1 if fewer == 5 else 1.0}},
    }[kind]
    training.Trainer(model, train=batches, show_progress=False, **how).fit()


def meet_nan() -> None:
    model = stages()
    model.train_step(torch.zeros(4, 8), torch.zeros(4, dtype=torch.long))

    class Spoiled(training.Trainer):
        def _shared(self, loss: Any) -> Any:
            for name, parameter in self.model.named_parameters():
                if name == "2.weight":
                    parameter.grad.fill_(float("nan"))
            return super()._shared(loss)

    batch = torch.zeros(4, 8), torch.zeros(4, dtype=torch.long)
    Spoiled(model, train=[batch], steps=1, show_progress=False).fit()


class Fused(nn.Module):
    """An MLP whose gate and up projections are one layer, the rows of which have another order on two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down, self.head = nn.Linear(8, 24), nn.Linear(12, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        result: Tensor = self.head(x + self.down(F.silu(gate) * up))
        return result


def fused_trainer(tp: int, url: str, *, steps: int) -> training.Trainer:
    torch.manual_seed(0)
    model: Any = Fused()
    if tp > 1:
        mesh = par.make_mesh(tp=tp, device_type="cpu")
        model = par.parallelize(model, mesh, example_inputs=torch.zeros(2, 8), loss=F.cross_entropy, device="cpu")
        assert "gate_up.weight" in plan_of(model.modules[0]).packed
    else:
        model = par.WholeModel(model, loss=F.cross_entropy, device="cpu")
    return training.Trainer(
        model, train=DataLoader(classes(40), 8), steps=steps, checkpoint=url, optimizer_options={"lr": 0.01},
        show_progress=False,
    )  # fmt: skip


def change_layout(first: int, then: int, url: str) -> tuple[list[float], list[float], float]:
    """Return losses of 3 + 3 steps with two sizes of tp, those with tp=1 alone, and the error of an exported model."""
    begun = fused_trainer(first, url, steps=3)
    losses = begun.fit().losses
    training.export_safetensors(url + "-file", begun.model)
    plain = Fused()
    training.import_safetensors(url + "-file", plain)
    x = classes(5).tensors[0]
    with torch.no_grad():
        apart = float((plain(x) - begun.model.predict(x)).abs().max())
    rest = fused_trainer(then, url, steps=6).fit()
    assert rest.resumed_from
    return losses + rest.losses, fused_trainer(1, url + "-alone", steps=6).fit().losses, apart


def evaluate_unequal_lists() -> None:
    """Evaluate lists, which are not dealt out to the ranks: rank 1 has one batch more than rank 0."""
    mesh = par.make_mesh(dp_shard=2, device_type="cpu")
    model = par.parallelize(net(), mesh, example_inputs=torch.zeros(2, 8), loss=F.cross_entropy, device="cpu")
    batches = list(DataLoader(classes(40), 8))[: 2 + dist.get_rank()]
    training.Trainer(model, train=batches, steps=1, show_progress=False).evaluate(batches)


class StopsAtOnce(training.Callback):
    def on_begin(self, trainer: training.Trainer) -> None:
        if dist.get_rank() == 1:
            trainer.stop()


def stop_at_once() -> int:
    """Stop on the second rank only; return the number of steps that were made."""
    loader = DataLoader(classes(20), 10)
    trainer = training.Trainer(stages(), train=loader, steps=2, callbacks=[StopsAtOnce()], show_progress=False)
    return trainer.fit().steps


def predict() -> tuple[list[float], bool]:
    """Return the error of each batch's prediction against the whole model, and whether all layers train afterwards."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3))
    whole = copy.deepcopy(model).eval()
    laid_out = par.parallelize(
        model, par.make_mesh(pp=2, device_type="cpu"), example_inputs=torch.zeros(2, 8), loss=F.cross_entropy,
        pp=["1"], device="cpu",
    )  # fmt: skip
    trainer = training.Trainer(laid_out, train=DataLoader(classes(8), 8), steps=1, show_progress=False)
    batches = [classes(10).tensors[0][begin : begin + 4] for begin in (0, 4, 8)]
    with torch.no_grad():
        apart = [float((found - whole(x)).abs().max()) for found, x in zip(trainer.predict(batches), batches)]
    return apart, all(part.training for module in laid_out.modules for part in module.modules())


def optimize(axes: str) -> list[list[float]]:
    """Return the losses with SGD by name, as an object over this rank's parameters, and as a function of them."""

    def fit_with(choose: Any, **options: Any) -> list[float]:
        mesh = par.make_mesh(**{axes: 2}, device_type="cpu")
        model = par.parallelize(net(), mesh, example_inputs=torch.zeros(2, 8), loss=F.cross_entropy, device="cpu")
        loader = DataLoader(classes(40), 8)
        return training.Trainer(
            model, train=loader, steps=5, optimizer=choose(model), show_progress=False, **options
        ).fit().losses  # fmt: skip

    sgd = functools.partial(torch.optim.SGD, lr=0.5)
    return [
        fit_with(lambda model: "sgd", optimizer_options={"lr": 0.5}),
        fit_with(lambda model: sgd(model.parameters())),
        fit_with(lambda model: sgd),
    ]


def report(axes: str) -> dict[str, float]:
    """Return what a rank reports of a step of two seconds, with four rows of tokens on each replica."""
    tokens = torch.zeros(4, 7, dtype=torch.long)
    model = par.parallelize(
        TokenNet(), par.make_mesh(**{axes: 2}, device_type="cpu"), example_inputs=tokens, loss=F.cross_entropy,
        device="cpu",
    )  # fmt: skip
    reports = Reports(model, metrics_folder=None, flops_per_sample=5e3, peak_flops=1e9, show_progress=False)
    reports.begin(Result(0))
    record: dict[str, float] = {}
    reports.step(1, record, tokens, seconds=2.0)
    return record


def show_bar(axes: str, *, show_progress: bool = True) -> None:
    mesh = par.make_mesh(**{axes: 2}, device_type="cpu")
    model = par.parallelize(net(), mesh, example_inputs=torch.zeros(2, 8), loss=F.cross_entropy, device="cpu")
    training.Trainer(model, train=DataLoader(classes(40), 8), steps=3, show_progress=show_progress).fit()


class Headed(nn.Module):
    """A model that also returns a loss if it is called with labels, like those of transformers."""

    has_had_labels = False

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.net(x)
        if labels is None:
            return {"logits": logits}
        self.has_had_labels = True
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


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


def _of_output(output: Any, target: Any) -> Tensor:
    loss: Tensor = output["loss"]
    return loss


def _of_target(output: Any, target: Any) -> Tensor:
    return F.cross_entropy(output["logits"], target)


def train_on_dicts(axes: str, has_labels: bool) -> list[float]:
    samples = [{"x": x, "labels": y} for x, y in classes(40)]
    example = {"x": torch.zeros(4, 8), **({"labels": torch.zeros(4, dtype=torch.long)} if has_labels else {})}
    model = par.parallelize(
        Headed(), par.make_mesh(**{axes: 2}, device_type="cpu"), example_inputs=example,
        loss=_of_output if has_labels else _of_target, num_microbatches=2 if axes == "pp" else 1, device="cpu",
    )  # fmt: skip
    loader: Any = DataLoader(samples, 8 // model.num_replicas)  # type: ignore[arg-type]
    return training.Trainer(
        model, train=loader, steps=5, optimizer="sgd", optimizer_options={"lr": 0.1}, show_progress=False
    ).fit().losses  # fmt: skip


def train_on_floats(axes: str) -> None:
    mesh = par.make_mesh(**{axes: 2}, device_type="cpu")
    model = par.parallelize(net(), mesh, example_inputs=torch.zeros(2, 8), loss=F.cross_entropy, device="cpu")
    batch = torch.zeros(4, 8), torch.zeros(4)
    training.Trainer(model, train=[batch], steps=1, show_progress=False).fit()
