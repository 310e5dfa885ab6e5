"""Code that a test's ranks run with layers that are cut over them, compared with the whole model on each."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from meshes import mesh_of
from models import GPT
from tensor_models import MODELS, Llama, Weighed, draw, made, tokens
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.utils.checkpoint import checkpoint

from detrain_nb import parallel as par
from detrain_nb import training
from detrain_nb.errors import SpecError
from detrain_nb.parallel import loss_on_parts
from detrain_nb.parallel.model import Arrangement
from detrain_nb.parallel.tensor import layers
from detrain_nb.parallel.tensor.apply import apply_tensor_plan, from_saved_order, to_saved_order
from detrain_nb.parallel.tensor.planner import tp_plan

MODELS["gpt"] = lambda: (made(GPT(layers=2)), tokens())
MODELS["gpt tied"] = lambda: (made(GPT(layers=2, is_tied=True)), tokens())


def made_as(kind: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Any]:
    """Return one of `MODELS`; in float64 a correct result agrees to the last digits."""
    model, call = MODELS[kind]()
    return model.to(dtype), call.to(dtype) if isinstance(call, Tensor) and call.is_floating_point() else call


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def tensor_of(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0] if isinstance(output, tuple) else output.logits


def loss_of(output: Any) -> Tensor:
    """Weight every element differently: with a plain mean many gradients would be almost zero."""
    tensor = tensor_of(output)
    return (tensor * torch.linspace(-1, 1, tensor.numel()).view(tensor.shape).sin()).sum() / tensor.shape[0]


def apart(model: nn.Module, reference: nn.Module, plan: Any, of: Callable[[Tensor], Tensor | None]) -> float:
    """Return the largest difference of ``of(parameter)``, relative to the largest value of its tensor."""
    references = dict(reference.named_parameters(remove_duplicate=False))
    largest = max(float(each.abs().max()) for p in references.values() if (each := of(p)) is not None)
    most = 0.0
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found, expected = of(parameter), of(references[name])
        assert isinstance(parameter, DTensor), name
        if expected is None:
            assert found is None or not whole(found).any(), name
            continue
        assert found is not None, name
        found = whole(to_saved_order(name, found, plan))
        scale = max(float(expected.abs().max()), 1e-2 * largest)  # some are zero except for rounding
        most = max(most, float((found - expected).abs().max()) / scale)
    return most


def train(kind: str, *, dtype: torch.dtype = torch.float64, tp: int = 2, **options: Any) -> dict[str, Any]:
    """Train with AdamW and clipping; return the differences from the whole model.

    They are those of losses, gradients and their norms, parameters and outputs.
    """
    model, call = made_as(kind, dtype)
    reference, _ = made_as(kind, dtype)  # created again, as some cannot be copied
    for module in reference.modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            module.sparse = False  # AdamW does not support sparse gradients
    plan = tp_plan(model, call, tp=tp, **options)
    apply_tensor_plan(model, plan, mesh_of(tp=tp))
    found: dict[str, Any] = {"plan": str(plan), "roles": plan.roles, "losses": [], "gradients": [], "norms": []}
    found["modes"] = sum(isinstance(p, DTensor) for p in model.parameters()), len(list(model.parameters()))
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3, eps=1e-3, foreach=True) for each in (model, reference)]
    run = (lambda each: each(**call)) if isinstance(call, dict) else (lambda each: each(call))
    for _ in range(2):
        losses, norms = [], []
        for each, optimizer in zip((model, reference), optimizers):
            optimizer.zero_grad()
            loss = loss_of(run(each))
            loss.backward()
            losses.append(float(loss))
        found["gradients"].append(apart(model, reference, plan, lambda parameter: parameter.grad))
        for each, optimizer in zip((model, reference), optimizers):
            norms.append(float(whole(nn.utils.clip_grad_norm_(each.parameters(), 1.0))))
            optimizer.step()
        found["losses"].append(abs(losses[0] - losses[1]) / (1 + abs(losses[1])))
        found["norms"].append(abs(norms[0] - norms[1]) / norms[1])
    found["parameters"] = apart(model, reference, plan, lambda parameter: parameter.data)
    with torch.no_grad():
        outputs = [tensor_of(run(each.eval())) for each in (model, reference)]
    found["outputs"] = float((outputs[0] - outputs[1]).abs().max() / outputs[1].abs().max())
    found["plain"] = type(outputs[0]) is Tensor
    return found


def share_head(loss: str = "cross entropy") -> dict[str, Any]:
    """Keep the head's output sharded, 97 classes over 2 ranks; compare loss and gradients with the whole model's."""
    model, call = made_as("llama tied")
    reference, targets = copy.deepcopy(model), tokens(vocabulary=97).flip(0)
    plan = tp_plan(model, call, loss_parallel=True)
    apply_tensor_plan(model, plan, mesh_of(tp=2))
    losses = {
        "cross entropy": lambda logits, y: F.cross_entropy(logits.flatten(0, 1), y.flatten()),
        "whole": lambda logits, y: F.mse_loss(logits, torch.ones(logits.shape, dtype=logits.dtype)),
    }
    with loss_parallel():
        output = model(call)
        found = loss_on_parts(losses[loss])(output, targets)
        found.backward()
    expected = losses[loss](reference(call), targets)
    expected.backward()
    return {
        "output": (type(output).__name__, tuple(output.shape), tuple(output.to_local().shape)),
        "loss": float((whole(found) - expected).abs()),
        "gradients": apart(model, reference, plan, lambda parameter: parameter.grad),
    }


def drop(rank: int) -> dict[str, Any]:
    """Run dropout on ranks with different random numbers.

    Returns output and gradient sums, which must agree on the ranks, and whether the user's generator is unchanged.
    """
    model = Llama(dropout=0.3)
    plan = tp_plan(model, tokens())
    torch.manual_seed(rank)
    apply_tensor_plan(model, plan, mesh_of(tp=2))
    before = torch.get_rng_state()
    outputs = [model(tokens()) for _ in range(2)]
    is_left = torch.equal(before, torch.get_rng_state())
    outputs[0].sum().backward()
    norms = [float(layer.norm1.weight.grad.to_local().double().sum()) for layer in model.layers]
    return {"sums": [float(each.detach().double().sum()) for each in outputs], "norms": norms, "left": is_left}


def drop_in_a_stage(rank: int) -> float:
    """Return the sum of the first stage's output.

    The model has dropout in its own forward; the ranks have different random numbers.
    """
    model, call = made(Weighed(dropout=0.3)), draw(4, 8)
    plan = tp_plan(model, call)
    torch.manual_seed(rank)
    stage = apply_tensor_plan(par.split(model, call, at=["blocks.1"]).stage(0), plan, mesh_of(tp=2))
    return float(stage(call).detach().double().sum())


def drop_again() -> float:
    """Compare gradients with and without a checkpoint: the recomputed forward must drop the same elements."""
    gradients = []
    for is_checkpointed in (False, True):
        model = made(Llama(dropout=0.3))
        plan = tp_plan(model, tokens())
        torch.manual_seed(5)
        apply_tensor_plan(model, plan, mesh_of(tp=2))
        layer = model.layers[0]
        if is_checkpointed:
            forward = layer.forward
            layer.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=False)
        loss_of(model(tokens())).backward()
        gradients.append(whole(model.layers[0].mlp.up.weight.grad))
    return float((gradients[0] - gradients[1]).abs().max() / gradients[0].abs().max())


def through_stages(kind: str, at: str, **options: Any) -> float:
    """Run two stages, both on each rank, whose layers are cut over the ranks."""
    model, call = made_as(kind)
    reference = copy.deepcopy(model)
    plan = tp_plan(model, call, **options)
    found = par.split(model, call, at=[at])
    first, second = (apply_tensor_plan(found.stage(index), plan, mesh_of(tp=2)) for index in range(2))
    assert any(isinstance(each, DTensor) for each in first.parameters())
    loss_of(second(first(call), call)).backward()
    loss_of(reference(call)).backward()
    parts = nn.ModuleList([first, second])
    references = dict(reference.named_parameters(remove_duplicate=False))
    most = 0.0
    for name, parameter in parts.named_parameters(remove_duplicate=False):
        name = name.partition(".")[2]
        expected = references[name].grad
        difference = whole(to_saved_order(name, parameter.grad, plan)) - expected
        most = max(most, float(difference.abs().max() / expected.abs().max().clamp_min(1e-2)))
    return most


def shard_too(kind: str = "fused") -> dict[str, Any]:
    """Apply FSDP2 over two ranks to a model that is cut over two; check gradients, a step and a checkpoint."""
    model, call = made_as(kind)
    reference = copy.deepcopy(model)
    plan = tp_plan(model, call)
    mesh = mesh_of(dp_shard=2, tp=2)
    apply_tensor_plan(model, plan, mesh["tp"])
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp_shard"])
    fully_shard(model, mesh=mesh["dp_shard"])
    mine = call.chunk(2)[mesh["dp_shard"].get_local_rank()]
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3, eps=1e-3) for each in (model, reference)]
    found: dict[str, Any] = {}
    for _ in range(2):
        model(mine).square().mean().backward()
        reference(call).square().mean().backward()
        found["gradients"] = apart(model, reference, plan, lambda parameter: parameter.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found["parameters"] = apart(model, reference, plan, lambda parameter: parameter.data)
    return found


def through_pipeline() -> dict[str, Any]:
    """Run 1F1B over two stages, the layers of each cut over two ranks, and a step of AdamW."""
    model, call = made_as("llama")
    reference = copy.deepcopy(model)
    plan, mesh = tp_plan(model, call[:1]), mesh_of(pp=2, tp=2)
    stages = par.PipelineStages(
        par.split(model, call[:1], 2),
        mesh["pp"],
        loss=F.mse_loss,
        num_microbatches=4,
        device="cpu",
        arrangement=Arrangement(prepare=lambda module, is_last: apply_tensor_plan(module, plan, mesh["tp"])),
    )
    target = torch.ones(4, 16, 97, dtype=torch.float64)
    found: dict[str, Any] = {}
    references = dict(reference.named_parameters())
    for _ in range(2):
        stages.train_step(call, target)
        F.mse_loss(reference(call), target).backward()
        most = 0.0
        for name, parameter in stages.named_parameters():
            expected = references[name].grad
            difference = whole(parameter.grad) - expected
            most = max(most, float(difference.abs().max() / expected.abs().max().clamp_min(1e-3)))
        found.setdefault("gradients", []).append(most)
        for each in (stages, reference):
            optimizer = torch.optim.SGD(each.parameters(), lr=1e-3)
            optimizer.step()
            optimizer.zero_grad()
    return found


def save(folder: str, kind: str = "fused") -> dict[str, Any]:
    """Save a checkpoint of cut layers: it must equal the whole model's, and load into cut layers again."""
    model, call = MODELS[kind]()
    reference = copy.deepcopy(model)
    plan = tp_plan(model, call)
    apply_tensor_plan(model, plan, mesh_of(tp=2))
    state = model.state_dict()
    dcp.save({name: to_saved_order(name, tensor, plan) for name, tensor in state.items()}, checkpoint_id=folder)
    plain = {name: torch.zeros_like(tensor) for name, tensor in reference.state_dict().items()}
    dcp.load(plain, checkpoint_id=folder)
    is_whole = all(torch.equal(plain[name], tensor) for name, tensor in reference.state_dict().items())
    empty = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    dcp.load(empty, checkpoint_id=folder)
    again = {name: from_saved_order(name, tensor, plan) for name, tensor in empty.items()}
    same = all(torch.equal(again[name].to_local(), tensor.to_local()) for name, tensor in state.items())
    return {"whole": is_whole, "again": same, "packed": sorted(plan.packed)}


