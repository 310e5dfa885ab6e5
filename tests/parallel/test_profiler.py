"""What a model costs and where it can be cut, compared with counts by hand or with a real pass."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from detrain_nb.errors import SpecError
from detrain_nb.parallel import ModelProfile, partition, profile, split
from detrain_nb.parallel.costs.block_use import block_use_unseen
from detrain_nb.parallel.costs.profiler import profile_call

from .models import (
    GPT,
    Checkpointed,
    Experts,
    LooksAtValues,
    Masked,
    Noisy,
    Routed,
    Skips,
    TwoNames,
    UNet,
    WritesPart,
)

TOKENS = torch.zeros(2, 16, dtype=torch.long)


def measure_saved_bytes(model: nn.Module, *args: Tensor) -> int:
    """Return the bytes that autograd keeps in a real pass, parameters excluded."""
    parameters = {tensor.untyped_storage().data_ptr() for tensor in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(*args)
    del output
    return sum(tensor.untyped_storage().nbytes() for at, tensor in kept.items() if at not in parameters)


def test_layers_one_after_another() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4, bias=False))
    found = profile(model, torch.zeros(3, 8))
    assert found.cuts == ("1", "2")
    assert [unit.cut for unit in found.units] == [None, "1", "2"]
    assert [unit.flops for unit in found.units] == [2 * 3 * 8 * 16, 0, 2 * 3 * 16 * 4]
    assert [unit.input_bytes for unit in found.units] == [0, 4 * 3 * 16, 4 * 3 * 16]
    assert [unit.parameters for unit in found.units] == [("0.weight", "0.bias"), (), ("2.weight",)]
    assert found.parameter_bytes == {"0.weight": 4 * 8 * 16, "0.bias": 4 * 16, "2.weight": 4 * 16 * 4}
    assert [unit.saved_bytes for unit in found.units] == [4 * 3 * 8, 4 * 3 * 16, 0], "the input, and what ReLU gave"


class GroupedRows(nn.Module):
    """A grouped matrix product as in transformers' mixtures of experts: rows are sorted by expert."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 8, 16))

    def forward(self, x: Tensor) -> Tensor:
        return F.grouped_mm(x, self.weight, offs=torch.tensor([2, 8], dtype=torch.int32))


class MatrixByVector(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.mv(self.weight, x[0])


@pytest.mark.parametrize(
    "model, flops",
    [
        (nn.LSTM(8, 16, num_layers=2, bidirectional=True), 2 * 6 * 2 * 64 * (8 + 16 + 32 + 16)),
        (nn.GRU(8, 16), 2 * 6 * 48 * (8 + 16)),
        (GroupedRows(), 2 * 8 * 8 * 16),
        (MatrixByVector(8, 8), 2 * 8 * 8),
        (nn.Linear(8, 4, dtype=torch.complex64), 4 * 2 * 8 * 8 * 4),
    ],
    ids=["LSTM", "GRU", "experts", "matrix by vector", "complex"],
)
def test_products_that_torch_does_not_count(model: nn.Module, flops: int) -> None:
    dtype = next(model.parameters()).dtype
    inputs = torch.zeros(3, 2, 8) if isinstance(model, nn.RNNBase) else torch.zeros(8, 8, dtype=dtype)
    assert sum(unit.flops for unit in profile(model, inputs).units) == flops


def test_gpt_can_be_cut_at_each_block() -> None:
    found = profile(GPT(), TOKENS)
    assert found.cuts == ("h.0", "h.1", "h.2", "h.3", "ln_f", "head")
    block = found.units[2]
    linear_flops = 2 * 2 * 16 * 32 * (3 * 32 + 32 + 4 * 32 + 4 * 32)
    attention_flops = 2 * 2 * 4 * 16 * 16 * (8 + 8)
    assert block.flops == linear_flops + attention_flops
    assert block.input_bytes == 4 * 2 * 16 * 32
    assert {name.split(".")[1] for name in block.parameters} == {"1"} and len(block.parameters) == 12


@pytest.mark.parametrize("model, inputs", [(GPT(), TOKENS), (UNet(), torch.zeros(3, 8))], ids=["GPT", "UNet"])
def test_what_autograd_keeps_is_what_it_really_keeps(model: nn.Module, inputs: Tensor) -> None:
    found = profile(model, inputs)
    assert sum(unit.saved_bytes for unit in found.units) == measure_saved_bytes(model, inputs)


def test_what_an_lstm_keeps_is_counted() -> None:
    model, inputs = nn.LSTM(48, 64, num_layers=2), torch.zeros(32, 8, 48)
    found, measured = profile(model, inputs), measure_saved_bytes(model, inputs)
    assert sum(unit.saved_bytes for unit in found.units) == pytest.approx(measured, rel=0.05)
    assert measured > 10 * (2 * 32 * 8 * 64 * 4), "many times its output"


def test_no_cut_in_the_middle_of_a_checkpoint() -> None:
    assert profile(Checkpointed(), torch.zeros(2, 8)).cuts == ("blocks.0", "blocks.1", "blocks.2")


def test_no_cut_where_a_checkpoint_notes_no_gradients() -> None:
    class Reentrant(Checkpointed):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=True)
            return x

    found = profile(Reentrant(), torch.zeros(2, 8))
    assert not found.cuts and "use_reentrant=False" in found.why_no_more


