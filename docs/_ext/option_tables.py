"""Directives for what the code knows best: the options of a magic or a command, the fields of a spec.

```{options} %distributed start
```
```{fields} Training
```
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive

_WIDTH = 88  # of a line that shows how a command is typed


def setup(app: Any) -> dict[str, Any]:
    app.add_directive("options", Options)
    app.add_directive("fields", Fields)
    return {"parallel_read_safe": True, "version": "1"}


class Options(Directive):
    """How a magic, or a command of one, is typed, and a row for each of its options."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        parser = find_parser(self.arguments[0])
        actions = [action for action in parser._actions if "--help" not in action.option_strings]
        formatter = argparse.HelpFormatter(parser.prog, width=_WIDTH)
        formatter.add_usage(parser.usage, actions, parser._mutually_exclusive_groups)
        usage = formatter.format_help().removeprefix("usage: ").rstrip()
        usage = usage.replace("\n       ", "\n")
        block = nodes.literal_block(usage, usage, language="text")
        rows = [
            (_describe_typed(action), formatter._expand_help(action) if action.help else _choices(action))
            for action in actions
            if not isinstance(action, argparse._SubParsersAction) and action.help != argparse.SUPPRESS
        ]
        rows = [(typed, meaning) for typed, meaning in rows if meaning]  # what has none is in the line above
        return [block, *([_make_table(("option", "meaning"), rows)] if rows else [])]


class Fields(Directive):
    """A row for each field of a model of a spec: its name, what it may be, its default."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        from detrain_nb import spec

        model = getattr(spec, self.arguments[0])
        rows = [(name, f"{field.description}{_note_default(field)}") for name, field in model.model_fields.items()]
        return [_make_table(("field", "what to give"), rows)]


def _note_default(field: Any) -> str:
    """Return the default of a field in brackets; empty when it is None or empty, or a table of its own."""
    if field.is_required():
        return " (required)"
    if field.default in ("", (), None) or not isinstance(field.default, bool | int | float | str | tuple):
        return ""
    return f" (default {json.dumps(field.default)})"


def find_parser(words: str) -> argparse.ArgumentParser:
    """Return the parser of ``%magic`` or ``%magic COMMAND``, or of ``detrain-nb COMMAND``."""
    from detrain_nb.magics import job_options, options, pipeline

    prog, _, command = words.partition(" ")
    parsers: dict[str, Any] = {
        "%%distributed": lambda: options.cell_parser("%%distributed"),
        "%%rank": lambda: options.cell_parser("%%rank"),
        "%%torchrun": job_options.torchrun_parser,
        "%distributed": options.session_parser,
        "%pull": options.pull_parser,
        "%push": options.push_parser,
        "%broadcast": options.broadcast_parser,
        "%job": job_options.job_parser,
        "%pipeline": pipeline.pipeline_parser,
    }
    parser: argparse.ArgumentParser = parsers[prog]()
    return list_commands(parser)[command] if command else parser


def list_commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the parsers of the commands of a parser, by their names."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def _describe_typed(action: argparse.Action) -> str:
    value = action.metavar or ("|".join(map(str, action.choices)) if action.choices else action.dest.upper())
    if not action.option_strings:
        return str(value)
    return ", ".join(action.option_strings) + ("" if action.nargs == 0 else f" {value}")


def _choices(action: argparse.Action) -> str:
    return f"one of {', '.join(map(str, action.choices))}" if action.choices else ""


def _make_table(heads: tuple[str, str], rows: Iterable[tuple[str, str]]) -> nodes.table:
    table = nodes.table(classes=["options"])
    group = nodes.tgroup(cols=2)
    table += group
    group += [nodes.colspec(colwidth=width) for width in (30, 70)]
    head, body = nodes.thead(), nodes.tbody()
    group += [head, body]
    head += _make_row(*(nodes.paragraph("", text) for text in heads))
    for typed, meaning in rows:
        first = nodes.paragraph()
        first += nodes.literal(typed, typed)
        body += _make_row(first, nodes.paragraph("", meaning))
    return table


def _make_row(*cells: nodes.paragraph) -> nodes.row:
    row = nodes.row()
    for cell in cells:
        entry = nodes.entry()
        entry += cell
        row += entry
    return row