def in_bfloat16() -> list[float]:
    """Return the bfloat16 errors of the cut and of the whole model, both relative to the whole model in float32."""
    model, call = MODELS["llama"]()
    reference = copy.deepcopy(model)
    apply_tensor_plan(model.bfloat16(), tp_plan(model, call), mesh_of(tp=2))
    in_full = reference(call)
    output = model(call)
    loss_of(output).backward()
    assert all(parameter.grad is not None and parameter.dtype is torch.bfloat16 for parameter in model.parameters())
    apart_from_full = [(each.float() - in_full).abs().max() for each in (output, reference.bfloat16()(call))]
    return [float(each / in_full.abs().max()) for each in apart_from_full]


def warnings_of(kind: str) -> list[str]:
    """Return the warnings of `parallelize`."""
    model, call = MODELS[kind]()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        par.parallelize(model, mesh_of(tp=2), example_inputs=call, device="cpu")
    return [str(each.message) for each in caught]


def register(kind: str) -> str:
    """Return the error for a hook on a parameter; the model must stay unchanged.

    Without the hook the model is laid out over the mesh.
    """
    model, call = MODELS["mlp"]()
    weight = model[2].weight
    handle = getattr(weight, kind)(lambda given: None)
    try:
        par.parallelize(model, mesh_of(tp=2), example_inputs=call, device="cpu")
    except SpecError as exc:
        assert model[2].weight is weight
        handle.remove()
        laid_out, seen = par.parallelize(model, mesh_of(tp=2), example_inputs=call, device="cpu"), []
        dict(laid_out.named_parameters())["2.weight"].register_hook(lambda gradient: seen.append(gradient.shape))
        model(call).sum().backward()
        assert seen == [weight.shape], seen
        return str(exc)
    return ""