def test_no_cut_where_two_tensors_are_alive() -> None:
    assert profile(UNet(), torch.zeros(3, 8)).cuts == ("mid1", "up", "out")  # the input of mid1 is the skip itself


def test_skip_around_a_block_does_not_hinder_a_cut() -> None:
    assert profile(Skips(), torch.zeros(3, 8)).cuts == ("blocks.0", "blocks.1", "blocks.2", "out")


def test_block_is_not_cut_in_its_middle() -> None:
    assert profile(GPT(layers=2), TOKENS).cuts == ("h.0", "h.1", "ln_f", "head")


def test_mask_does_not_hinder_a_cut() -> None:
    found = profile(Masked(), {"x": torch.zeros(2, 8), "mask": torch.ones(2, 8)})
    assert found.cuts == ("layers.1", "layers.2")


def test_module_that_runs_twice_is_no_cut() -> None:
    shared = nn.Linear(4, 4)
    found = profile(nn.Sequential(nn.Linear(4, 4), shared, nn.ReLU(), shared, nn.Linear(4, 4)), torch.zeros(2, 4))
    assert found.cuts == ("2", "4")


def test_tied_parameters_have_one_name_in_every_unit_that_uses_them() -> None:
    found = profile(GPT(is_tied=True), TOKENS)
    assert found.units[0].parameters[0] == "wte.weight" == found.units[-1].parameters[0]
    assert "head.weight" not in found.parameter_bytes


def test_nothing_is_allocated_and_nothing_changes() -> None:
    with torch.device("meta"):
        huge = nn.Sequential(*(nn.Linear(100_000, 100_000) for _ in range(8)))  # 320 GB
    found = profile(huge, torch.zeros(1, 100_000, device="meta"))
    assert sum(found.parameter_bytes.values()) == 8 * 4 * (100_000**2 + 100_000)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout())
    torch.manual_seed(0)
    before, state = torch.get_rng_state(), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    profile(model, torch.randn(2, 4, generator=torch.Generator().manual_seed(1)))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


LLAMA_70B = """
import json, resource, torch
from transformers import LlamaConfig, LlamaForCausalLM
from detrain_nb import parallel as par

def most_kb():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

config = LlamaConfig(
    vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
    num_key_value_heads=8, max_position_embeddings=8192, use_cache=False,
)
before_kb = most_kb()
with torch.device("meta"):
    model, tokens = LlamaForCausalLM(config), torch.zeros(1, 4096, dtype=torch.long)
found = par.profile(model, {"input_ids": tokens})
print(json.dumps({
    "kb": most_kb() - before_kb, "bytes": sum(found.parameter_bytes.values()),
    "cuts": [cut for cut in found.cuts if cut.startswith("model.layers.")], "flops": sum(u.flops for u in found.units),
}))
"""


@pytest.mark.slow
def test_llama_of_70_billion_parameters_costs_no_memory_to_profile() -> None:
    """In float32 the weights would take 282 GB; profiling took 41 MB and 3 s. benchmarks/ tracks the time."""
    pytest.importorskip("transformers")
    ended = subprocess.run([sys.executable, "-c", LLAMA_70B], capture_output=True, text=True, timeout=100, check=True)
    found = json.loads(ended.stdout)
    assert found["bytes"] == 4 * 70_553_706_496
    assert found["cuts"] == [f"model.layers.{index}" for index in range(80)]
    assert found["flops"] > 2 * 4096 * 69e9, "two for each weight and token; the embedding has none"
    assert found["kb"] < 100_000


def test_module_with_two_names_keeps_its_tensors() -> None:
    model = TwoNames()
    tensors = dict(model.state_dict(keep_vars=True))
    profile(model, torch.zeros(2, 8))
    after = model.state_dict(keep_vars=True)
    assert all(after[name] is tensor for name, tensor in tensors.items()) and after.keys() == tensors.keys()


