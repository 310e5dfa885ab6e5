"""Code that a test's ranks run: models laid out over a mesh, compared with whole ones through AdamW and clipping."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from meshes import mesh_of
from models import GPT, Routed
from on_ranks import IGNORED, TokenLoss, draw, made, tokens
from tensor_models import Llama
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from detrain_nb import parallel as par
from detrain_nb import training
from detrain_nb.parallel.mesh import _device_type


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(
    axes: dict[str, int],
    *,
    layers: int = 2,
    is_tied: bool = True,
    differs: bool = False,
    optimizer: str | None = None,
    **options: Any,
) -> Any:
    """Train two steps; return the largest differences of losses, gradients (relative), their norm and parameters.

    ``differs``: the other ranks start with other values than rank 0. ``optimizer``: the AdamW implementation on the
    mesh, "foreach" or "fused". The default is the loop, which starts fastest: for each new list of DTensors torch has
    to work out the sharding again.
    """
    mesh = mesh_of(**axes)
    model, loss = made(GPT(layers=layers, is_tied=is_tied)), TokenLoss()
    whole = copy.deepcopy(model)
    if differs and dist.get_rank():
        for parameter in model.parameters():
            nn.init.normal_(parameter)
    num_replicas, me = place_of(mesh)
    laid_out = par.parallelize(
        model, mesh, example_inputs=tokens(2, 1), loss=loss, num_microbatches=4, device="cpu", **options
    )
    optimizers = [
        torch.optim.AdamW(
            list(laid_out.parameters()), lr=1e-2, **({optimizer: True} if optimizer else {"foreach": False})
        ),
        torch.optim.AdamW(list(whole.parameters()), lr=1e-2, foreach=True),
    ]
    found = {"loss": 0.0, "gradient": 0.0, "later gradient": 0.0, "norm": 0.0}
    references = dict(whole.named_parameters(remove_duplicate=False))
    for step in range(2):
        x, y = tokens(8 * num_replicas, step), tokens(8 * num_replicas, step + 10)
        y[0, :9] = y[5, 3:] = IGNORED  # replicas count different numbers of tokens
        mine = x.chunk(num_replicas)[me], y.chunk(num_replicas)[me]
        losses = laid_out.evaluate(*mine), laid_out.train_step(*mine)
        expected = loss(whole(x), y)
        expected.backward()
        if laid_out.is_last:
            found["loss"] = max(found["loss"], *(float((full(each) - expected.detach()).abs()) for each in losses))
        for name, parameter in laid_out.named_parameters():
            reference = references[name].grad
            apart = (full(parameter.grad) - reference).abs().max() / reference.abs().max()
            when = "later gradient" if step else "gradient"
            found[when] = max(found[when], float(apart))
        found["norm"] = max(found["norm"], clip_and_step(laid_out, whole, optimizers, limit=0.1))
    apart_by = [float((full(p.detach()) - references[name]).abs().max()) for name, p in laid_out.named_parameters()]
    return {**found, "parameter": max(apart_by)}


def clip_and_step(
    laid_out: par.ParallelModel, whole: nn.Module, optimizers: list[torch.optim.Optimizer], *, limit: float
) -> float:
    """Clip both models and step both optimizers; return the relative difference of the gradient norms."""
    norm = par.clip_grad_norm(laid_out, limit)
    expected = nn.utils.clip_grad_norm_(whole.parameters(), limit)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return abs(float(norm / expected) - 1)


def fit(axes: dict[str, int], folder: str, *, kind: str = "gpt", **options: Any) -> list[dict[str, Any]]:
    """Run a Trainer over the mesh and one of the whole model; return the numbers that each reports, by step.

    The whole model's last evaluation is computed by hand.
    """
    mesh = mesh_of(**axes)
    model, loss = made({"gpt": GPT, "llama": Llama}[kind](layers=2, is_tied=True)), TokenLoss()
    whole = par.WholeModel(copy.deepcopy(model), loss=loss, device="cpu")
    laid_out = par.parallelize(model, mesh, example_inputs=(tokens(2, 1),), loss=loss, device="cpu", **options)
    found = []
    for each in (laid_out, whole):
        trainer = training.Trainer(
            each,
            optimizer=torch.optim.AdamW(list(each.parameters()), lr=1e-2, eps=1e-3),
            train=DataLoader(_texts(40), 16 // laid_out.num_replicas if each is laid_out else 16, shuffle=True),
            evaluate=DataLoader(_texts(14), 4),
            evaluate_every=3,
            steps=6,
            clip=0.5,
            metrics_folder=folder,
            show_progress=False,
        )
        result = trainer.fit()
        told = {"losses": result.losses, "norms": [record["grad_norm"] for record in result.history]}
        for key in ("loss", "accuracy"):
            told[f"evaluated {key}"] = [record[key] for record in result.evaluations]
        found.append(told)
    x, y = _texts(14).tensors
    with torch.no_grad():
        output = whole.modules[0].eval()(x)
    is_right = (output.argmax(-1) == y)[y != IGNORED]
    found[1]["evaluated loss"][-1] = float(loss(output, y))
    found[1]["evaluated accuracy"][-1] = float(is_right.double().mean())
    return found


def _texts(rows: int) -> TensorDataset:
    """Return token rows in which some targets are ignored."""
    x, y = tokens(rows, rows), tokens(rows, rows + 1)
    y[0, :9] = y[rows // 2, 3:] = IGNORED
    return TensorDataset(x, y)


def place_of(mesh: Any) -> tuple[int, int]:
    """Return the number of replicas, and the index of the one that this rank belongs to."""
    sizes = dict(zip(mesh.mesh_dim_names, mesh.shape))
    mine = dict(zip(mesh.mesh_dim_names, mesh.get_coordinate()))
    shards = sizes.get("dp_shard", 1)
    return sizes.get("dp_replicate", 1) * shards, mine.get("dp_replicate", 0) * shards + mine.get("dp_shard", 0)


def bytes_here(axes: dict[str, int], **options: Any) -> tuple[int, int]:
    """Return the bytes of the parameters and of the optimizer's state on this rank."""
    mesh = mesh_of(**axes)
    model = made(GPT(layers=4))
    laid_out = par.parallelize(model, mesh, example_inputs=tokens(2, 1), loss=TokenLoss(), device="cpu", **options)
    optimizer = torch.optim.AdamW(list(laid_out.parameters()))
    laid_out.train_step(tokens(8, 1), tokens(8, 2))
    optimizer.step()
    states = [leaf for state in optimizer.state.values() for leaf in state.values() if leaf.dim()]
    parts = [[here(tensor).nbytes for tensor in each] for each in (laid_out.parameters(), states)]
    return sum(parts[0]), sum(parts[1])


