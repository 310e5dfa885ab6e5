"""Code that a test's ranks run: models and losses with side effects or unusual structure, laid out over a mesh."""

from __future__ import annotations

import abc
import copy
import functools
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from holding import Held, Hooked  # noqa: F401 - the tests name them
from meshes import mesh_of
from models import Checkpointed
from on_ranks import draw, made
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from detrain_nb import parallel as par


class Switching(nn.Module):
    """A model and a part that override `train` to do more than set a flag; the part is kept in evaluation mode."""

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


class Aside(nn.Module):
    """Reads its own parameter through something other than its attribute, depending on ``way``."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
        self.scale = scale = nn.Parameter(torch.ones(8))
        self.read: Callable[[], Tensor] = {
            "attribute": lambda: self.scale,
            "list": [scale].__getitem__,
            "function": lambda: scale,
            "partial": functools.partial(torch.mul, scale, 1),
        }[way]
        self.arguments = (0,) if way == "list" else ()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x) * self.read(*self.arguments)
        return result


class Looking(Aside):
    """Also branches on a value, so that it can only be traced with real values."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 1 if bool(x.sum() > 1e9) else x)


class Averaging(nn.Module):
    """A closure keeps an average of an activation in a buffer.

    A copy of the model has its own buffer but the same closure.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 16), nn.Linear(16, 8)])
        self.register_buffer("average", average := torch.zeros(16))

        def without_average(x: Tensor, is_training: bool) -> Tensor:
            if is_training:
                average.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
            return x - average

        self.without_average = without_average

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers[1](self.without_average(self.layers[0](x).tanh(), self.training))
        return result


class Recomputing(nn.Module):
    """Checkpoints a function that reads the model's parameters; ``kind`` "layers": its layers do so as well."""

    class Layer(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = checkpoint(lambda x: F.linear(x, self.weight, self.bias).tanh(), x, use_reentrant=False)
            return result

    def __init__(self, kind: str) -> None:
        super().__init__()
        layer = self.Layer if kind == "layers" else nn.Linear
        self.layers = nn.Sequential(layer(8, 16), nn.ReLU(), layer(16, 8))
        self.weight, self.scale = nn.Parameter(torch.ones(8, 8)), nn.Parameter(torch.ones(()))
        self.is_reentrant = kind == "reentrant"

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x)
        weighted = checkpoint(lambda x: F.linear(x, self.weight).tanh(), x, use_reentrant=self.is_reentrant)
        result: Tensor = checkpoint(lambda x: x.tanh() * self.scale, weighted, use_reentrant=self.is_reentrant)
        return result


class Recurrent(nn.Module):
    """Moves its weights on the CPU as cuDNN's flattening does on a GPU."""

    class Layer(nn.GRU):
        def flatten_parameters(self) -> None:
            with torch.no_grad():
                for weight in self._flat_weights:
                    if isinstance(weight, Tensor) and not isinstance(weight, (DTensor, FakeTensor)):
                        weight.set_(weight.clone())  # type: ignore[call-overload]

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = self.Layer(8, 16, batch_first=True), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.layer(x[:, None])
        result: Tensor = self.last(states[:, 0])
        return result


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def lay_out(model: nn.Module, axes: dict[str, int], **options: Any) -> par.ParallelModel:
    given = {"example_inputs": draw(2, 8), "loss": F.mse_loss, "device": "cpu", **options}
    return par.parallelize(model, mesh_of(**axes), **given)


def evaluate_and_train(axes: dict[str, int]) -> list[float]:
    """Return the differences of a prediction, and of the loss of a training step after it, from the whole model's."""
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
    """Its layers normalise their own weights before use; ``way``: how they write."""

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
    """Keeps averages of its layers in frozen parameters that no forward reads."""

    def __init__(self) -> None:
        super().__init__("none")
        self.averages = copy.deepcopy(self.layers).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                for average, parameter in zip(self.averages.parameters(), self.layers.parameters()):
                    average.lerp_(parameter, 0.1)
        return super().forward(x)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)])
        self.head = nn.Linear(8, 8)

    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, x: Tensor) -> Any:
        return self.head(self.run(x))