def test_random_numbers_are_not_drawn_twice() -> None:
    assert profile(Noisy(), torch.zeros(2, 8)).cuts == ("c",), "before, what was drawn is alive too"


def test_model_that_looks_at_values_runs_once_and_stays_as_it_was() -> None:
    model = LooksAtValues()
    before, state = torch.get_rng_state(), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    inputs = torch.ones(2, 4)
    found = profile(model, inputs)
    assert found.cuts == ("norm",), "behind it the model itself looks at values"
    assert torch.equal(torch.get_rng_state(), before) and torch.equal(inputs, torch.ones(2, 4))
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    with pytest.raises(SpecError, match=r"reads values of tensors .* do not exist on the meta device: profile it with"):
        profile(model.to("meta"), inputs)


@pytest.mark.parametrize(
    "model, inputs", [(GPT(), TOKENS), (LooksAtValues(), torch.ones(2, 4))], ids=["without memory", "run for real"]
)
def test_tensors_of_the_pass_are_gone_afterwards(model: nn.Module, inputs: Tensor) -> None:
    """Also those of the first pass, and nothing is kept for each model. Other models have filled torch's caches."""

    def count() -> int:
        gc.collect()
        return sum(isinstance(each, Tensor) for each in gc.get_objects())

    for other in (GPT(layers=1), LooksAtValues()):
        profile(other, TOKENS if isinstance(other, GPT) else torch.ones(2, 4))
    del other
    counts = [count()]
    for _ in range(2):
        profile(model, inputs)
        counts.append(count())
    assert counts == counts[:1] * 3


def test_times_are_of_computing_or_of_moving() -> None:
    found: ModelProfile = profile(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.zeros(3, 8))
    linear, relu = found.units
    slow_memory = found.times(flops_per_s=1e30, bytes_per_s=1.0, is_training=False)
    assert slow_memory == [linear.moved_bytes, relu.moved_bytes] == [4 * (8 + 64 + 24 + 24), 4 * (24 + 24)]
    assert found.times(flops_per_s=1.0, bytes_per_s=1e30) == pytest.approx([3 * linear.flops, 3 * 2 * 96 / 1e30])


def test_measured_times_follow_the_work() -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 2048), nn.ReLU())
    begin_s = time.perf_counter()
    found = profile(model, torch.ones(512, 256), measure=True)
    elapsed_s = time.perf_counter() - begin_s
    small, large, _ = found.units
    assert large.flops == 8 * small.flops
    assert small.forward_s and large.forward_s and large.forward_s > small.forward_s
    assert small.backward_s and large.backward_s and large.backward_s > small.backward_s
    assert 0 < sum(found.times()) < elapsed_s
    assert found.times() == [small.forward_s + small.backward_s, large.forward_s + large.backward_s, found.times()[2]]
    assert found.times(is_training=False)[:2] == [small.forward_s, large.forward_s]
    assert found.times(flops_per_s=1e12, bytes_per_s=1e11) == profile(model, torch.ones(512, 256)).times()
    assert partition(found, 3).stage_s == pytest.approx(found.times())


def test_measuring_leaves_everything_as_it_was() -> None:
    model = nn.Sequential(nn.ELU(inplace=True), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 2))
    inputs = torch.randn(6, 4)
    model(inputs).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    values = [gradient.clone() for gradient in gradients if gradient is not None]
    before, state = torch.get_rng_state(), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tensors, given = dict(model.state_dict(keep_vars=True)), inputs.clone()
    found = profile(model, inputs, measure=True)
    assert all(unit.forward_s is not None and unit.forward_s > 0 for unit in found.units)
    assert torch.equal(torch.get_rng_state(), before) and torch.equal(inputs, given)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert all(model.state_dict(keep_vars=True)[name] is tensor for name, tensor in tensors.items())
    assert all(parameter.grad is gradient for parameter, gradient in zip(model.parameters(), gradients))
    assert all(torch.equal(gradient, value) for gradient, value in zip(gradients, values) if gradient is not None)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_no_backward_is_measured_where_none_is() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    model[0].requires_grad_(False)
    backward_s = [unit.backward_s for unit in profile(model, torch.ones(32, 64), measure=True).units]
    assert backward_s[0] == 0 and backward_s[1] and backward_s[2]
    model.requires_grad_(False)
    assert [unit.backward_s for unit in profile(model, torch.ones(32, 64), measure=True).units] == [0, 0, 0]