def look_from_outside() -> dict[str, bool]:
    """Check that parameters outside of a run are DTensors, that initializers reach them, and that a copy works."""
    model, call = MODELS["llama tied"]()
    apply_tensor_plan(model, tp_plan(model, call), mesh_of(tp=2))
    nn.init.constant_(model.head.weight, 0.5)
    loss_of(model(call)).backward()
    return {
        "is a parameter": isinstance(model.head.weight, DTensor) and isinstance(model.head.weight, nn.Parameter),
        "is written": bool((model.head.weight.to_local() == 0.5).all()),
        "is tied": model.head.weight is model.embed.weight,
        "has a gradient": model.head.weight.grad is not None,
        "is copied": isinstance(copy.deepcopy(model).head.weight, DTensor),
    }


def evaluate_encoder() -> tuple[float, int]:
    """Evaluate an encoder with padding; return the difference from the whole one and the number of gathers."""
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True), 2).eval()
    call = {
        "src": torch.randn(4, 16, 32),
        "src_key_padding_mask": torch.arange(16)[None] >= torch.arange(13, 17)[:, None],
    }
    reference = copy.deepcopy(model)
    apply_tensor_plan(model, tp_plan(model, call), mesh_of(tp=2))
    put_together, seen = layers.put_together, []
    layers.put_together = lambda tensor, *args, **options: (seen.append(1), put_together(tensor, *args, **options))[1]
    with torch.no_grad():
        output = model(**call)
    layers.put_together = put_together
    return float((output - reference(**call)).abs().max()), len(seen)


