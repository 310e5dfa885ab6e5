"""%%distributed, %%rank, %distributed, %pull and %push: parse the line, call the session, show the result."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class, no_var_expand
from IPython.display import display

from ..errors import CellSyntaxError, DetrainError, RankError, SessionError, SpecError
from ..plan import parse_ranks
from ..session.session import Session
from ..transport.local import running_sessions
from . import options
from .notebook import session_name
from .options import HelpShown, Settings
from .render import LiveCell, RenderOptions
from .screen import screen_for
from .transcript import Text


@dataclass(frozen=True)
class StartOptions:
    """What ``%distributed start`` was asked, kept for ``restart``."""

    count: int | None = None
    device: str = "auto"
    backend: str | None = None
    name: str | None = None
    no_init: bool = False
    env: tuple[tuple[str, str], ...] = ()
    seed: int = 0
    start: str = "fork"


@magics_class
class DistributedMagics(Magics):
    """The magics of one notebook; they hold its session."""

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self._ipython = shell
        self.session: Session | None = None
        self.settings = Settings.from_env()
        self._started_with = StartOptions()
        self._cell_parsers = {prog: options.cell_parser(prog) for prog in ("%%distributed", "%%rank")}
        self._parsed: dict[tuple[str, str], Any] = {}

    def end_session(self) -> None:
        """End the session, where one runs."""
        session, self.session = self.session, None
        if session is not None:
            session.stop()

    # ---- the magics

    @no_var_expand
    @cell_magic
    def distributed(self, line: str, cell: str) -> None:
        """Run the cell on every rank of the session, and start one where none runs.

        %%distributed [-n N] [-r RANKS] [--merge all|same|rank0] [--timeout S] [--out NAME] [--quiet] [--max-lines N]
        """
        self._guard(lambda: self._run_cell("%%distributed", line, cell))

    @no_var_expand
    @cell_magic
    def rank(self, line: str, cell: str) -> None:
        """Run the cell on some ranks: %%rank RANKS is short for %%distributed -r RANKS."""
        self._guard(lambda: self._run_cell("%%rank", line, cell))

    @no_var_expand
    @line_magic("distributed")  # type: ignore[arg-type]
    def distributed_line(self, line: str) -> None:
        """The session of this notebook.

        %distributed start [-n N] [--device auto|cpu|cuda] [--backend NAME] [--name NAME] [--no-init] [--env K=V]
                           [--seed N] [--start fork|exec]
        %distributed status | stop | restart [-n N] | list | config [KEY=VALUE] | log [--rank RANKS] [--cell N]
        """
        self._guard(lambda: self._run_command(line))

    @no_var_expand
    @line_magic
    def pull(self, line: str) -> None:
        """Bring variables of the ranks into the notebook: %pull NAME[,NAME...] [-r RANKS] [--as NEW]

        From several ranks comes a dict {rank: value}, from one rank (-r 0) the value itself.
        """
        self._guard(lambda: self._pull(line))

    @no_var_expand
    @line_magic
    def push(self, line: str) -> None:
        """Set variables on the ranks to the notebook's values: %push NAME[,NAME...] [-r RANKS]"""
        self._guard(lambda: self._push(line))

    # ---- cells

    def _run_cell(self, prog: str, line: str, cell: str) -> None:
        args = self._parse_cell_line(prog, line)
        self._check_syntax(cell)
        session = self._session_for(getattr(args, "count", None))
        number = session.next_cell(at_least=self._execution_count())
        chosen = parse_ranks(args.ranks, world_size=session.world_size)
        live = LiveCell(screen_for(self._ipython), chosen, number, self._render_options(args))
        result = None
        try:
            result = session.run_cell(
                cell,
                ranks=args.ranks,
                timeout_s=args.timeout or self.settings.timeout or None,
                observer=live,
                values=bool(args.out),
                number=number,
                first_line=2,  # below the magic's own
            )
        finally:
            live.finish({r.rank: r.bundle for r in result if r.bundle} if result else {})
        if args.out:
            self._ipython.user_ns[args.out] = result

    def _execution_count(self) -> int:
        """The number in the prompt of the cell that runs now; IPython counts on before or after, by version."""
        return len(self._ipython.user_ns.get("In", ())) - 1

    def _parse_cell_line(self, prog: str, line: str) -> Any:
        """Lines recur from cell to cell, and argparse takes its time."""
        key = (prog, line)
        if key not in self._parsed:
            args = self._cell_parsers[prog].parse_line(line)
            if args.out and not args.out.isidentifier():
                raise UsageError(f"{prog}: --out {args.out!r} is no name of a variable")
            self._parsed[key] = args
        return self._parsed[key]

    def _check_syntax(self, cell: str) -> None:
        """Raises: CellSyntaxError, before anything is sent."""
        if not cell.strip():
            raise UsageError("%%distributed: the cell is empty: write the code to run below its first line")
        try:
            code = "\n" + self._ipython.transform_cell(cell)  # below the magic's own line
            compile(code, "<cell>", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        except SyntaxError as exc:
            raise CellSyntaxError(exc) from None

    def _session_for(self, count: int | None) -> Session:
        if self.session is None or not self.session.is_alive:
            if self.session is not None:
                raise SessionError(f"session {self.session.name!r} has ended: start another with %distributed restart")
            self._start(StartOptions(count=count))
        assert self.session is not None
        if count not in (None, self.session.world_size):
            raise UsageError(
                f"%%distributed: {self.session.world_size} ranks run; "
                f"to have {count}, %distributed restart -n {count} (their variables are lost)"
            )
        return self.session

    def _render_options(self, args: Any) -> RenderOptions:
        max_lines = self.settings.max_lines if args.max_lines is None else args.max_lines
        return RenderOptions(
            merge=args.merge or self.settings.merge,
            is_live=self.settings.output == "live",
            is_quiet=args.quiet,
            max_lines=max_lines,
            max_chars=self.settings.max_chars if max_lines else 0,
        )

    # ---- %distributed

    def _run_command(self, line: str) -> None:
        parser = options.session_parser()
        args = parser.parse_line(line)
        if args.command is None:
            raise HelpShown(parser.format_help())
        getattr(self, f"_command_{args.command}")(args)

    def _command_start(self, args: Any) -> None:
        if self.session is not None and self.session.is_alive:
            raise UsageError(
                f"%distributed start: {self.session.world_size} ranks run already; "
                "to start them anew, %distributed restart (their variables are lost)"
            )
        wanted = {name: getattr(args, name) for name in StartOptions.__dataclass_fields__}
        self._start(StartOptions(**{**wanted, "env": tuple(args.env)}))
        print(self.session)

    def _command_status(self, args: Any) -> None:
        display(self._running().status())

    def _command_stop(self, args: Any) -> None:
        self.end_session()

    def _command_restart(self, args: Any) -> None:
        self.end_session()
        started_with = self._started_with
        if args.count is not None:
            started_with = StartOptions(**{**vars(started_with), "count": args.count})
        self._start(started_with)
        print(self.session)

    def _command_list(self, args: Any) -> None:
        names = running_sessions()
        own = self.session.name if self.session else None
        lines = [f"{name}  agent pid {pid}{'  (this notebook)' if name == own else ''}" for name, pid in names.items()]
        print("\n".join(lines) or "no session runs on this machine")

    def _command_config(self, args: Any) -> None:
        if args.assignment is None:
            print(self.settings)
        else:
            self.settings = self.settings.changed(args.assignment)

    def _command_log(self, args: Any) -> None:
        session = self._running()
        cells = session.log.cells()
        wanted = args.cell if args.cell >= 0 else (cells[args.cell] if -args.cell <= len(cells) else 0)
        if wanted not in cells:
            known = ", ".join(map(str, cells)) or "none so far"
            raise UsageError(f"%distributed log: cell {args.cell} printed nothing; cells that did: {known}")
        chosen = parse_ranks(args.ranks, world_size=session.world_size)
        screen = screen_for(self._ipython)
        everything = RenderOptions(merge=self.settings.merge, is_live=False, max_lines=0, max_chars=0)
        live = LiveCell(screen, chosen, wanted, everything)
        run = session.show_again(wanted, live, ranks=chosen)
        live.finish(run.bundles())
        if errors := run.errors():
            lines = RankError(errors, world_size=len(chosen))._render_traceback_()
            screen.show(Text("stderr", "\n".join(lines) + "\n"))
            screen.close()

    def _start(self, wanted: StartOptions) -> None:
        name = wanted.name or session_name(self._ipython.user_ns)
        self.session = Session.start(
            wanted.count,
            device=wanted.device,
            backend=wanted.backend,
            name=name,
            init=not wanted.no_init,
            env=dict(wanted.env),
            seed=wanted.seed,
            start=wanted.start,
        )
        self._started_with = wanted

    def _running(self) -> Session:
        if self.session is None:
            raise UsageError("no session runs: start one with %%distributed or %distributed start")
        return self.session

    # ---- values

    def _pull(self, line: str) -> None:
        args = options.pull_parser().parse_line(line)
        names = [name for name in args.names.split(",") if name]
        if args.new_name and (len(names) != 1 or not args.new_name.isidentifier()):
            raise UsageError("%pull: --as gives one variable another name, and a name is an identifier")
        session = self._running()
        chosen = parse_ranks(args.ranks, world_size=session.world_size)
        found = session.pull(names, ranks=chosen)
        for name in names:
            by_rank = {rank: found[rank][name] for rank in chosen}
            value = by_rank[chosen[0]] if args.ranks is not None and len(chosen) == 1 else by_rank
            self._ipython.user_ns[args.new_name or name] = value

    def _push(self, line: str) -> None:
        args = options.push_parser().parse_line(line)
        names = [name for name in args.names.split(",") if name]
        missing = [name for name in names if name not in self._ipython.user_ns]
        if missing:
            raise UsageError(f"%push: there is no variable {missing[0]!r} in the notebook")
        self._running().push({name: self._ipython.user_ns[name] for name in names}, ranks=args.ranks)

    def _guard(self, act: Callable[[], None]) -> None:
        """Help is printed; a wrong line is one line; what the ranks raised fails the cell."""
        try:
            act()
        except HelpShown as shown:
            print(shown)
        except CellSyntaxError as exc:
            raise exc.with_traceback(None) from None
        except SpecError as exc:
            raise UsageError(str(exc)) from None
        except DetrainError as exc:
            raise exc.with_traceback(None) from None