def test_what_is_frozen_costs_no_gradients_and_no_state() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
    for number in (0, 2):
        model[number].requires_grad_(False)
    found = profile(model, torch.zeros(3, 8))
    forward_s = found.times(is_training=False)
    assert [step / once for step, once in zip(found.times(), forward_s)] == pytest.approx([1, 3, 2, 3])
    halves = partition(found, 2)
    assert [layer.state_bytes for layer in halves.layers] == [256, 4 * 256, 256, 4 * 256]
    assert halves.memory_bytes == (5 * 256 + 2 * 96, 5 * 256 + 96), "with what the trained ones keep of microbatches"
    assert partition(found, 2, is_training=False).memory_bytes == (512, 512)


def test_checkpoints_are_measured_with_what_runs_again() -> None:
    found = profile(Checkpointed(), torch.zeros(2, 8), measure=True)
    assert found.cuts == ("blocks.0", "blocks.1", "blocks.2") and all(seconds > 0 for seconds in found.times())


def test_what_has_no_memory_is_not_measured() -> None:
    with pytest.raises(SpecError, match="cannot measure on the meta device: give a model with real param"):
        profile(GPT().to("meta"), TOKENS, measure=True)


def test_what_is_written_in_place_into_a_part_is_alive() -> None:
    assert profile(WritesPart(), torch.zeros(3, 8)).cuts == ("d",), "before, what was written is read behind the last"


def test_operator_that_cannot_run_without_values_runs_for_real(caplog: pytest.LogCaptureFixture) -> None:
    class Grouped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(2, 8, 8))

        def forward(self, x: Tensor) -> Tensor:
            ends = torch.tensor([2, len(x)], dtype=torch.int32)
            return x + F.grouped_mm(x, self.weight, offs=ends)

    found = profile(nn.Sequential(nn.Linear(8, 8), Grouped(), nn.Linear(8, 8)), torch.zeros(5, 8))
    assert found.cuts == ("1", "2") and not caplog.records


def test_table_has_a_line_for_each_unit() -> None:
    lines = str(profile(GPT(), TOKENS)).splitlines()
    assert [line.split()[0] for line in lines] == ["begins", "the", "h.0", "h.1", "h.2", "h.3", "ln_f", "head"]
    assert "ms" not in lines[0].split()
    measured = profile(GPT(), TOKENS, measure=True)
    header, *lines = str(measured).splitlines()
    assert header.split()[-1] == "ms" and [float(line.split()[-1]) for line in lines] == pytest.approx(
        [1e3 * seconds for seconds in measured.times()], abs=1e-3
    )


@pytest.mark.parametrize(
    "model, inputs, message",
    [
        (nn.Sequential(nn.Linear(2, 2)), 3, "example_inputs is a int: give a tensor"),
        (nn.Sequential(nn.Linear(2, 2)), "x", "example_inputs is a str: give a tensor"),
    ],
)
def test_what_cannot_be_profiled_is_told(model: nn.Module, inputs: object, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        profile(model, inputs)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
def test_models_whose_parts_are_not_known_are_told() -> None:
    @dataclass
    class Output:
        logits: Tensor

    class Wrapped(nn.Linear):
        def forward(self, x: Tensor) -> Output:  # type: ignore[override]
            return Output(super().forward(x))

    with pytest.raises(SpecError, match="the model returns a Output, whose contents pytree does not know: return"):
        profile(Wrapped(2, 2), torch.zeros(1, 2))
    with pytest.raises(SpecError, match="lazy parameters without a shape: call it once"):
        profile(nn.LazyLinear(2), torch.zeros(1, 2))
    with pytest.raises(SpecError, match="the model is compiled: split the model that was given"):
        profile(torch.compile(nn.Linear(2, 2)), torch.zeros(1, 2))  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_torchscript_is_told() -> None:
    scripted = nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.Linear(2, 2)))
    with pytest.raises(
        SpecError, match=r"1 is TorchScript, which has no hooks to cut it at: give the nn\.Module that it was"
    ):
        profile(scripted, torch.zeros(1, 2))


def test_tensors_say_that_they_are_where_the_batch_is() -> None:
    """Autocast on a GPU reads the device. Without a GPU, operators that could be computed are not."""

    class Asks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            raise LookupError(f"{x.device.type} beside {self.weight.device.type}")

    with pytest.raises(LookupError, match="cuda beside cuda"):
        profile_call(Asks(4, 4), (torch.zeros(2, 4),), {}, device=torch.device("cuda"))


