"""A plan shown as text and as HTML."""

from __future__ import annotations

import re

from detrain_nb.plan import NodeOffer, NodePlan, Plan, plan_one_node, plan_pipeline


def test_plan_as_text_has_a_line_for_each_rank() -> None:
    offers = [NodeOffer("a", (0, 1)), NodeOffer("b", (0, 1))]
    plan = plan_pipeline(offers, axes={"pp": 2, "dp_shard": -1, "tp": 1}, batch_size=16, schedule="Interleaved1F1B")
    assert str(plan).splitlines() == [
        "mesh pp=2 x dp_shard=2: 4 ranks on 2 nodes, cuda, cpu:gloo,cuda:nccl",
        "batch 16 = 2 replicas x 8 microbatches",
        "rank  pp  dp_shard  stages  device  node",
        "   0   0         0  0, 2    cuda:0  a",
        "   1   0         1  0, 2    cuda:1  a",
        "   2   1         0  1, 3    cuda:0  b",
        "   3   1         1  1, 3    cuda:1  b",
    ]


def test_plan_of_one_machine_without_a_mesh() -> None:
    plan = plan_one_node(ranks=2, device="cpu", backend=None, gpus=0)
    assert str(plan).splitlines() == [
        "2 ranks, cpu, gloo",
        "rank  device  node",
        "   0  cpu     this machine",
        "   1  cpu     this machine",
    ]
    assert "this machine" in plan._repr_html_()


def test_ranks_of_a_stage_have_a_colour_and_those_of_a_replica_a_shade() -> None:
    offers = [NodeOffer("a", (), ranks=8)]
    drawn = plan_pipeline(offers, axes={"pp": 2, "dp_shard": 2, "tp": 2})._repr_html_()
    colours = re.findall(r"background-color:rgba\((\S+),([\d.]+)\)", drawn)
    hues, shades = [hue for hue, _ in colours], [shade for _, shade in colours]
    assert hues == [hues[0]] * 4 + [hues[4]] * 4 and hues[0] != hues[4]
    assert shades == [shades[0], shades[0], shades[2], shades[2]] * 2 and shades[0] != shades[2]
    assert "pp\N{NO-BREAK SPACE}1, dp_shard\N{NO-BREAK SPACE}0, tp\N{NO-BREAK SPACE}1" in drawn and "var(--jp-" in drawn


def test_name_of_a_node_stays_text() -> None:
    plan = Plan((NodePlan((0,), "cpu", "<script>'\x1b[2J"),), "gloo")
    assert "<script>" not in plan._repr_html_() and "&lt;script&gt;&#x27;\\x1b" in plan._repr_html_()
    assert "\x1b" not in str(plan) + plan._repr_html_()


def test_large_plan_is_cut() -> None:
    offers = [NodeOffer(f"node{number}", tuple(range(50))) for number in range(20)]
    plan = plan_pipeline(offers, axes={"pp": 4, "dp_shard": -1})
    text, drawn = str(plan), plan._repr_html_()
    assert "... 952 more ranks" in text and text.splitlines()[-1].endswith("node19") and len(text.splitlines()) < 60
    assert "... 34 more ..." in drawn and "... 4 more nodes" in drawn and "<b>999</b>" in drawn
    assert len(drawn) < 100_000