def save_bare(folder: str) -> float:
    """Export and save a model that was cut without parallelize; return the largest difference from the whole one."""
    model, call = MODELS["fused"]()
    reference = copy.deepcopy(model)
    apply_tensor_plan(model, tp_plan(model, call), mesh_of(tp=2))
    training.export_safetensors(f"{folder}/bare.safetensors", model)
    training.save(f"{folder}/bare", model, step=1)
    plain, again = MODELS["fused"]()[0], MODELS["fused"]()[0]
    training.import_safetensors(f"{folder}/bare.safetensors", plain)
    training.load(f"{folder}/bare", again)
    pairs = [
        (each[name], tensor)
        for each in (plain.state_dict(), again.state_dict())
        for name, tensor in reference.state_dict().items()
    ]
    return max(float((found - expected).abs().max()) for found, expected in pairs)


def go_on_dropping(folder: str) -> tuple[list[float], list[float]]:
    """Return the losses of two steps with dropout after a checkpoint, and the same after loading it."""
    found = []
    for is_again in (False, True):
        model = made(Llama(dropout=0.3))
        plan = tp_plan(model, tokens())
        torch.manual_seed(3)
        apply_tensor_plan(model, plan, mesh_of(tp=2))
        if is_again:
            training.load(folder, model)
        else:
            model(tokens())
            training.save(folder, model, step=1)
        found.append([float(loss_of(model(tokens()))) for _ in range(2)])
    return found[0], found[1]


def drop_on_replicas() -> list[float]:
    """Return the sums of the outputs of two replicas with the same seed."""
    sums = []
    for replica in (0, 1):
        model = made(Llama(dropout=0.3))
        plan = tp_plan(model, tokens())
        torch.manual_seed(3)
        sums.append(float(apply_tensor_plan(model, plan, mesh_of(tp=2), replica=replica)(tokens()).detach().sum()))
    return sums
