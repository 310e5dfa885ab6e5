"""Small models, each a different case for the splitter."""

from __future__ import annotations

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    """A block of GPT: attention and an MLP, with a skip connection around each."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + self.proj(attended.reshape(batch, length, width))
        return x + self.fc2(F.gelu(self.fc1(self.ln2(x))))


class GPT(nn.Module):
    """A GPT language model; ``is_tied``: the head shares the embedding's weight."""

    def __init__(self, *, vocabulary: int = 97, width: int = 32, layers: int = 4, is_tied: bool = False) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(16, width)
        self.h = nn.ModuleList(Block(width, 4) for _ in range(layers))
        self.ln_f, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        if is_tied:
            self.head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        logits: Tensor = self.head(self.ln_f(x))
        return logits


class UNet(nn.Module):
    """A skip connection from the first layer to the last but one; two tensors are alive between them."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.mid1, self.mid2 = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.up, self.out = nn.Linear(16, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        skip = F.relu(self.down(x))
        x = self.mid2(F.relu(self.mid1(skip)))
        result: Tensor = self.out(F.relu(self.up(torch.cat([skip, x], dim=-1))))
        return result


class Masked(nn.Module):
    """Every layer uses a mask besides the previous layer's output."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor, *, mask: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) * mask
        return x


class LooksAtValues(nn.Module):
    """Branches on tensor values."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        if x.sum() > 0:
            x = F.dropout(-x)
        result: Tensor = self.last(x)
        return result


class WithToken(nn.Module):
    """Uses parameters of the model itself before its first layer and after its last; one parameter is unused."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.scale = nn.Parameter(torch.zeros(1, 1, 8)), nn.Parameter(torch.ones(8))
        self.unused = nn.Parameter(torch.zeros(3))
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), 1, 8), x], dim=1)
        result: Tensor = self.layers(x) * self.scale
        return result


class Expert(nn.Module):
    """Routes each token to one of two layers, by its value."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 2), nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        chosen, result = weights.argmax(-1), torch.zeros_like(x)
        for index in chosen.unique().tolist():
            mine = chosen == index
            result[mine] = self.experts[index](x[mine]) * weights[mine][:, index : index + 1]
        return x + result


class Experts(nn.Module):
    """Blocks that branch on values inside."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Expert() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Routed(nn.Module):
    """Experts that belong to the model itself; one runs only if it has rows. ``way``: how the rows are found."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.layers, self.gate = nn.ModuleList(nn.Linear(8, 8) for _ in range(2)), nn.Linear(8, 3)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(3))
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = x
        for layer in self.layers:
            hidden = hidden + layer(hidden).tanh()
        weights = self.gate(hidden).softmax(-1)
        chosen = weights.argmax(-1) if self.way != "batch" else (x[:, 0] > 0).long() + (x[:, 1] > 0)
        result: Tensor = self.last(hidden + self.route(hidden, chosen) * weights.amax(-1, keepdim=True))
        return result

    def route(self, x: Tensor, chosen: Tensor) -> Tensor:
        if self.way == "list":
            order, rows = chosen.argsort(), chosen.tolist()
            parts = x[order].split([rows.count(index) for index in range(3)])
            given = [expert(part) for expert, part in zip(self.experts, parts) if len(part)]
            return torch.cat(given)[order.argsort()]
        result = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            mine = chosen == index
            if self.way == "nonzero":
                places = mine.nonzero()[:, 0]
                result = result.index_add(0, places, expert(x[places])) if len(places) else result
            elif mine.any():
                result[mine] = expert(x[mine])
        return result


class Writes(nn.Module):
    """Writes in place into a layer's output, and a block writes into its own input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.position = nn.Linear(8, 8), nn.Parameter(torch.ones(8))
        self.second, self.block = nn.Linear(8, 8), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x += self.position
        result: Tensor = self.block(self.second(x) * 2)
        return result


class TwoNames(nn.Module):
    """A layer that is registered twice, and one with statistics but no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.m, self.n = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.b, self.norm = self.a, nn.BatchNorm1d(8, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.n(self.m(self.norm(self.b(self.a(x)))))
        return result


class Checkpointed(nn.Module):
    """Recomputes its blocks in the backward pass; makes positions on the device of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        positions = torch.arange(8, device=self.first.weight.device, dtype=self.first.weight.dtype)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x + positions


class Skips(nn.Module):
    """Skip connections around the blocks in its own forward; one block is checkpointed, one skip is added in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(8, 8), nn.Linear(8, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Tanh(), nn.Linear(8, 8)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = x + self.blocks[0](x)
        x = x + checkpoint(self.blocks[1], x, use_reentrant=False)
        x += self.blocks[2](x)
        result: Tensor = self.out(x)
        return result


class Noisy(nn.Module):
    """Draws noise once and uses it between several layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand(x.shape)
        x = self.b(self.a(x) * noise) * noise
        result: Tensor = self.c(x)
        return result


