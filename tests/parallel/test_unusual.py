"""Models and losses with side effects or unusual structure: right in every layout, or refused by name on all ranks."""

from __future__ import annotations

import re

import pytest

from detrain_nb import Session
from detrain_nb.errors import RankError

from .sampled import one_in


@pytest.fixture(scope="module")
def ranks(two_ranks: Session) -> Session:
    two_ranks.run_cell("import unusual_ranks", timeout_s=60)
    return two_ranks


def require_refusal(ranks: Session, code: str, message: str) -> None:
    """Check that all ranks refuse with the same message."""
    with pytest.raises(RankError) as caught:
        ranks.run_cell(code, timeout_s=60)
    told = {rank: (error.name, error.message) for rank, error in caught.value.errors.items()}
    assert sorted(told) == [0, 1] and len(set(told.values())) == 1, told
    assert told[0][0] == "SpecError" and re.search(message, told[0][1]), told


@pytest.mark.parametrize("axes", [{"dp_replicate": 2}, {"dp_shard": 2}, {"tp": 2}, {"pp": 2}], ids=str)
def test_the_models_own_train_and_eval_are_called(ranks: Session, axes: dict[str, int]) -> None:
    for rank, apart in ranks.run_cell(f"unusual_ranks.evaluate_and_train({axes})", timeout_s=60).values.items():
        assert all(each < 1e-6 for each in apart), (rank, apart)


@pytest.mark.parametrize("axis", ["pp", "tp", "dp_shard"])
@pytest.mark.parametrize("model", [*(f"Aside({way!r})" for way in ("list", "function", "partial")), "Looking('list')"])
def test_parameter_that_is_read_from_elsewhere_is_refused(ranks: Session, axis: str, model: str) -> None:
    """The other object would keep the original tensor, which is not trained."""
    message = rf"reads its parameter scale from a list, a function or another object, where {axis} would leave the"
    require_refusal(ranks, f"unusual_ranks.lay_out(unusual_ranks.{model}, {{{axis!r}: 2}})", message)


def test_parameter_that_is_read_from_elsewhere_is_trained_on_whole_replicas(ranks: Session) -> None:
    code = "unusual_ranks.apart_after_steps(lambda: unusual_ranks.Aside('list'), {'dp_replicate': 2})"
    for apart in ranks.run_cell(code, timeout_s=60).values.values():
        assert apart < 1e-6


@pytest.mark.parametrize("axis", ["tp", "dp_shard"])
def test_buffer_that_a_function_writes_into_is_that_of_the_whole_model(ranks: Session, axis: str) -> None:
    for make in ("unusual_ranks.Averaging", "lambda: copy.deepcopy(unusual_ranks.Averaging())"):
        code = f"import copy; unusual_ranks.apart_after_steps({make}, {{{axis!r}: 2}})"
        for apart in ranks.run_cell(code, timeout_s=60).values.values():
            assert apart < 1e-6, make


def test_buffer_that_a_function_writes_into_is_refused_in_stages(ranks: Session) -> None:
    """Each stage, also on one rank, would write into the same tensor or into one of its own."""
    message = "reads its buffer average from a list, a function or another object, where pp would leave the old"
    require_refusal(ranks, "unusual_ranks.lay_out(unusual_ranks.Averaging(), {'pp': 2})", message)


@pytest.mark.parametrize("axis", ["tp", "dp_shard"])
@pytest.mark.parametrize("kind", ["function", "reentrant", "layers"])
def test_checkpoint_of_a_function_reads_what_the_forward_read(ranks: Session, axis: str, kind: str) -> None:
    """The function runs again in the backward pass, in no module."""
    code = f"unusual_ranks.apart_after_steps(lambda: unusual_ranks.Recomputing({kind!r}), {{{axis!r}: 2}})"
    for apart in ranks.run_cell(code, timeout_s=60).values.values():
        assert apart < 1e-6


def test_recurrent_layers_do_not_move_the_weights_that_shards_were_put_together_to(ranks: Session) -> None:
    code = "unusual_ranks.apart_after_steps(unusual_ranks.Recurrent, {'dp_shard': 2})"
    for apart in ranks.run_cell(code, timeout_s=60).values.values():
        assert apart < 1e-6


WRITING = [*(f"Normalizing({way!r})" for way in ("data", "copy", "evaluating")), "Following()"]


@pytest.mark.parametrize("model", WRITING)
def test_parameters_that_forward_writes_into_are_not_sharded(ranks: Session, model: str) -> None:
    """Each rank would write into a gathered parameter that exists only for a moment."""
    name = r"averages\.0\.down\.bias and 7 more" if model == "Following()" else r"layers\.0\.up\.weight and 1 more"
    code = f"unusual_ranks.lay_out(unusual_ranks.{model}, {{'dp_shard': 2}})"
    require_refusal(
        ranks, code, rf"forward writes into its parameter {name}, and dp_shard would lose the change: write"
    )


