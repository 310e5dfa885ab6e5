"""Code that a test's ranks run: models of any family laid out over a mesh, compared with whole ones through AdamW."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import torch
from families import OF_TRANSFORMERS, draw, padding, tokens
from meshes import mesh_of
from mixed_ranks import clip_and_step, full, place_of
from models import GPT
from torch import Tensor, nn
from vision import ConvUNet, ResNet

from detrain_nb import parallel as par
from detrain_nb.parallel.tensor.apply import plan_of


class Translation(nn.Module):
    """nn.Transformer between embeddings and a head; source padding is masked for the encoder and for the decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(97, 32), nn.Embedding(97, 32)
        self.body = nn.Transformer(32, 4, 2, 2, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(32, 97)

    def forward(self, source: Tensor, target: Tensor, source_padding: Tensor) -> Tensor:
        causal = self.body.generate_square_subsequent_mask(target.shape[1])
        is_ignored = source_padding == 0
        mask = torch.zeros(is_ignored.shape).masked_fill(is_ignored, -torch.inf)
        body: Tensor = self.body(
            self.source(source),
            self.target(target),
            tgt_mask=causal,
            src_key_padding_mask=mask,
            memory_key_padding_mask=mask,
            tgt_is_causal=True,
        )
        result: Tensor = self.head(body)
        return result


def _mlp() -> nn.Module:
    sizes = [16, 64, 48, 32, 24, 16]
    layers = [each for pair in itertools.pairwise(sizes) for each in (nn.Linear(*pair), nn.GELU())]
    return nn.Sequential(*layers[:-1])


# How to make the model, and its inputs for a number of rows.
OF_TORCH: dict[str, tuple[Callable[[], nn.Module], Callable[[int], dict[str, Any]]]] = {
    "MLP": (_mlp, lambda rows: {"input": draw(rows, 16)}),
    "ResNet": (ResNet, lambda rows: {"x": draw(rows, 3, 32, 32)}),
    "U-Net": (ConvUNet, lambda rows: {"x": draw(rows, 3, 16, 16)}),
    "nn.Transformer": (
        Translation,
        lambda rows: {
            "source": tokens(rows, 8),
            "target": tokens(rows, 6),
            "source_padding": padding(rows, 8),
        },
    ),
    "GPT tied": (lambda: GPT(layers=2, is_tied=True), lambda rows: {"tokens": tokens(rows, 16)}),
}
FAMILIES = (*OF_TORCH, *OF_TRANSFORMERS)


def make(family: str) -> tuple[nn.Module, Callable[[int], dict[str, Any]]]:
    """Return the model, always with the same values, and a function that makes inputs for a number of rows."""
    torch.manual_seed(0)
    if family in OF_TORCH:
        build, inputs = OF_TORCH[family]
        model = build()
    else:
        import transformers

        build_one, inputs_of, _, _ = OF_TRANSFORMERS[family]
        model = build_one(transformers, "sdpa", layers=2)

        def inputs(rows: int) -> dict[str, Any]:
            given = inputs_of(rows, 8)
            labels = given.pop("labels")
            return {**given, "decoder_input_ids": labels} if family == "T5" else given

    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()  # batch statistics of a replica's rows differ from those of the whole batch
    return model, inputs


def mean_square(output: Any, weights: Tensor) -> Tensor:
    """Weight every element differently: with a plain mean many gradients would be almost zero."""
    tensor = output if isinstance(output, Tensor) else output.logits
    scale = torch.linspace(-1, 1, tensor[0].numel()).view(tensor.shape[1:]).sin()
    each: Tensor = ((tensor * scale).flatten(1).sum(1) + tensor.square().flatten(1).mean(1)) * weights
    return each.mean()


def train(family: str, axes: dict[str, int], **options: Any) -> dict[str, float]:
    """Train two steps with clipping; return the largest differences from the whole model.

    The differences are those of losses, outputs, gradients, their norm and parameters. Each is relative to the largest
    value of its tensor, or to a hundredth of the largest of all.
    """
    model, inputs = make(family)
    whole = copy.deepcopy(model)
    mesh = mesh_of(**axes)
    laid_out = par.parallelize(
        model, mesh, example_inputs=inputs(2), loss=mean_square, num_microbatches=2, device="cpu", **options
    )
    num_replicas, me = place_of(mesh)
    optimizers = [
        torch.optim.AdamW(list(each.parameters()), lr=1e-3, eps=1e-3, foreach=each is whole or family in OF_TORCH)
        for each in (laid_out, whole)
    ]
    found = {"loss": 0.0, "output": 0.0, "gradient": 0.0, "norm": 0.0}
    for step in range(2):
        rows = 4 * num_replicas
        batch, weights = inputs(rows), torch.linspace(0.5, 1.5, rows) + step
        mine = {key: each.chunk(num_replicas)[me] if isinstance(each, Tensor) else each for key, each in batch.items()}
        given = mine, weights.chunk(num_replicas)[me]
        evaluated, output, loss = laid_out.evaluate(*given), laid_out.predict(mine), laid_out.train_step(*given)
        expected = mean_square(whole(**batch), weights)
        expected.backward()
        if loss is not None:
            losses = [float(full(each) / expected.detach()) for each in (evaluated, loss)]
            found["loss"] = max(found["loss"], *(abs(each - 1) for each in losses))
            found["output"] = max(found["output"], _output_apart(output, whole, mine))
        found["gradient"] = max(found["gradient"], _apart(laid_out, whole, lambda parameter: parameter.grad))
        found["norm"] = max(found["norm"], clip_and_step(laid_out, whole, optimizers, limit=0.5))
    return {**found, "parameter": _apart(laid_out, whole, lambda parameter: parameter.detach())}


def train_with_statistics(schedule: str) -> dict[str, float]:
    """Train a ResNet for three steps over two ranks, and the whole model one microbatch at a time.

    Returns the relative differences of losses, gradients, running statistics and of an evaluation that uses them. Also
    returns how many batches each BatchNorm has counted.
    """
    model, inputs = make("ResNet")
    model.train()
    whole, num_microbatches = copy.deepcopy(model), 4
    laid_out = par.parallelize(
        model,
        mesh_of(pp=2),
        example_inputs=inputs(4),
        loss=mean_square,
        schedule=schedule,
        num_microbatches=num_microbatches,
        device="cpu",
    )
    optimizers = [torch.optim.SGD(list(each.parameters()), lr=1e-3) for each in (laid_out, whole)]
    found = {"loss": 0.0, "gradient": 0.0}
    for step in range(3):
        batch, weights = draw(16, 3, 32, 32) + step, torch.linspace(0.5, 1.5, 16)
        loss, expected = laid_out.train_step({"x": batch}, weights), torch.zeros(())
        for x, weight in zip(batch.chunk(num_microbatches), weights.chunk(num_microbatches)):
            part = mean_square(whole(x), weight) / num_microbatches
            part.backward()
            expected += part.detach()
        if loss is not None:
            found["loss"] = max(found["loss"], abs(float(loss / expected) - 1))
        found["gradient"] = max(found["gradient"], _apart(laid_out, whole, lambda parameter: parameter.grad))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found["statistics"], found["counted"] = _statistics_apart(laid_out, whole)
    evaluated = laid_out.evaluate(inputs(8), torch.ones(8))
    if evaluated is not None:
        with torch.no_grad():
            expected = mean_square(whole.eval()(**inputs(8)), torch.ones(8))
        found["evaluation"] = abs(float(evaluated / expected) - 1)
    return found


def _statistics_apart(laid_out: par.ParallelModel, whole: nn.Module) -> tuple[float, float]:
    """Return the largest relative difference of a buffer, and the batch count that all BatchNorms here agree on."""
    references, most, counted = dict(whole.named_buffers()), 0.0, set()
    for module in laid_out.modules:
        for name, buffer in module.named_buffers():
            if name.endswith("num_batches_tracked"):
                counted.add(int(buffer))
                assert int(references[name]) == int(buffer), name
            else:
                most = max(most, float((buffer - references[name]).abs().max() / references[name].abs().max()))
    (only,) = counted
    return most, float(only)


def _output_apart(output: Any, whole: nn.Module, batch: dict[str, Any]) -> float:
    with torch.no_grad():
        expected = whole(**batch)
    pair = [each if isinstance(each, Tensor) else each.logits for each in (output, expected)]
    return float((pair[0] - pair[1]).abs().max() / pair[1].abs().max())


def _apart(laid_out: par.ParallelModel, whole: nn.Module, of: Callable[[Tensor], Tensor | None]) -> float:
    references = {name: of(each) for name, each in whole.named_parameters(remove_duplicate=False)}
    largest = max(float(each.abs().max()) for each in references.values() if each is not None)
    plan, most = plan_of(laid_out.modules[0]), 0.0
    for name, parameter in laid_out.named_parameters():
        found, expected = of(parameter), references[name]
        if found is not None and plan is not None:
            found = par.to_saved_order(name, found, plan)
        if expected is None:
            assert found is None or not full(found).any(), name
            continue
        assert found is not None, name
        scale = max(float(expected.abs().max()), 1e-2 * largest)
        most = max(most, float((full(found) - expected).abs().max()) / scale)
    return most