class Frozen(OrderedDict[str, float]):
    """A frozen configuration like those of diffusers: items are attributes too, and none can be set later."""

    def __init__(self, **items: float) -> None:
        super().__init__(items)
        self.__dict__.update(items, is_frozen=True)

    def __setitem__(self, key: str, value: float) -> None:
        if getattr(self, "is_frozen", False):
            raise TypeError("it is frozen")
        super().__setitem__(key, value)

    def __deepcopy__(self, memo: dict[int, object]) -> Frozen:
        return Frozen(**self)


class Configured(nn.Sequential):
    """Reads a frozen configuration in its forward."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8), nn.Linear(8, 8))
        self._config = Frozen(factor=3.0)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = super().forward(x) * self._config.factor
        return result


class Holder:
    def __init__(self, layers: list[nn.Module]) -> None:
        self.layers = layers


class AroundNames(nn.Module):
    """Calls its layers through an object that is no module."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.holder = Holder([self.a, self.b])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.holder.layers:
            x = layer(x)
        return x


class ByFunctions(nn.Module):
    """Calls its layers through closures, one of them recursive; the hook of a layer records its output."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.outputs: dict[str, Tensor] = {}
        self.b.register_forward_hook(lambda module, args, output: self.outputs.update(b=output))

        def go(x: Tensor, number: int = 0) -> Tensor:
            layers = (self.a, self.b, self.c)
            return x if number == len(layers) else go(layers[number](x), number + 1)

        self.go, self.last = go, lambda layer=self.b: layer

    def forward(self, x: Tensor) -> Tensor:
        return self.go(x) + self.outputs.pop("b") * self.last().bias


class InContainers(nn.Module):
    """Calls its layers through its own lists and dicts, and through a bound method that it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.order = [("first", self.a), ("second", self.b)]
        self.last = {"call": self.c.forward, "layer": (self.c,)}

    def forward(self, x: Tensor) -> Tensor:
        for _, layer in self.order:
            x = layer(x)
        result: Tensor = self.last["layer"][0](x) + self.last["call"](x)  # type: ignore[index, operator]
        return result


