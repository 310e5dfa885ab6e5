"""Models whose forward writes state, into every kind of place that exists; ranks import this module too."""

from __future__ import annotations

import array
import functools
import itertools
import random
import weakref
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

TABLES: dict[int, Tensor] = {}
LAST: Tensor | None = None


class Body(nn.Sequential):
    """Layers in sequence; ``go`` adds another tensor to their input."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))

    def go(self, x: Tensor, more: Any = 0.0) -> Tensor:
        result: Tensor = super().forward(x + more)
        return result


class Slots:
    __slots__ = ("seen", "tensor")

    def __init__(self) -> None:
        self.seen: Any = list[int]()


class Containers(Body):
    """Writes into all sorts of containers, nested in each other and in objects that are no modules."""

    def __init__(self) -> None:
        super().__init__()
        self.ordered: OrderedDict[str, Any] = OrderedDict(a=1, b=2)
        self.by_size: defaultdict[int, list[Tensor]] = defaultdict(list)
        self.last = deque([torch.zeros(1)], maxlen=2)
        self.of_the_user: Any = UserDict()
        self.nested: dict[str, Any] = {"deep": [{"deeper": (set[int](), [bytearray(b"a")])}]}
        self.config: Any = SimpleNamespace(problem=None, cache=Slots())

    def forward(self, x: Tensor) -> Tensor:
        self.ordered.move_to_end("a")
        self.by_size[len(x)].append(x)
        self.last.append(x)
        self.of_the_user["x"] = x
        self.nested["deep"][0]["deeper"][0].add(len(x))
        self.nested["deep"][0]["deeper"][1].append(x)
        self.config.problem = "found"
        self.config.cache.seen.append(1)
        self.config.cache.tensor = x
        return self.go(x)


class Hooks(Body):
    """Installs hooks in its first call and notes that it has; the hooks write outside of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.is_hooked = False
        self.seen = seen = list[Any]()

        def keep(module: nn.Module, args: Any, output: Tensor) -> None:
            seen.append(output)

        self.keep = keep
        self[1].register_forward_hook(keep)

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_hooked:
            for layer in self:
                layer.register_forward_hook(self.keep)
                layer.register_forward_pre_hook(lambda module, args: None)
                layer.register_state_dict_pre_hook(lambda module, prefix, keep: None)
            self[2].register_full_backward_hook(lambda module, given, taken: None)
            self.is_hooked = True
        return self.go(x)


@functools.lru_cache(maxsize=1)
def table_of(size: int) -> Tensor:
    return torch.arange(float(size))


