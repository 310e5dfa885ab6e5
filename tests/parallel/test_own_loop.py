"""Models that are called in a custom training loop, and losses that do not decompose into rows."""

from __future__ import annotations

import pytest

from detrain_nb import Session
from detrain_nb.errors import RankError

from .sampled import one_in


@pytest.fixture(scope="module")
def ranks(two_ranks: Session) -> Session:
    two_ranks.run_cell("import own_loop_ranks", timeout_s=60)
    return two_ranks


@pytest.mark.parametrize("axes", [{"dp_replicate": 2}, {"dp_shard": 2}, {"tp": 2}], ids=str)
def test_two_models_train_each_other_by_calls(ranks: Session, axes: dict[str, int]) -> None:
    for apart in ranks.run_cell(f"own_loop_ranks.apart_after_own_loop({axes})", timeout_s=60).values.values():
        assert apart < 1e-6


def test_call_past_the_replicas_is_told(ranks: Session) -> None:
    for told in ranks.run_cell("own_loop_ranks.call_past({'dp_replicate': 2})", timeout_s=60).values.values():
        assert len(told) == 1 and "Sequential was called directly, so gradients are not averaged" in told[0]


def test_stages_that_are_called_are_refused(ranks: Session) -> None:
    with pytest.raises(RankError, match="pipeline stages cannot be called: use train_step to run a batch"):
        ranks.run_cell("own_loop_ranks.call_stages()", timeout_s=60)