@pytest.mark.parametrize("model", WRITING)
@pytest.mark.parametrize("axis", ["tp", "dp_replicate"])
def test_parameters_that_forward_writes_into_are_whole_on_every_rank(ranks: Session, axis: str, model: str) -> None:
    code = f"unusual_ranks.apart_after_steps(lambda: unusual_ranks.{model}, {{{axis!r}: 2}})"
    for apart in ranks.run_cell(code, timeout_s=60).values.values():
        assert apart < 1e-6


@pytest.mark.parametrize("axis, way", [("dp_shard", "weight"), ("dp_shard", "view"), ("tp", "weight")])
def test_version_of_a_parameter_that_is_laid_out_is_not_asked(ranks: Session, axis: str, way: str) -> None:
    """The parameter that the model gets has always one version, so a cached value would stay that of the first step."""
    message = rf"reads _version of its parameter layers\.0\.weight, which does not change under {axis} when the"
    require_refusal(ranks, f"unusual_ranks.lay_out(unusual_ranks.Remembering({way!r}), {{{axis!r}: 2}})", message)


def test_what_is_kept_until_a_parameter_has_another_version_is_that_of_each_step_on_replicas(ranks: Session) -> None:
    code = "unusual_ranks.apart_after_steps(lambda: unusual_ranks.Remembering('view'), {'dp_replicate': 2})"
    for apart in ranks.run_cell(code, timeout_s=60).values.values():
        assert apart < 1e-6


@pytest.mark.parametrize("way", ["weak", "function"])
def test_parameter_that_blocks_lead_to_has_its_whole_gradient(ranks: Session, way: str) -> None:
    """Where the blocks are cut each rank has part of the gradient, which a proof of the block alone does not show."""
    code = f"unusual_ranks.apart_after_steps(lambda: unusual_ranks.Reading({way!r}), {{'tp': 2}})"
    for apart in ranks.run_cell(code, timeout_s=60).values.values():
        assert apart < 1e-6


@pytest.mark.parametrize("axis", ["dp_replicate", "dp_shard"])
def test_views_that_are_written_into_are_right_and_nothing_is_told(ranks: Session, axis: str) -> None:
    """torch does not warn either of what the user cannot change."""
    assert ranks.run_cell(f"unusual_ranks.warnings_of_steps({axis!r})", timeout_s=60).values == {0: [], 1: []}


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe"])
def test_buffer_that_the_next_microbatch_writes_into_is_what_it_was_in_the_backward_pass(
    ranks: Session, schedule: str
) -> None:
    code = f"unusual_ranks.apart_by_microbatches(unusual_ranks.Counting, {schedule!r})"
    for apart in ranks.run_cell(code, timeout_s=60).values.values():
        assert apart < 1e-6


def test_buffer_that_the_first_forward_makes_is_refused_over_stages(ranks: Session) -> None:
    """For a pass that only profiles the model it is no error."""
    message = r"the model creates layers\.0\.mean in its first forward, which pp would miss: create it with"
    require_refusal(ranks, "unusual_ranks.lay_out(unusual_ranks.MakingLate(), {'pp': 2})", message)
    ranks.run_cell("unusual_ranks.par.profile(unusual_ranks.MakingLate(), unusual_ranks.draw(2, 8))", timeout_s=60)


def test_block_that_writes_into_its_argument_is_not_sharded(ranks: Session) -> None:
    message = (
        r"layers\.1 writes into its argument in place, which FSDP2 does not allow: compute a new tensor \(x = x \+"
    )
    require_refusal(ranks, "unusual_ranks.lay_out(unusual_ranks.InPlace(False), {'dp_shard': 2})", message)
    code = "unusual_ranks.apart_after_steps(lambda: unusual_ranks.InPlace({}), {{{!r}: 2}})"
    for is_own, axis in ((True, "dp_shard"), (False, "dp_replicate")):
        for apart in ranks.run_cell(code.format(is_own, axis), timeout_s=60).values.values():
            assert apart < 1e-6, axis


def test_batch_of_another_kind_than_the_example_is_told_under_tp(ranks: Session) -> None:
    """The warning comes once for each kind, on the first rank: the code may take a path that was not proved."""
    had = "the tensor plan was proved with"
    what = "make the plan with example inputs of that kind, or compare with the whole model"
    found = ranks.run_cell("unusual_ranks.warnings_of_kinds()", timeout_s=60).values
    assert found[1] == [] and found[0] == [
        f"{had} way='plain', but this batch has way='other': {what}",
        f"{had} weight=None, but this batch has weight=a tensor: {what}",
        f"{had} way='plain', but this batch has way='third': {what}",
    ]