def remembered(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap a cached function, as libraries do."""
    cached = functools.lru_cache(maxsize=10)(function)

    @functools.wraps(function)
    def call(*args: Any) -> Tensor:
        return cached(*args)

    return call


class Caches(Body):
    """Fills caches: of functools, in globals of its file, and in attributes of its class.

    The functools caches are those of methods, of static methods, of functions, and one inside another function.
    """

    by_class: ClassVar[dict[int, Tensor]] = {}
    latest: Tensor | None = None

    @functools.cache  # noqa: B019 - so it is written
    def own_table(self, size: int) -> Tensor:
        return torch.ones(size)

    @staticmethod
    @functools.cache
    def static_table(size: int) -> Tensor:
        return torch.ones(size)

    @remembered
    def wrapped_table(self, size: int) -> Tensor:
        return torch.ones(size)

    def forward(self, x: Tensor) -> Tensor:
        global LAST
        size = x.shape[-1]
        more = table_of(size) + self.own_table(size) + self.static_table(size) + self.wrapped_table(size)
        if size not in TABLES:
            TABLES[size] = self.by_class[size] = LAST = type(self).latest = torch.ones(size, device=x.device)
        return self.go(x, more + TABLES[size])


class Draws(Body):
    """Draws from every kind of random generator, and from a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.of_torch = torch.Generator().manual_seed(1)
        self.of_python, self.of_numpy = random.Random(2), np.random.default_rng(3)
        self.counter, self.drawn = itertools.count(5), np.zeros(1)

    def forward(self, x: Tensor) -> Tensor:
        drawn = random.random() + np.random.rand() + self.of_python.random() + self.of_numpy.random()
        drawn += next(self.counter) + float(torch.randint(9, (), generator=self.of_torch))
        self.drawn += drawn
        return self.go(x, drawn + torch.rand(8))


class Writes(Body):
    """Writes into its own tensors: buffers, plain attributes, parameters, and attributes and hooks of these."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.plain, self.in_a_list = torch.zeros(8), [torch.zeros(8)]
        self.frozen = nn.Parameter(torch.zeros(8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for each in (self.mean, self.plain, *self.in_a_list, self.frozen):
                each.add_(x.mean())
            self.frozen.data.mul_(2)
            self[2].weight.clamp_(-0.1, 0.1)
        self[0].weight.noted = x
        self[1].weight.register_hook(lambda gradient: gradient)
        self[1].bias.requires_grad_(False)
        self[2].train(False)
        if not bool(x.isfinite().all()):
            raise ValueError("not finite")
        return self.go(x, self.mean + self.plain)


class Replaces(Body):
    """Replaces the storage, shape and strides of its tensors, not only their values."""

    def __init__(self) -> None:
        super().__init__()
        self.is_taken, self.turned, self.deeper = torch.zeros(3), torch.zeros(3, 4), nn.Parameter(torch.zeros(2))
        self.mean, self.calls = torch.zeros(8), [0]
        self[2].weight.grad = torch.ones(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(1)
        if bool(x.isfinite().all()):
            self[0].weight.data = self[0].weight.data / self[0].weight.data.norm()
            self.deeper.data.unsqueeze_(0)
        self.is_taken.set_(torch.ones(5))
        self.turned.t_()
        self.turned.resize_(2, 2)
        if self[2].weight.grad is not None:
            self[2].weight.grad.zero_()
        made = self.go(x)
        if self.mean.is_leaf:
            self.mean.mul_(0.9).add_(made.mean(0))  # with its gradient: `made` is not detached
        return made


class Iterates(Body):
    """Advances iterators of every kind with each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.in_slots = Slots()
        self.in_slots.seen = itertools.islice(range(99), 98)
        self.cycle, self.twice = itertools.cycle([1, 2, 3]), itertools.chain([1], range(9))
        self.pairs, self.counted = zip(iter([5, 6, 7, 8, 9] * 9), range(99)), enumerate(range(5, 99))
        self.of_a_dict, self.mapped = iter(dict.fromkeys(range(99))), map(str, range(99))
        self.in_a_list, self.numbers = [iter(range(99)), iter(deque(range(99)))], array.array("d", [0.5])
        next(self.cycle)

    def forward(self, x: Tensor) -> Tensor:
        for each in (*vars(self).values(), *self.in_a_list, self.in_slots.seen):
            if isinstance(each, Iterator):
                next(each)
        self.numbers[0] += 1
        self.numbers.append(2)
        return self.go(x)


class Weakly(Body):
    """Writes through memoryviews, and into weak collections."""

    def __init__(self) -> None:
        super().__init__()
        self.bits, self.even = memoryview(bytearray(4)), memoryview(bytearray(4))[::2]
        self.met: weakref.WeakSet[Any] = weakref.WeakSet(self)
        self.times: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary({Body: 0})
        self.named: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary(first=self[0])

    def forward(self, x: Tensor) -> Tensor:
        self.bits[0] += 1
        self.even[1] += 1
        self.met.discard(self[1])
        self.met.add(self)
        self.times[Body] += 1
        self.times[Slots] = 1
        self.named["x"], self.named["first"] = x, self[1]
        return self.go(x, self.times[Body])


class Notes(Body):
    """Runs another model; its own branch depends on values."""

    def __init__(self, inner: Body) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        if bool((x > 1e6).any()):
            raise ValueError("too large")
        result: Tensor = self.inner(self.go(x))
        return result


FORGETFUL: dict[str, Callable[[], nn.Module]] = {
    **{kind.__name__.lower(): kind for kind in (Containers, Hooks, Caches, Draws, Writes, Replaces, Iterates, Weakly)},
    **{f"{kind.__name__.lower()} by values": lambda kind=kind: Notes(kind()) for kind in (Containers, Hooks, Caches)},
}
