"""%%distributed, %%rank, %distributed, %pull, %push, %broadcast: parse the line, call the session, show the result."""

from __future__ import annotations

import ast
import difflib
import keyword
import re
import sys
from collections.abc import Callable
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class

from ..errors import CellSyntaxError, DetrainError, SessionError
from ..session.session import Session
from . import options
from .boards import Boards
from .commands import SessionCommands
from .guard import guard
from .holder import SessionHolder
from .render import LiveCell, RenderOptions
from .screen import screen_for
from .stops import NOTHING_RUNS, told_when_interrupted

_ASKS_FOR_HELP = re.compile(r"%%(distributed|rank|torchrun)\s(.*\s)?(-h|--help)\s*$")


def help_without_body(ipython: Any) -> Callable[[], None]:
    """Let ``%%distributed --help`` work without a body, which IPython demands of a cell magic; returns the undo."""

    def add_body(lines: list[str]) -> list[str]:
        return [*lines, "\n"] if len(lines) == 1 and _ASKS_FOR_HELP.match(lines[0]) else lines

    transforms = ipython.input_transformers_cleanup
    transforms.append(add_body)
    return lambda: transforms.remove(add_body)


@magics_class
class DistributedMagics(Magics):
    """The magics of one notebook; they hold its session."""

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self._ipython = shell
        self.holder = SessionHolder(shell)
        self._boards = Boards(shell, lambda: self.holder.settings.board == "auto")
        self._commands = SessionCommands(shell, self.holder, self._boards)
        self._cell_parsers = {prog: options.cell_parser(prog) for prog in ("%%distributed", "%%rank")}
        self._parsed: dict[tuple[str, str], Any] = {}

    @property
    def session(self) -> Session | None:
        """The session that the notebook holds, if any."""
        return self.holder.session

    @cell_magic
    def distributed(self, line: str, code: str) -> None:
        """Run the cell on every rank of the session; start a session if none is running.

        %%distributed [-n N] [-r RANKS] [--merge all|same|rank0] [--timeout S] [--out NAME] [--quiet] [--max-lines N]
        """
        guard("%%distributed", lambda: self._run_cell("%%distributed", line, code))

    @cell_magic
    def rank(self, line: str, code: str) -> None:
        """Run the cell on some ranks: %%rank RANKS is short for %%distributed -r RANKS."""
        guard("%%rank", lambda: self._run_cell("%%rank", line, code))

    @line_magic("distributed")  # type: ignore[arg-type]
    def distributed_line(self, line: str) -> None:
        """Start, inspect, stop or attach to the session of this notebook.

        %distributed start [--nodes NODES] [-n N] [--force] [--fresh] [--device auto|cpu|cuda] [--backend NAME]
                           [--name NAME] [--no-init] [--env K=V] [--seed N] [--start fork|exec] [--linger S]
                           [--group-timeout S]
        %distributed doctor [--nodes NODES] | put FILE... [--to FOLDER] | get REMOTE... | data check PATH | shrink
        %distributed nodes [FILE] (a form that can start the session)
        %distributed status | where | board | stop [NAME] | restart [-n N | -r RANKS] | list
        %distributed interrupt [-r RANKS | --kill RANKS] | replay -r RANKS [--cells 1-4]
        %distributed log [--cell N | --list] [--rank RANKS] [--follow] | config [KEY=VALUE]
        %distributed attach [NAME] [--steal] [--without NODES] | detach
        """
        guard("%distributed", lambda: self._commands.run(line))

    @line_magic
    def pull(self, line: str) -> None:
        """Copy variables of the ranks into the notebook.

        %pull NAME[,NAME...] [-r RANKS] [--as NEW]

        Several ranks give a dict {rank: value}, one rank (-r 0) gives the value itself.
        """
        guard("%pull", lambda: self._pull(line))

    @line_magic
    def push(self, line: str) -> None:
        """Set variables on the ranks to the notebook's values.

        %push NAME[,NAME...] [-r RANKS]
        """
        guard("%push", lambda: self._push(line))

    @line_magic
    def broadcast(self, line: str) -> None:
        """Copy variables of one rank to others.

        %broadcast NAME[,NAME...] [--from 0] [-r RANKS]
        """
        guard("%broadcast", lambda: self._broadcast(line))

    def _run_cell(self, prog: str, line: str, code: str) -> None:
        args = self._parse_cell_line(prog, line)
        self._check_syntax(code)
        with told_when_interrupted(f"{prog}: the start of its session", NOTHING_RUNS):
            count, force = getattr(args, "count", None), getattr(args, "force", False)
            session = self.holder.for_cell(count, args.ranks, force=force)
        number = session.log.next_cell(at_least=self._execution_count())
        chosen = session.ranks.choose(args.ranks)
        screen = screen_for(self._ipython)
        live = LiveCell(screen, chosen, number, self._render_options(args), nodes=session.ranks.node_names)
        result = None
        try:
            with self._boards.above(session, live):
                result = session.run_cell(
                    code,
                    ranks=args.ranks,
                    timeout_s=args.timeout or self.holder.settings.timeout or None,
                    observer=live,
                    values=bool(args.out),
                    number=number,
                    first_line=2,  # after the magic's own line
                )
        except KeyboardInterrupt as exc:
            if isinstance(exc, DetrainError):
                raise
            left = "the cell has ended on its ranks" if live.has_begun else "no rank has run the cell"
            raise SessionError(f"{prog} was interrupted: {left}") from None
        finally:
            live.finish({r.rank: r.bundle for r in result if r.bundle} if result else {})
        if args.out:
            self._ipython.user_ns[args.out] = result

    def _execution_count(self) -> int:
        """Return the number in the prompt of the running cell; IPython versions count up before or after it runs."""
        return len(self._ipython.user_ns.get("In", ())) - 1

    def _parse_cell_line(self, prog: str, line: str) -> Any:
        """Parse a line, each text once: lines recur from cell to cell, and argparse is slow."""
        key = (prog, line)
        if key not in self._parsed:
            args = self._cell_parsers[prog].parse_line(line)
            if args.out is not None and not _is_variable(args.out):
                raise UsageError(f"{prog}: --out {args.out!r} is not a valid variable name")
            self._parsed[key] = args
        return self._parsed[key]

    def _check_syntax(self, code: str) -> None:
        """Check the cell before anything is sent. Raises: CellSyntaxError; UsageError when it is empty."""
        if not code.strip():
            raise UsageError("%%distributed: the cell is empty: write the code to run below its first line")
        try:
            python = "\n" + self._ipython.transform_cell(code)  # after the magic's own line
            compile(python, "<cell>", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        except SyntaxError as exc:
            raise CellSyntaxError(exc) from None

    def _render_options(self, args: Any) -> RenderOptions:
        max_lines = self.holder.settings.max_lines if args.max_lines is None else args.max_lines
        return RenderOptions(
            merge=args.merge or self.holder.settings.merge,
            is_live=self.holder.settings.output == "live",
            is_quiet=args.quiet,
            max_lines=max_lines,
            max_chars=self.holder.settings.max_chars if max_lines else 0,
        )

    def _pull(self, line: str) -> None:
        args = options.pull_parser().parse_line(line)
        names = [name for name in args.names.split(",") if name]
        if args.new_name is not None and (len(names) != 1 or not _is_variable(args.new_name)):
            raise UsageError("%pull: --as renames a single variable, and the new name must be an identifier")
        session = self.holder.running()
        chosen = session.ranks.choose(args.ranks)
        with told_when_interrupted("%pull", "no variable of the notebook was set"):
            found = session.pull(names, ranks=chosen)
        for name in names:
            by_rank = {rank: found[rank][name] for rank in chosen}
            value = by_rank[chosen[0]] if args.ranks is not None and len(chosen) == 1 else by_rank
            self._ipython.user_ns[args.new_name or name] = value

    def _push(self, line: str) -> None:
        args = options.push_parser().parse_line(line)
        names = [name for name in args.names.split(",") if name]
        here = self._ipython.user_ns
        if missing := [name for name in names if name not in here]:
            hidden = self._ipython.user_ns_hidden  # names that IPython itself defines, such as ``open``
            own = [name for name in here if name[:1] != "_" and here[name] is not hidden.get(name)]
            near = difflib.get_close_matches(missing[0], own, 1)
            hint = f": did you mean {near[0]!r}?" if near else ""
            raise UsageError(f"%push: the notebook has no variable {missing[0]!r}{hint}")
        if not names:
            raise UsageError(f"%push: {args.names!r} names no variable")
        session = self.holder.running()
        chosen = session.ranks.choose(args.ranks)
        with told_when_interrupted("%push", "some ranks may have the new values"):
            session.push({name: here[name] for name in names}, ranks=chosen)
        _say_notices(session)

    def _broadcast(self, line: str) -> None:
        args = options.broadcast_parser().parse_line(line)
        names = [name for name in args.names.split(",") if name]
        session = self.holder.running()
        session.broadcast(names, source=args.source, ranks=args.ranks)
        _say_notices(session)


def _say_notices(session: Session) -> None:
    """Print the notices that have not been printed yet."""
    for words in session.news.pop_notices():
        print(words, file=sys.stderr)


def _is_variable(name: str) -> bool:
    return name.isidentifier() and not keyword.iskeyword(name)