def test_plan_that_was_edited_on_one_rank_is_told_on_all(ranks: Session) -> None:
    message = "the tensor plan on rank 1 differs: it has 0: whole, but 0: colwise on rank 0; give all ranks"
    require_refusal(ranks, "unusual_ranks.plan_alone(1)", message)
    message = "rank 1: the tensor plan is for tp=4, but the mesh has tp=2"
    require_refusal(ranks, "unusual_ranks.plan_alone(1, is_refused=True)", message)


@pytest.mark.parametrize("axis", ["pp", "dp_shard"])
def test_precision_of_one_rank_alone_is_told_on_all(ranks: Session, axis: str) -> None:
    message = "the call of parallelize on rank 1 differs: it has precision='bf16', but precision=None on rank 0"
    require_refusal(ranks, f"unusual_ranks.lay_out_alone({axis!r})", message)


@pytest.mark.parametrize("axis", ["dp_replicate", "dp_shard", "pp"])
def test_loss_with_a_parameter_of_its_own_is_refused(ranks: Session, axis: str) -> None:
    code = f"unusual_ranks.lay_out(unusual_ranks.Switching(), {{{axis!r}: 2}}, loss=unusual_ranks.SCALED)"
    require_refusal(ranks, code, r"not in the model, Scaled\.scale: .* move it into the model")


@pytest.mark.parametrize("axis", ["tp", "dp_shard", "dp_replicate"])
@pytest.mark.parametrize(
    "model", one_in(2, ["Penalized()", "Functional()", "OfTwoBases()", "Sparse('csr')", "Sparse('coo')", "Empty()"])
)
def test_model_of_unusual_parts_is_right(ranks: Session, axis: str, model: str) -> None:
    code = f"unusual_ranks.apart_after_steps(lambda: unusual_ranks.{model}, {{{axis!r}: 2}})"
    for apart in ranks.run_cell(code, timeout_s=60).values.values():
        assert apart < 2e-6


@pytest.mark.parametrize("axis", ["dp_shard", "dp_replicate"])
@pytest.mark.parametrize("way", ["grad", "func"])
def test_model_that_takes_gradients_in_its_forward_is_right(ranks: Session, axis: str, way: str) -> None:
    code = f"unusual_ranks.apart_after_steps(lambda: unusual_ranks.Forces({way!r}), {{{axis!r}: 2}})"
    for apart in ranks.run_cell(code, timeout_s=60).values.values():
        assert apart < 2e-6


def test_model_that_takes_gradients_by_a_transform_is_refused_in_parts(ranks: Session) -> None:
    """torch.func would meet DTensors. Gradients by torch.autograd.grad are right."""
    code = "unusual_ranks.lay_out(unusual_ranks.Forces('func'), {'tp': 2})"
    require_refusal(ranks, code, r"takes gradients by torch\.func, which cannot handle the parameters that tp")
    code = "unusual_ranks.apart_after_steps(unusual_ranks.Mapped, {'tp': 2})"
    require_refusal(ranks, code, r"calls its layers under a torch\.func transform \(vmap, grad\), which cannot handle")
    code = "unusual_ranks.apart_after_steps(lambda: unusual_ranks.Forces('grad'), {'tp': 2})"
    for apart in ranks.run_cell(code, timeout_s=60).values.values():
        assert apart < 2e-6


@pytest.mark.parametrize(
    "model",
    ["Held('objects')", "Held('partial')", "Held('cycle')", "Hooked('layer')", "Hooked('weight')", "Hooked('block')"],
)
def test_layers_that_are_called_by_what_holds_them_are_trained_over_stages(ranks: Session, model: str) -> None:
    code = f"unusual_ranks.apart_after_steps(lambda: unusual_ranks.{model}, {{'pp': 2}})"
    for apart in ranks.run_cell(code, timeout_s=60).values.values():
        assert apart < 2e-6


def test_code_that_mixes_parameters_in_parts_with_others_is_told(ranks: Session) -> None:
    code = "unusual_ranks.apart_after_steps(lambda: unusual_ranks.Penalized(is_added=True), {'tp': 2})"
    require_refusal(ranks, code, r"parameters\(\), where each is a DTensor: read self\.weight, or return")


def test_block_whose_parts_compute_again_behind_it_is_told_in_shards(ranks: Session) -> None:
    """Reversible layers do so; under tp the result is right."""
    message = r"blocks\.2\.0 runs outside the forward of its block, but dp_shard gathers a block's parameters only for"
    require_refusal(ranks, "unusual_ranks.apart_after_steps(unusual_ranks.Reversible, {'dp_shard': 2})", message)
    code = "unusual_ranks.apart_after_steps(unusual_ranks.Reversible, {'tp': 2})"
    assert max(ranks.run_cell(code, timeout_s=60).values.values()) < 1e-6