class PassesOn(nn.Module):
    """A module returns its argument while gradients are off; afterwards the model writes into it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.keep, self.bias = nn.Linear(4, 4), nn.Identity(), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        with torch.no_grad():
            x = self.keep(x)
        x += self.bias
        return x


def test_what_passes_on_its_argument_without_gradients_may_be_written_into() -> None:
    assert profile(PassesOn(), torch.zeros(2, 4)).units


def test_layer_that_takes_rows_for_time_is_named() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.rnn = nn.Linear(4, 4), nn.LSTM(4, 4)

        def forward(self, x: Tensor, is_turned: bool) -> Tensor:
            x = self.first(x.transpose(0, 1) if is_turned else x)
            result: Tensor = self.rnn(x)[0]
            return result

    assert profile(Recurrent(), (torch.ones(3, 5, 4), False)).cut_along_time == "rnn"
    assert profile(Recurrent(), (torch.ones(3, 5, 4), True)).cut_along_time == ""


@pytest.mark.parametrize("is_transform", [False, True])
def test_model_that_takes_gradients_in_its_forward_is_refused(is_transform: bool) -> None:
    class Energy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if is_transform:
                found: Tensor = torch.func.grad(lambda given: super(Energy, self).forward(given).sum())(x)
                return found
            x = x.detach().requires_grad_()
            return torch.autograd.grad(super().forward(x).sum(), x, create_graph=True)[0]

    with pytest.raises(
        SpecError, match=r"the model takes gradients in its own forward \(torch.autograd.grad, torch.func.grad\)"
    ):
        profile(Energy(4, 4), torch.ones(2, 4))


def test_layers_that_are_mapped_over_rows_are_no_cuts() -> None:
    class Mapped(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = torch.vmap(self[2])(self[1](self[0](x)))
            return result

    assert profile(Mapped(*(nn.Linear(4, 4) for _ in range(3))), torch.ones(2, 4)).cuts == ("1",)


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("way", ["any", "nonzero", "list", "batch"])
def test_blocks_that_the_model_chooses_by_values_are_told(way: str, rows: int) -> None:
    """This includes blocks that the example has no rows for; they are placed where they would have run."""
    found = profile(Routed(way), torch.randn(rows, 8, generator=torch.Generator().manual_seed(1)))
    assert sorted(found.block_use.chosen) == ["experts.0", "experts.1", "experts.2"]
    (unit,) = (unit for unit in found.units if "experts.0" in unit.modules)
    assert {"experts.1", "experts.1.2", "experts.2"} <= {*unit.modules}


class Looking(nn.Module):
    """All its layers run, whichever values it reads."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.layers = way, nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        mask = x > 0
        if self.way == "mask" and not mask.all():  # read once, before all of them
            x = x * mask
        for layer in self.layers:
            if self.way == "drops" and torch.rand(()) < 0.0:  # replicas draw the same number
                continue
            x = layer(x)
        if self.way == "behind" and x.sum() > 0:
            x = x * 2
        return x


@pytest.mark.parametrize("way", ["inside", "mask", "drops", "behind"])
def test_blocks_that_all_run_are_not_told(way: str) -> None:
    """Values may be read inside of the blocks, after them, or once for all of them."""
    model, shape = (Experts(), (2, 6, 8)) if way == "inside" else (Looking(way), (4, 8))
    assert not profile(model, torch.randn(shape)).block_use.chosen


def test_blocks_behind_a_look_of_a_model_without_values_are_told() -> None:
    model = Routed("any").to("meta")
    with pytest.raises(SpecError, match="reads values") as caught:
        profile(model, torch.zeros(2, 8, device="meta"))
    assert "experts.0" in block_use_unseen(model, caught.value.__cause__).chosen
    within = Experts().to("meta")
    with pytest.raises(SpecError, match="reads values") as caught:
        profile(within, torch.zeros(2, 6, 8, device="meta"))
    assert not block_use_unseen(within, caught.value.__cause__).chosen


class WithNone(nn.Module):
    """Its last block has no counterpart in the second list, as in transformers' Informer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.others = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8), None])  # type: ignore[list-item]

    def forward(self, x: Tensor) -> Tensor:
        for block, other in zip(self.blocks, self.others):
            x = block(x).tanh()
            x = x if other is None else x + other(x)
        return x


def test_list_of_blocks_may_have_none_in_it() -> None:
    assert profile(WithNone(), torch.zeros(2, 8)).cuts == ("others.0", "blocks.1", "others.1", "blocks.2")
    assert split(WithNone(), torch.zeros(2, 8), 3).num_stages == 3