class Penalized(Layers):
    """Also returns a penalty on all of its parameters; ``is_added``: adds it to the output instead."""

    def __init__(self, is_added: bool = False) -> None:
        super().__init__()
        self.is_added = is_added

    def forward(self, x: Tensor) -> Any:
        penalty = sum(parameter.square().sum() for parameter in self.parameters())
        return super().forward(x) + penalty if self.is_added else (super().forward(x), penalty)


class Functional(Layers):
    """Calls its head with values computed from the head's parameters; ``is_scaled``: and from another parameter."""

    def __init__(self, is_scaled: bool = False) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4)) if is_scaled else None

    def forward(self, x: Tensor) -> Any:
        scale = 1 if self.scale is None else self.scale.mean()
        scaled = {name: each * scale / (1 + each.norm()) for name, each in self.head.named_parameters()}
        return torch.func.functional_call(self.head, scaled, (self.run(x),))


class OfTwoBases(Layers):
    """Contains a module whose class has another base before nn.Module, as torch's FakeQuantize does."""

    class Part(abc.ABC, nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.tanh()

    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = self.Part()


class Sparse(Layers):
    """Mixes columns with a sparse matrix."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        table = torch.eye(8).roll(1, 0)
        self.register_buffer("table", table.to_sparse() if layout == "coo" else table.to_sparse_csr())

    def forward(self, x: Tensor) -> Any:
        return super().forward((self.table @ x.T).T)


class Empty(Layers):
    """Has parameters without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.none = nn.Parameter(torch.empty(0, 8))
        self.narrow = nn.Sequential(nn.Linear(8, 0), nn.Linear(0, 8))

    def forward(self, x: Tensor) -> Any:
        return super().forward(x + self.none.sum(0) + self.narrow(x))


class Remembering(Layers):
    """Its first layer caches a norm of its weight until the weight's version changes; ``way``: how it reads that."""

    class Layer(nn.Linear):
        way, seen, norm = "", -1, None

        def forward(self, x: Tensor) -> Tensor:
            version = (self.weight.detach().T if self.way == "view" else self.weight)._version
            if self.seen != version:
                self.seen, self.norm = version, self.weight.detach().norm()
            return super().forward(x) / (1 + self.norm)

    def __init__(self, way: str) -> None:
        super().__init__()
        self.layers[0] = self.Layer(8, 16)
        self.layers[0].way = way


class Reading(Layers):
    """Its blocks multiply by a parameter of the model, which they reach by a weak reference or a closure."""

    class Block(nn.Module):
        def __init__(self, owner: nn.Module, way: str) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
            self.owner: Any = weakref.ref(owner) if way == "weak" else lambda: owner

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = x + self.down((self.up(x) * self.owner().scale).relu())
            return result

    def __init__(self, way: str) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.layers = nn.ModuleList(self.Block(self, way) for _ in range(2))


class Views(Layers):
    """The model and its blocks return views."""

    class Block(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).view(-1, 8)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Block(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Any:
        return super().forward(x).view(-1, 8)


def shifted(output: Tensor, target: Tensor) -> Tensor:
    """A loss that writes into the output."""
    output += 1
    return F.mse_loss(output.mul_(2), target)


def warnings_of_steps(axis: str) -> list[str]:
    """Return the warnings of two steps whose results are right."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert apart_after_steps(Views, {axis: 2}, loss=shifted) < 1e-6
    return [str(each.message) for each in told]


class Counting(Layers):
    """Its first layer counts calls in a buffer that the backward pass reads."""

    class Layer(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.calls.add_(1)
            return super().forward(x) * self.calls[None]

    def __init__(self) -> None:
        super().__init__()
        self.layers[0] = self.Layer(8, 16)
        self.layers[0].register_buffer("calls", torch.zeros(16))


class MakingLate(Layers):
    """Its first layer registers a buffer in its first forward."""

    class Layer(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if "mean" not in self._buffers:
                self.register_buffer("mean", x.detach().mean(0))
            return super().forward(x - self.mean)

    def __init__(self) -> None:
        super().__init__()
        self.layers[0] = self.Layer(8, 16)


class InPlace(Layers):
    """Its blocks write into their inputs or, with ``is_own``, into what they have computed."""

    class Block(nn.Linear):
        is_own = False

        def forward(self, x: Tensor) -> Tensor:
            if self.is_own:
                return super().forward(x).tanh_()
            x *= 2
            return super().forward(x)

    def __init__(self, is_own: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), self.Block(8, 8), self.Block(8, 8)])
        for layer in self.layers[1:]:
            layer.is_own = is_own


def apart_by_microbatches(make: Callable[[], nn.Module], schedule: str) -> float:
    """Return the largest difference of a gradient from the whole model's, which runs the microbatches one by one."""
    model, whole = made(make()), made(make())
    laid_out = lay_out(model, {"pp": 2}, schedule=schedule, num_microbatches=4)
    x, y = draw(8, 8), draw(8, 8, seed=2)
    laid_out.train_step(x, y)
    for part, target in zip(x.chunk(4), y.chunk(4)):
        (F.mse_loss(whole(part), target) / 4).backward()
    references = dict(whole.named_parameters())
    return max(float((each.grad - references[name].grad).abs().max()) for name, each in laid_out.named_parameters())


class Forces(Layers):
    """Uses the gradient of an energy with respect to the input in its forward; ``way``: how it is computed."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.layers[1] = nn.Tanh()

    def forward(self, x: Tensor) -> Any:
        if self.way == "func":
            return self.head(self.run(x)) + torch.func.grad(lambda given: self.run(given).square().sum())(x)
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.run(x).square().sum(1)
            (forces,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return self.head(forces), energy.mean()


class Mapped(Layers):
    """Calls its head for each row with vmap."""

    def forward(self, x: Tensor) -> Any:
        return torch.vmap(self.head)(self.run(x))


class Slotted:
    __slots__ = ("logits",)

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


class Wrapped(Layers):
    """Returns an object."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        logits = super().forward(x)
        return Slotted(logits) if self.kind == "slots" else types.SimpleNamespace(logits=logits)


def train_once(model: nn.Module, axes: dict[str, int]) -> None:
    laid_out = lay_out(model, axes, loss=lambda output, target: F.mse_loss(output.logits, target))
    laid_out.train_step(draw(4, 8), draw(4, 8, seed=2))


def total(output: Any, target: Tensor) -> Tensor:
    first, *others = output if isinstance(output, tuple) else (output,)
    return F.mse_loss(first, target) + 0.01 * sum(others, torch.zeros(()))


def apart_after_steps(
    make: Callable[[], nn.Module], axes: dict[str, int], *, loss: Callable[[Any, Tensor], Tensor] = total
) -> float:
    """Return the largest difference of a parameter or a prediction from the whole model's, after two steps of each."""
    model, whole = made(make()), made(make())
    laid_out, x, y = lay_out(model, axes, loss=loss), draw(4, 8), draw(4, 8, seed=2)
    optimizers = [torch.optim.SGD(list(each.parameters()), lr=0.1) for each in (laid_out, whole)]
    for _ in range(2):
        laid_out.train_step(x, y)
        loss(whole(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    references = {name: each.detach() for name, each in whole.named_parameters()}
    named = laid_out.named_parameters()
    apart = [(full(each.detach()) - references[name]).abs() for name, each in named]
    most = max(float(each.max()) for each in apart if each.numel())
    with torch.no_grad():
        found, expected = laid_out.predict(x), tree_leaves(whole.eval()(x))
        pairs = zip(tree_leaves(found), expected, strict=True) if found is not None else ()  # None on earlier stages
        return max([most, *(float((one - other).abs().max()) for one, other in pairs)])


def plan_alone(edited_on: int, *, is_refused: bool = False) -> None:
    """Lay out with a plan that one rank alone has edited, or that is refused on one rank."""
    model = made(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)))
    plan = par.tp_plan(model, draw(2, 8), tp=2)
    if dist.get_rank() == edited_on:
        plan = par.tp_plan(model, draw(2, 8), tp=4) if is_refused else plan
        plan.replicate("0")
    lay_out(model, {"tp": 2}, tp=plan)


def lay_out_alone(axis: str) -> None:
    """Lay out with bf16 on one rank only."""
    model = made(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)))
    lay_out(model, {axis: 2}, precision="bf16" if dist.get_rank() else None)