def test_parameter_that_is_made_of_parts_and_of_others_is_told(ranks: Session) -> None:
    code = "unusual_ranks.apart_after_steps(lambda: unusual_ranks.Functional(is_scaled=True), {'tp': 2})"
    require_refusal(
        ranks, code, r"computes a parameter, as for functional_call, both from parameters\(\) or named_parameters"
    )


@pytest.mark.parametrize("axis", ["pp", "dp_shard", "dp_replicate"])
@pytest.mark.parametrize("kind", ["slots", "namespace"])
def test_output_in_which_nobody_finds_tensors_is_refused(ranks: Session, axis: str, kind: str) -> None:
    code = f"unusual_ranks.train_once(unusual_ranks.Wrapped({kind!r}), {{{axis!r}: 2}})"
    require_refusal(
        ranks, code, r"the model returns a (Slotted|SimpleNamespace), whose contents pytree does not know: "
    )


@pytest.mark.parametrize("axis", ["pp", "tp", "dp_shard"])
@pytest.mark.parametrize(
    "way, who",
    [
        ("transposed", r"parameter layers.3.weight"),
        ("rows", r"parameter head.weight"),
        ("buffer", r"tensor kept"),
        ("attribute", r"tensor of shape \(8, 2\) that the model keeps"),
    ],
)
def test_tensor_on_the_memory_of_a_parameter_is_refused(ranks: Session, way: str, who: str, axis: str) -> None:
    """A step of the optimizer would change only one of them."""
    message = (
        f"the {who} shares memory with the parameter layers.0.weight, and would no longer .* under {axis}: tie them"
    )
    require_refusal(ranks, f"unusual_ranks.lay_out(unusual_ranks.OnOneMemory({way!r}), {{{axis!r}: 2}})", message)


@pytest.mark.parametrize("axis", ["pp", "tp", "dp_shard"])
def test_parameters_side_by_side_are_as_any_others(ranks: Session, axis: str) -> None:
    code = f"unusual_ranks.apart_after_steps(lambda: unusual_ranks.OnOneMemory('side by side'), {{{axis!r}: 2}})"
    for apart in ranks.run_cell(code, timeout_s=60).values.values():
        assert apart < 1e-6


@pytest.mark.parametrize("way", ["object", "parts", "partial"])
def test_loss_that_leads_to_layers_is_refused_over_stages(ranks: Session, way: str) -> None:
    """The last stage would read outdated weights, and no gradient would reach them."""
    require_refusal(
        ranks, f"unusual_ranks.train_with_loss({way!r}, {{'pp': 2}})", "the loss refers to the model itself"
    )
    ranks.run_cell(f"unusual_ranks.train_with_loss({way!r}, {{'dp_replicate': 2}})", timeout_s=60)


@pytest.mark.parametrize("axis, way", [("tp", "object"), ("dp_shard", "object"), ("dp_shard", "aside")])
def test_loss_that_reads_parameters_in_parts_is_refused(ranks: Session, axis: str, way: str) -> None:
    message = "the loss reads parameters of the model outside the forward, .* have the model return what"
    require_refusal(ranks, f"unusual_ranks.train_with_loss({way!r}, {{{axis!r}: 2}})", message)


def test_loss_that_trains_a_layer_that_only_it_calls_is_refused_on_replicas(ranks: Session) -> None:
    message = r"the gradient of aside\.(weight|bias) bypasses the forward, where DDP does not see it: have the model"
    require_refusal(ranks, "unusual_ranks.train_with_loss('aside', {'dp_replicate': 2})", message)


def test_loss_that_reads_a_number_of_the_model_is_none_of_these(ranks: Session) -> None:
    ranks.run_cell("unusual_ranks.train_with_loss('number', {'pp': 2})", timeout_s=60)


@pytest.mark.parametrize("way", ["of its own", "of blocks", "a copy"])
def test_parameters_that_a_model_gives_are_trained_in_shards(ranks: Session, way: str) -> None:
    """FSDP2 frees their memory after the forward, and torch ended the process."""
    code = f"unusual_ranks.apart_with_given({way!r}, {{'dp_shard': 2}})"
    for apart in ranks.run_cell(code, timeout_s=60).values.values():
        assert apart < 2e-6


def test_parameter_that_a_model_gives_past_its_block_is_refused(ranks: Session) -> None:
    code = "unusual_ranks.apart_with_given('past blocks', {'dp_shard': 2})"
    require_refusal(
        ranks, code, r"the model returns a parameter \(layers.1.weight\), of which each rank holds only a part"
    )