def shapes_here(axes: dict[str, int]) -> dict[str, tuple[int, ...]]:
    """Return the local shapes of all parameters, by name, of a model whose layers are all cut."""
    mesh = mesh_of(**axes)
    model = made(Llama(layers=4))
    laid_out = par.parallelize(model, mesh, example_inputs=tokens(2, 1), loss=TokenLoss(), device="cpu")
    return {name: tuple(here(parameter).shape) for name, parameter in laid_out.named_parameters()}


def here(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


class Other(Small):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def lay_out(model: nn.Module, axes: dict[str, int], **options: Any) -> par.ParallelModel:
    mesh = mesh_of(**axes)
    return par.parallelize(
        model, mesh, **{"example_inputs": draw(2, 8), "loss": F.mse_loss, "device": "cpu", **options}
    )


def lay_out_on_one(chosen: int) -> float | None:
    """Lay out a model on ``chosen`` only: no other rank calls parallelize, and none is waited for."""
    meshes = [DeviceMesh("cpu", [rank], mesh_dim_names=("dp_shard",)) for rank in range(dist.get_world_size())]
    if dist.get_rank() != chosen:
        return None
    model = par.parallelize(made(Small()), meshes[chosen], example_inputs=draw(2, 8), loss=F.mse_loss, device="cpu")
    return float(model.train_step(draw(4, 8), draw(4, 8)))


def begin_apart(axes: dict[str, int]) -> float:
    """Lay out models whose initial values differ by rank; return the largest difference from rank 0's values."""
    torch.manual_seed(0)
    reference = dict(Small().named_parameters())
    torch.manual_seed(dist.get_rank())
    laid_out = lay_out(Small(), axes)
    return max(float((each.full_tensor() - reference[name]).abs().max()) for name, each in laid_out.named_parameters())


def compute_in(precision: str | None, axes: dict[str, int]) -> tuple[list[str], float]:
    """Return the dtypes of the last stage's outputs and parameters, and the difference of the loss from float32's."""
    model = made(Small())
    whole = copy.deepcopy(model)
    laid_out = lay_out(model, axes, precision=precision, num_microbatches=2)
    seen: list[str] = []
    for module in laid_out.modules:
        blocks = [
            part
            for name, part in module.named_modules()
            if name.startswith("layers.") and next(part.parameters(), None) is not None
        ]
        blocks[-1].register_forward_hook(lambda module, args, output: seen.append(str(output.dtype)))
    loss = laid_out.train_step(draw(8, 8), draw(8, 8, seed=2))
    expected = F.mse_loss(whole(draw(8, 8)), draw(8, 8, seed=2))
    dtypes = sorted({*seen, *(str(parameter.dtype) for parameter in laid_out.parameters())})
    return dtypes, 0.0 if loss is None else float((loss - expected).abs())


def evaluate_first(axes: dict[str, int]) -> tuple[float, float]:
    """Make the optimizer after an evaluation and evaluate between steps; compare gradient norm and parameters."""
    model = made(Small())
    whole = copy.deepcopy(model)
    laid_out = lay_out(model, axes, reshard_after_forward=False)
    num_replicas, me = place_of(mesh_of(**axes))
    x, y = draw(8 * num_replicas, 8), draw(8 * num_replicas, 8, seed=2)
    mine = x.chunk(num_replicas)[me], y.chunk(num_replicas)[me]
    laid_out.evaluate(*mine)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (laid_out, whole)]
    norm = expected = torch.zeros(())
    for _ in range(2):
        laid_out.train_step(*mine)
        laid_out.evaluate(*mine)
        norm = par.clip_grad_norm(laid_out, 0.5)
        F.mse_loss(whole(x), y).backward()
        expected = nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    references = dict(whole.named_parameters())
    values = [float((full(p.detach()) - references[name]).abs().max()) for name, p in laid_out.named_parameters()]
    return abs(float(norm / expected) - 1), max(values)


