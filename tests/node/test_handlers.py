"""The handler tables of agent, worker and interpreter: each handler takes the message kind that is its key.

mypy cannot check this because all values of a table have one type.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import detrain_nb
from detrain_nb.wire import Message

_NODE = Path(detrain_nb.__file__).parent / "node"
_KINDS = {kind.__name__ for kind in Message.__subclasses__()}
_TABLES = {
    "agent/agent.py": {"_notebook_handlers"},
    "agent/snapshot.py": {"_notebook_handlers", "_rank_handlers"},
    "rank/worker.py": {"_agent_handlers", "_interpreter_handlers"},
    "cell/interpreter.py": {"_handlers", "_control_handlers"},
}


def _tables(tree: ast.Module) -> Iterator[tuple[str, ast.Dict]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation).startswith("dict[type[Message], Callable"):
            assert isinstance(node.target, ast.Attribute)
            assert isinstance(node.value, ast.Dict)
            yield node.target.attr, node.value


@pytest.mark.parametrize("name", _TABLES)
def test_handler_takes_the_message_that_it_stands_under(name: str) -> None:
    tree = ast.parse((_NODE / name).read_text(encoding="utf-8"))
    methods = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    tables = dict(_tables(tree))
    assert tables.keys() == _TABLES[name]
    for table in tables.values():
        for key, value in zip(table.keys, table.values):
            if isinstance(value, ast.Call):  # partial(self._answer, self._pull)
                value = value.args[-1]
            assert isinstance(value, ast.Attribute)
            taken = methods[value.attr].args.args[1].annotation
            assert taken is not None
            kinds = ast.unparse(taken).split(" | ")
            assert ast.unparse(key) in kinds, f"{value.attr} takes {kinds}"  # type: ignore[arg-type]
            assert set(kinds) <= _KINDS