LAYOUTS = ["{'dp_replicate': 2}, 1", "{'pp': 2}, 4", "{'pp': 2}, 8"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("loss", one_in(2, ["contrastive", "root", "weights", "sum"]))
def test_loss_that_is_none_of_rows_is_told_once(ranks: Session, loss: str, layout: str) -> None:
    found = ranks.run_cell(f"own_loop_ranks.train_with({loss!r}, {layout})", timeout_s=60).values.values()
    told = [each for every in found for each in every]
    assert len(told) == 1 and told[0].startswith("the loss of a batch is not the mean of the losses of its parts: for")


@pytest.mark.parametrize("layout", [*LAYOUTS, "{'tp': 2}, 1, 7"])
@pytest.mark.parametrize("loss", one_in(3, ["rows", "random", "rough"]))
def test_loss_of_rows_is_not_told_of(ranks: Session, loss: str, layout: str) -> None:
    found = ranks.run_cell(f"own_loop_ranks.train_with({loss!r}, {layout})", timeout_s=60)
    assert list(found.values.values()) == [[], []]


def test_loss_that_gathers_the_rows_of_all_replicas_is_not_told_of(ranks: Session) -> None:
    """The loss is called equally often on every replica, so its collectives match."""
    found = ranks.run_cell("own_loop_ranks.train_with('gathered', {'dp_replicate': 2}, 1)", timeout_s=60)
    assert list(found.values.values()) == [[], []]


@pytest.mark.parametrize("options", ["{'dp_replicate': 2}", "{'tp': 2}", "{'tp': 2}, sequence_parallel=True"])
def test_penalty_on_a_gradient_is_differentiated(ranks: Session, options: str) -> None:
    """Communication in the backward pass is differentiated too."""
    for apart in ranks.run_cell(f"own_loop_ranks.apart_after_loop('penalty', {options})", timeout_s=60).values.values():
        assert apart < 1e-5


LOOPS = ["twice each", "twice from one", "siamese", "accumulated", "attacked", "written into"]


@pytest.mark.parametrize("loop", [*LOOPS, "penalty apart", "penalty alone"])
def test_every_backward_pass_is_of_all_replicas(ranks: Session, loop: str) -> None:
    """Also passes that reach only some of the parameters; DDP would wait for the others."""
    code = f"own_loop_ranks.apart_after_loop({loop!r}, {{'dp_replicate': 2}})"
    for apart in ranks.run_cell(code, timeout_s=60).values.values():
        assert apart < 1e-5


@pytest.mark.parametrize("loop", LOOPS)
def test_every_backward_pass_is_of_all_shards(ranks: Session, loop: str) -> None:
    """No warning is emitted although the model returns a view, on which FSDP2 records what to gather."""
    code = f"own_loop_ranks.apart_after_loop({loop!r}, {{'dp_shard': 2}})"
    for apart in ranks.run_cell(code, timeout_s=60).values.values():
        assert apart < 1e-5


def test_penalty_on_a_gradient_is_refused_in_shards(ranks: Session) -> None:
    with pytest.raises(RankError, match=r"SpecError: create_graph=True asks for gradients of gradients") as told:
        ranks.run_cell("own_loop_ranks.apart_after_loop('penalty', {'dp_shard': 2})", timeout_s=60)
    assert sorted(told.value.errors) == [0, 1]


@pytest.mark.parametrize("is_called", [True, False])
@pytest.mark.parametrize("frozen, axis", [("blocks.0", "dp_replicate"), ("", "dp_replicate"), ("blocks.0", "dp_shard")])
def test_part_that_is_trained_later_has_the_gradients_of_all(
    ranks: Session, frozen: str, axis: str, is_called: bool
) -> None:
    """DDP only handles the parameters that are trainable when it is made."""
    code = f"own_loop_ranks.apart_after_thaw({frozen!r}, {{{axis!r}: 2}}, is_called={is_called})"
    for apart in ranks.run_cell(code, timeout_s=60).values.values():
        assert apart < 1e-5


@pytest.mark.parametrize(
    "axis, is_called, whose",
    [("dp_shard", True, "FSDP2"), ("dp_shard", False, "FSDP2"), ("dp_replicate", False, "DDP")],
)
def test_after_a_pass_that_failed_nothing_goes_on(ranks: Session, axis: str, is_called: bool, whose: str) -> None:
    """The failed pass leaves gradients in flight, which the next pass would use."""
    message = f"SpecError: a backward pass failed or was stopped while {whose}"
    with pytest.raises(RankError, match=message) as told:
        ranks.run_cell(f"own_loop_ranks.apart_after_failed_pass({{{axis!r}: 2}}, is_called={is_called})", timeout_s=60)
    assert sorted(told.value.errors) == [0, 1]


def test_after_a_pass_that_failed_replicas_that_are_called_go_on(ranks: Session) -> None:
    code = "own_loop_ranks.apart_after_failed_pass({'dp_replicate': 2}, is_called=True)"
    for apart in ranks.run_cell(code, timeout_s=60).values.values():
        assert apart < 1e-6


def test_graph_of_a_gradient_is_refused_over_replicas(ranks: Session) -> None:
    """The graph would be that of one replica, but the gradient is the mean of all."""
    with pytest.raises(RankError, match=r"SpecError: backward\(create_graph=True\) was called over replicas") as told:
        ranks.run_cell("own_loop_ranks.apart_after_loop('kept as a graph', {'dp_replicate': 2})", timeout_s=60)
    assert sorted(told.value.errors) == [0, 1]


@pytest.mark.parametrize("is_called", [True, False])
@pytest.mark.parametrize(
    "kind, axis, why",
    [
        ("register_hook", "dp_shard", "never sees its gradient"),
        ("register_post_accumulate_grad_hook", "dp_shard", "never sees its gradient"),
        (
            "register_post_accumulate_grad_hook",
            "dp_replicate",
            "sees its gradient before it is averaged over the replicas",
        ),
    ],
)
def test_hook_on_a_gradient_that_comes_too_late_is_refused(
    ranks: Session, kind: str, axis: str, why: str, is_called: bool
) -> None:
    message = f"SpecError: a hook registered on head.weight after {axis} was applied {why}: change"
    with pytest.raises(RankError, match=message) as told:
        ranks.run_cell(f"own_loop_ranks.call_with_hook({kind!r}, {{{axis!r}: 2}}, is_called={is_called})", timeout_s=60)
    assert sorted(told.value.errors) == [0, 1]


def test_hook_on_a_gradient_as_it_comes_is_taken_over_replicas(ranks: Session) -> None:
    ranks.run_cell("own_loop_ranks.call_with_hook('register_hook', {'dp_replicate': 2}, is_called=True)", timeout_s=60)