class GivesMask(nn.Module):
    """The first layer returns its inputs besides its output; the second keeps its own outputs in a list."""

    class Embedding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(11, 8)

        def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
            return self.table(tokens), tokens

    class Body(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.kept = nn.Linear(8, 8), list[Tensor]()

        def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
            self.kept[:] = [(tokens > 3)[..., None] * 2.0]
            result: Tensor = self.linear(x)
            return result

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.body = GivesMask.Embedding(), GivesMask.Body()
        self.middle, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        x, given = self.embedding(tokens)
        x = self.middle(self.body(x, tokens))
        result: Tensor = self.last(x * (given != 0)[..., None]) + self.body.kept[0]
        return result


class WritesPart(nn.Module):
    """Writes its first layer's output into a slice of a tensor that is read after the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.zeros(len(x), 16)
        kept[:, :8] = self.a(x)
        x = self.c(self.b(x))
        result: Tensor = self.d(x + kept[:, 4:12])
        return result


class LooksAtMask(nn.Module):
    """Its embedding and its blocks check other inputs: ids that are too large, a mask that hides nothing."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, int]:
            x = x if mask.all() else x * mask[..., None]
            if x.isnan().any():
                raise ValueError("not a number")
            return x + self.down(F.gelu(self.up(x))), int(mask.sum())

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.body = nn.ModuleList(LooksAtMask.Block() for _ in range(3))
        self.pool, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        if tokens.max() > 10:
            raise ValueError("no such token")
        x = self.table(tokens)
        for block in self.body:
            x, count = block(x, mask)
            x = x / count
        result: Tensor = self.head(torch.tanh(self.pool(x.mean(1))))
        return result


class LooksInLeaf(nn.Module):
    """Layers without sublayers that check values and change the width; each returns two tensors."""

    class Layer(nn.Module):
        def __init__(self, width: int, wider: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(width, wider))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            if x.isnan().any():
                raise ValueError("not a number")
            return x @ self.weight, x.mean()

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(LooksInLeaf.Layer(8 + 2 * index, 10 + 2 * index) for index in range(3))
        self.last = nn.Linear(14, 2)

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x, _ = layer(x)
            x = x.view(len(x), -1, 10 + 2 * index)
        result: Tensor = self.last(x)
        return result


class Rescales(nn.Module):
    """Divides the weights of its blocks when evaluation starts, and multiplies them when training resumes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.are_rescaled = False

    def forward(self, x: Tensor) -> Tensor:
        if self.are_rescaled == self.training:
            with torch.no_grad():
                for index, block in enumerate(self.blocks, 1):
                    block.weight.mul_(2.0**index if self.training else 0.5**index)
            self.are_rescaled = not self.training
        for block in self.blocks:
            x = block(x)
        return x


class Recurrent(nn.Module):
    """A batch-first GRU: its output is a transposed view."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.body = nn.Embedding(11, 8), nn.GRU(8, 8, 2, batch_first=True)
        self.up, self.head = nn.Linear(8, 16), nn.Linear(16, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        x, _ = self.body(self.table(tokens))
        result: Tensor = self.head(F.relu(self.up(x)))
        return result


class ReadsInside(nn.Module):
    """Reads weights of layers in lists and dicts in its own forward, before and after each cut."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.ends = nn.ModuleDict({"first": nn.Linear(8, 8), "last": nn.Linear(8, 4)})
        self.gates = nn.ParameterList(torch.ones(8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.ends["first"](x)
        for gate, block in zip(self.gates, self.blocks, strict=True):
            x = block(x) * gate + F.linear(x, block[0].weight)
        assert len(self.blocks) == 3 and "last" in self.ends and [name for name, _ in self.ends.items()] == [*self.ends]
        result: Tensor = self.ends["last"](x) * self.blocks[0][0].bias.numel()
        return result


class Counts(nn.Module):
    """Counts its calls, then writes into a layer's output; a stage must not write into its input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))
        self.times, self.log = 0, list[str]()

    def forward(self, x: Tensor) -> Tensor:
        self.times += 1
        self.log.append("called")
        x = self.first(x)
        y = self.second(x)
        self.calls += 1
        x += 1
        result: Tensor = self.last(x * y)
        return result


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).tanh()


class Collecting(nn.Module):
    """Continues from the output of one layer, collected by hooks; the first call installs the hooks."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(8, 3)
        self.number, self.has_hooks, self.collected = number, False, list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        collected = self.collected
        if not self.has_hooks:
            for module in self.modules():
                if isinstance(module, Layer):
                    module.register_forward_hook(lambda module, args, output: collected.append(output))
            self.has_hooks = True
        collected.clear()
        for layer in self.layers:
            x = layer(x)
        result: Tensor = self.head(collected[self.number])
        return result


class ReadsNext(nn.Module):
    """Uses a parameter of the last layer before the first one, in a stage that ends where the last layer begins."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.body(x * self.head.weight[0]).tanh())
        return result


class ReadsOfOthers(nn.Module):
    """Its own forward and each block read buffers, plain tensors and a property of other blocks."""

    class Block(nn.Module):
        def __init__(self, first: ReadsOfOthers.Block | None) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.first = [first or self]
            self.scale: Tensor
            self.register_buffer("scale", torch.tensor(3.0))
            self.shift = torch.linspace(0, 1, 8)
            self.nothing = [None]

        @property
        def both(self) -> Tensor:
            return self.scale + self.shift

        def scaled(self, x: Tensor) -> Tensor:
            return x * self.scale

        def forward(self, x: Tensor) -> Tensor:
            first = self.first[0]
            return torch.tanh(first.scaled(self.linear(x)) + first.shift + first.both)

    def __init__(self) -> None:
        super().__init__()
        first = self.Block(None)
        self.blocks = nn.ModuleList([first, *(self.Block(first) for _ in range(3))])

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.blocks[3].scale
        for block in self.blocks:
            x = block(x)
        return x * self.blocks[0].scale + self.blocks[0].shift


class WithSlots(nn.Module):
    """Blocks that keep an attribute in ``__slots__``."""

    class Block(nn.Linear):
        __slots__ = ("factor",)
        factor: float

        def __init__(self) -> None:
            super().__init__(8, 8)
            self.factor = 1.5

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.factor

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(self.Block() for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.blocks(x)
        return result


class _Acts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def act(self, x: Tensor) -> Tensor:
        return x.tanh()


class BasesMethod(_Acts):
    """Keeps a bound method of its base class as an attribute, and overrides the method of that name."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = super().act

    def act(self, x: Tensor) -> Tensor:
        return x.relu()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.kept(layer(x))
        return x


class SharesByDict(nn.Module):
    """One layer puts into a dict what later ones read, as Gemma 3n's layers do with keys and values."""

    class Layer(nn.Module):
        def __init__(self, *, leaves: bool) -> None:
            super().__init__()
            self.linear, self.leaves = nn.Linear(8, 8), leaves

        def forward(self, x: Tensor, shared: dict[str, Tensor]) -> Tensor:
            y: Tensor = self.linear(x)
            if self.leaves:
                shared["kept"] = y
            return torch.tanh(y + shared["kept"])

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Layer(leaves=number == 0) for number in range(3))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        shared: dict[str, Tensor] = {}
        for layer in self.layers:
            x = layer(x, shared)
        result: Tensor = self.head(x)
        return result
