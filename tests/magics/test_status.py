"""What ``%distributed status`` shows for this machine and for several nodes; the numbers are made up."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from detrain_nb.deploy.chosen_nodes import transports_to
from detrain_nb.plan import NodePlan, Plan
from detrain_nb.session.running.status import NodeStatus, RankStatus, SessionStatus, node_statuses
from detrain_nb.spec.node import Node


def _rank(rank: int, host: str, state: str = "idle", line: int = 0) -> RankStatus:
    return RankStatus(rank, host, 1000 + rank, "cpu", state, 3 if line else 0, line, 12_000_000, 0.5)


def _status(num_nodes: int, on_each: int, *, faults: dict[int, str] | None = None) -> SessionStatus:
    nodes = []
    for number in range(num_nodes):
        ranks = tuple(range(number * on_each, (number + 1) * on_each))
        where = f"alice@gpu{number}.example.org:2222"
        nodes.append(NodeStatus(f"gpu{number}", where, ranks, (faults or {}).get(number, "")))
    rows = [_rank(rank, node.name, "running", 7) for node in nodes for rank in node.ranks]
    return SessionStatus("train", tuple(rows), tuple(nodes), 600.0)


class _Table(HTMLParser):
    """The rows of an HTML table as texts, and the tags still open, of which none may remain."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag == "br":
            return
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


def test_one_machine_is_one_table_with_its_host() -> None:
    status = SessionStatus("here", (_rank(0, "laptop"), _rank(1, "laptop")))
    head, columns, *rows = repr(status).splitlines()
    assert (head, columns.split()[:3]) == ("session here: 2 ranks", ["rank", "host", "pid"])
    assert [row.split()[:3] for row in rows] == [["0", "laptop", "1000"], ["1", "laptop", "1001"]]
    assert status._repr_html_().count("<tr>") == 3


def test_ranks_of_a_node_stand_below_its_name() -> None:
    lines = repr(_status(2, 2)).splitlines()
    assert lines[0] == "session train: 4 ranks on 2 nodes"
    assert lines[1] == "collectives time out after 600 s (--group-timeout)"
    assert lines[2].split() == ["rank", "pid", "device", "state", "line", "memory", "last", "cell"]
    assert [line for line in lines[3:] if not line.startswith(" ")] == [
        "gpu0 (alice@gpu0.example.org:2222): connected; ranks 0-1: running",
        "gpu1 (alice@gpu1.example.org:2222): connected; ranks 2-3: running",
    ]
    assert [line.split()[0] for line in lines[3:]] == ["gpu0", "0", "1", "gpu1", "2", "3"]


def test_html_has_a_group_for_every_node() -> None:
    table = _Table(_status(2, 2)._repr_html_())
    assert not table.open
    assert [row[0] for row in table.rows[1:]] == [
        "gpu0 (alice@gpu0.example.org:2222): connected; ranks 0-1: running", "0", "1",
        "gpu1 (alice@gpu1.example.org:2222): connected; ranks 2-3: running", "2", "3",
    ]  # fmt: skip
    assert "host" not in table.rows[0]


def test_nodes_that_cannot_be_reached_are_said_first_and_marked() -> None:
    status = _status(3, 1, faults={1: "no connection for 12 s, trying again", 2: "lost: its agent is gone"})
    assert "2 of 3 nodes cannot be reached: gpu1, gpu2" in repr(status).splitlines()
    assert "gpu1 (alice@gpu1.example.org:2222): no connection for 12 s, trying again; rank 1: running" in repr(status)
    assert status._repr_html_().count("background:") == 2


def test_node_of_which_no_rank_answers_is_not_called_reached() -> None:
    ranks = (_rank(0, "a"), _rank(1, "b", "no answer"), _rank(2, "b", "no answer"))
    status = SessionStatus("x", ranks, (NodeStatus("a", "a", (0,)), NodeStatus("b", "b", (1, 2))))
    assert "b: no answer from any rank; ranks 1-2: no answer" in repr(status).splitlines()
    assert "1 of 2 nodes cannot be reached: b" in repr(status).splitlines()


def test_states_of_a_node_are_counted() -> None:
    ranks = (_rank(0, "a"), _rank(1, "a", "running", 2), _rank(2, "a"), _rank(3, "b"))
    status = SessionStatus("x", ranks, (NodeStatus("a", "a", (0, 1, 2)), NodeStatus("b", "b", (3,))))
    assert "a: connected; ranks 0-2: 2 idle, 1 running" in repr(status).splitlines()


def test_sixteen_hosts_with_eight_ranks_fit_into_80_columns() -> None:
    text = repr(_status(16, 8, faults={5: "no connection for 1234 s, trying again"}))
    assert max(map(len, text.splitlines())) <= 120
    assert max(len(line) for line in text.splitlines() if line.startswith(" ")) <= 80
    assert len(re.findall(r"^gpu\d+ ", text, re.MULTILINE)) == 16
    assert len(re.findall(r"^  \d+ ", text, re.MULTILINE)) == 128


def test_one_remote_machine_is_grouped_by_nothing_and_its_fault_is_said() -> None:
    ranks = (_rank(0, "gpu1"), _rank(1, "gpu1"))
    node = NodeStatus("gpu1", "alice@gpu1", (0, 1), "no connection for 3 s, trying again")
    assert repr(SessionStatus("x", ranks, (node,))).splitlines()[1] == (
        "gpu1 (alice@gpu1): no connection for 3 s, trying again"
    )
    well = SessionStatus("x", ranks, (NodeStatus("gpu1", "alice@gpu1", (0, 1)),))
    assert repr(well) == repr(SessionStatus("x", ranks))


def test_what_a_node_says_of_itself_is_no_markup_and_no_control_code() -> None:
    nodes = (NodeStatus("a", "a", (0,), "lost: <b>\x1b[2J\n"), NodeStatus("b", "b", (1,)))
    status = SessionStatus("<i>", (_rank(0, "a", "<s>"), _rank(1, "b")), nodes)
    assert not {"<b>", "<i>", "<s>", "\x1b"} & set(re.findall(r"<\w>|\x1b", status._repr_html_()))
    assert "\x1b" not in repr(status)
    assert repr(status).count("\n") == 7 - 1


def test_timeout_of_torch_itself_is_not_said() -> None:
    assert "collectives" not in repr(SessionStatus("x", (_rank(0, "a"),)))
    assert "collectives time out after 90 s (--group-timeout)" in repr(
        SessionStatus("x", (_rank(0, "a"),), group_timeout_s=90.0)
    )


def test_nodes_are_named_as_the_user_wrote_them() -> None:
    nodes = [Node(host="gpu1.example.org", name="left", user="alice", port=2222), Node(host="gpu2"), Node(host="::1")]
    placed = tuple(NodePlan((rank,), "cpu", node.name) for rank, node in enumerate(nodes))
    found = node_statuses(transports_to(nodes), Plan(placed, "gloo"), lost={2: "gone"}, broken_s={1: 11.7})
    assert [(node.title, node.fault) for node in found] == [
        ("left (alice@gpu1.example.org:2222)", ""),
        ("gpu2", "no connection for 12 s, trying again"),
        ("ip6---1 ([::1])", "lost: gone"),
    ]
    shrunk = Plan((placed[0], NodePlan((), "cpu", "gpu2"), placed[2]), "gloo")
    assert [node.name for node in node_statuses(transports_to(nodes), shrunk, lost={}, broken_s={})] == [
        "left",
        "ip6---1",
    ]
    assert node_statuses(transports_to(None), Plan((NodePlan((0,), "cpu"),), "gloo"), lost={}, broken_s={}) == ()