class Scaled(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return self.scale * F.mse_loss(output, target)


SCALED = Scaled()


class OnOneMemory(nn.Module):
    """A parameter or an attribute shares memory with another parameter."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        weight = self.layers[0].weight
        if way == "transposed":
            self.layers[3].weight = nn.Parameter(weight.data.t())
        elif way == "rows":
            self.head = nn.Linear(8, 4)
            self.head.weight = nn.Parameter(weight.data[2:6])
        elif way == "buffer":
            self.register_buffer("kept", weight.data)
        elif way == "attribute":
            self.kept = weight.detach()[:, :2]
        elif way == "side by side":
            both = torch.zeros(2, 8)
            self.layers[0].bias, self.layers[3].bias = nn.Parameter(both[0]), nn.Parameter(both[1])

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x)
        return result


class OfTheModel:
    """A loss that reads layers of the model, one way or another."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target) + self.model.layers[0].weight.square().sum()

    @staticmethod
    def made(way: str, model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
        def of_parts(output: Tensor, target: Tensor) -> Tensor:
            return F.mse_loss(output, target) + sum(part.weight.sum() for part in model.layers)

        def of_number(output: Tensor, target: Tensor) -> Tensor:
            return F.mse_loss(output, target) * len(model.temperature)

        def of_another_layer(output: Tensor, target: Tensor) -> Tensor:
            return F.mse_loss(model.aside(output), target)

        ways = {"object": OfTheModel(model), "parts": of_parts, "number": of_number, "aside": of_another_layer}
        return ways.get(way) or functools.partial(lambda model, output, target: F.mse_loss(output, target), model)


def train_with_loss(way: str, axes: dict[str, int]) -> None:
    model = OnOneMemory("no way")
    model.temperature = [1.0]
    if way == "aside":
        model.aside = nn.Linear(8, 8)
    made(model)
    lay_out(model, axes, loss=OfTheModel.made(way, model)).train_step(draw(4, 8), draw(4, 8, seed=2))


class Optional(Layers):
    """Takes an optional weight and a string besides what its layers compute with."""

    def forward(self, x: Tensor, weight: Tensor | None = None, way: str = "plain", *, scale: float = 1.0) -> Any:
        return super().forward(x if weight is None else x * weight) * scale


def warnings_of_kinds() -> list[str]:
    """Return the warnings for batches of other kinds than the example's."""
    x, y = draw(4, 8), draw(4, 8, seed=2)
    laid_out = lay_out(made(Optional()), {"tp": 2}, example_inputs={"x": draw(2, 8), "way": "plain"})
    batches: list[Any] = [x, (x, None), {"x": x, "way": "other", "scale": 0.5}, (x, x), {"x": x, "weight": x}]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in batches:
            laid_out.train_step(batch, y)
        laid_out.predict({"x": x, "way": "other"})
        laid_out(x, way="third")
    return [str(each.message) for each in caught if "tensor plan" in str(each.message)]


class Giving(nn.Module):
    """Also returns parameters: its own, or those of its blocks, from inside of these or past them."""

    class Block(nn.Linear):
        def __init__(self, way: str) -> None:
            super().__init__(8, 8)
            self.way = way

        def forward(self, x: Tensor) -> Any:
            output = super().forward(x).tanh()
            return (output, self.weight[2:]) if self.way == "of blocks" else output

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.layers, self.head = way, nn.ModuleList(self.Block(way) for _ in range(3)), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        given = []
        for layer in self.layers:
            x = layer(x)
            if isinstance(x, tuple):
                given.append(x[1])
                x = x[0]
        if self.way == "of its own":
            given += [self.head.weight, self.head.bias[1:]]
        if self.way in ("past blocks", "a copy"):
            weight = self.layers[1].weight
            given.append(weight.clone() if self.way == "a copy" else weight)
        return self.head(x), *given


def squares(output: Any, target: Tensor) -> Tensor:
    first, *others = output
    return F.mse_loss(first, target) + sum((each.square().sum() for each in others), torch.zeros(()))


def apart_with_given(way: str, axes: dict[str, int]) -> float:
    return apart_after_steps(lambda: Giving(way), axes, loss=squares)


class _PartsAgain(torch.autograd.Function):
    """Recomputes a block in the backward pass by calling its layers directly."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, block: nn.Sequential) -> Tensor:
        ctx.block = block
        ctx.save_for_backward(x)
        with torch.no_grad():
            result: Tensor = block(x)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            result = ctx.block[1](ctx.block[0](x))
        torch.autograd.backward(result, gradients)
        return x.grad, None


class Reversible(Checkpointed):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = _PartsAgain.apply(x, block)
        return x