class Choice(nn.Module):
    """Uses one of its experts, depending on the batch; one expert is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.experts[int(x[0, 0] > 0)](x)
        return result


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Choice(), nn.Linear(8, 8)])

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers[1](self.layers[0](x))
        return result


def shard_routed(way: str, *, has_norm: bool = False) -> list[str]:
    """Return the modules that FSDP2 gathers separately. ``has_norm``: bf16 leaves a norm in one expert in float32."""
    model = made(Routed(way))
    if has_norm:
        model.experts[0][1] = nn.BatchNorm1d(8)  # type: ignore[index, operator]
    laid_out = lay_out(model, {"dp_shard": 2}, precision="bf16" if has_norm else None)
    return [name for name, part in laid_out.modules[0].named_modules() if isinstance(part, FSDPModule)]


class Graph(nn.Module):
    """Passes each row to its neighbours, so no part of the batch is independent of the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        for layer in self.layers:
            x = edges @ layer(x).tanh()
        return x


def train_on_a_graph(axes: dict[str, int], **options: Any) -> float | None:
    """Return the loss of one step minus that of the whole model."""
    model, batch = made(Graph()), (draw(4, 8), draw(4, 4, seed=3))
    expected = F.mse_loss(model(*batch), draw(4, 8, seed=2))
    loss = lay_out(model, axes, example_inputs=batch, **options).train_step(batch, draw(4, 8, seed=2))
    return None if loss is None else float(loss - expected)


class Repeated(nn.Module):
    """A layer that runs three times, two layers that share a weight, and nested lists of layers."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.Linear(8, 8)
        self.again = nn.ModuleList([layer, layer, layer])
        self.tied = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.tied[1].weight = self.tied[0].weight
        self.nested = nn.ModuleList(
            [nn.ModuleList([nn.Linear(8, 8)]), nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])]
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.again, *self.tied, *self.nested[0], *self.nested[1]):
            x = x + layer(x).tanh()
        return x


def apart_from_whole(model: nn.Module, axes: dict[str, int], **options: Any) -> float:
    """Return the largest relative difference of a gradient after two steps.

    The first element of a batch, by which `Choice` selects its expert, differs by replica.
    """
    made(model)
    whole = copy.deepcopy(model)
    laid_out = lay_out(model, axes, num_microbatches=2, **options)
    num_replicas, me = place_of(mesh_of(**axes))
    parts = [draw(4, 8, seed=seed) for seed in range(num_replicas)]
    for replica, part in enumerate(parts):
        part[0, 0] = part[2, 0] = 1.0 if replica else -1.0
    y = draw(4, 8, seed=9)
    for _ in range(2):
        laid_out.train_step(parts[me], y)
        for part in parts:
            for rows in (slice(0, 2), slice(2, 4)):
                (F.mse_loss(whole(part[rows]), y[rows]) / 2 / num_replicas).backward()
    most = 0.0
    for name, parameter in laid_out.named_parameters():
        expected = dict(whole.named_parameters(remove_duplicate=False))[name].grad
        found = None if parameter.grad is None else full(parameter.grad)
        if expected is None:
            assert found is None or not found.any(), name
        else:
            assert found is not None, name
            most = max(most, float((found - expected).abs().max() / expected.abs().max()))
    return most


def weigh_over_replicas(kind: str) -> tuple[float, float]:
    """Train with losses made by functools.partial and with a custom one; in one replica no target counts."""

    def masked_mean(output: Tensor, target: Tensor) -> Tensor:
        kept = (target != 0).float()
        return (F.cross_entropy(output, target, reduction="none") * kept).sum() / kept.sum()

    masked_mean.ignore_index = 0  # type: ignore[attr-defined]
    loss: Any = {
        "sum": functools.partial(F.cross_entropy, reduction="sum"),
        "ignored": functools.partial(F.cross_entropy, ignore_index=0),
        "own": masked_mean,
    }[kind]
    model = made(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 5)))
    whole = copy.deepcopy(model)
    mesh = mesh_of(dp_replicate=2)
    laid_out = par.parallelize(model, mesh, example_inputs=draw(2, 8), loss=loss, num_microbatches=2, device="cpu")
    x, y = draw(8, 8), torch.tensor([1, 2, 3, 4, 0, 0, 0, 0])
    trained = laid_out.train_step(x.chunk(2)[dist.get_rank()], y.chunk(2)[dist.get_rank()])
    expected = loss(whole(x), y)
    expected.backward()
    assert trained is not None
    apart = [
        float((p.grad - dict(whole.named_parameters())[name].grad).abs().max())
        for name, p in laid_out.named_parameters()
    ]
    return float((trained - expected.detach()).abs()), max(apart)


def normalize(precision: str | None) -> tuple[float, float]:
    """Train a BatchNorm on different batches per replica; return the running mean and the loss of an evaluation."""
    model = made(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)))
    laid_out = lay_out(model, {"dp_shard": 2}, precision=precision)
    laid_out.train_step(draw(8, 8, seed=dist.get_rank()), draw(8, 8, seed=5))
    loss = laid_out.evaluate(draw(8, 8), draw(8, 8, seed=2))
    assert loss is not None
    return float(model[1].running_mean.sum()), float(loss)


class Codebook(nn.Module):
    """Updates its averages in ways that torch does not all count as writes; one buffer is an inference tensor."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.layer, self.way = nn.Linear(8, 8), way
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("var", torch.ones(8))
        with torch.inference_mode():
            self.register_buffer("table", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x) + self.table
        if self.way == "batch_norm":
            return F.batch_norm(x, self.mean, self.var, training=self.training)
        if self.training:
            mean = self.mean.data if self.way == "data" else self.mean
            mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x - self.mean


def average(way: str) -> list[float]:
    """Train replicas on different batches; return the averages that this one evaluates with."""
    model = made(Codebook(way))
    laid_out = lay_out(model, {"dp_replicate": 2})
    laid_out.train_step(draw(8, 8, seed=dist.get_rank()), draw(8, 8, seed=5))
    laid_out.evaluate(draw(8, 8), draw(8, 8, seed=2))
    return list(model.mean.tolist())


def lay_over_axis(name: str, **options: Any) -> None:
    """Lay a model out over a mesh that torch has made, with this axis only."""
    mesh = torch.distributed.init_device_mesh("cpu", (2,), mesh_dim_names=(name,))
    par.parallelize(Small(), mesh, example_inputs=draw(2, 8), loss=F.mse_loss, device="cpu", **options)


def save_statistics(folder: str) -> tuple[list[float], float]:
    """Train replicas on different batches; return the running mean of a BatchNorm before a save and after it."""
    model = made(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)))
    laid_out = lay_out(model, {"dp_replicate": 2})
    laid_out.train_step(draw(8, 8, seed=dist.get_rank()), draw(8, 8, seed=5))
    before = float(model[1].running_mean.sum())
    training.save(folder, laid_out, step=1)
    after = [float(model[1].running_mean.sum())]
    training.load(folder, laid_out)
    return [*after, float(model[1].running_mean.sum())], before


SEEN: list[tuple[str, bool]] = []


class Looks(torch.autograd.Function):
    """Records whether autocast is on in forward and backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        SEEN.append(("forward", torch.is_autocast_enabled("cpu")))
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        SEEN.append(("backward", torch.is_autocast_enabled("cpu")))
        return gradient


class Looking(Small):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = Looks.apply(layer(x))
        return x


def look_at_autocast(axes: dict[str, int], **options: Any) -> list[tuple[str, bool]]:
    laid_out = lay_out(made(Looking()), axes, precision="bf16", **options)
    SEEN.clear()
    laid_out.train_step(draw(8, 8), draw(8, 8, seed=2))
    return sorted(set(SEEN))


def choose_device(backends: str) -> str:
    """Return the mesh's device type when the first rank has no GPU and the second one has."""
    from unittest import mock

    with (
        mock.patch("torch.cuda.is_available", lambda: dist.get_rank() == 1),
        mock.patch("torch.distributed.get_backend_config", lambda group=None: backends),
    ):
        return _device_type()


def stay_where_it_was() -> set[str]:
    """Return the devices of the user's model after its stages were made on the meta device."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    stages = par.PipelineStages(par.split(model, draw(2, 8), at=["2"]), loss=F.mse_loss, device="meta")
    assert all(each.is_meta for module in stages.modules for each in (*module.parameters(), *module.buffers()))
    return {each.device.type for each in (*model.parameters(), *model.buffers())}
