"""The commands of ``%distributed``, one method each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from IPython.core.error import UsageError
from IPython.display import display

from ..deploy.kept import drop_kept, seconds_kept, shorten_kept
from ..deploy.known import known_sessions
from ..errors import RankError, count_ranks, format_ranks, short_ranks
from ..session.output.safe_output import one_line
from ..session.session import Session
from ..session.state.cell import Cell
from . import options
from .boards import Boards
from .holder import SessionHolder, StartOptions
from .host_commands import HostCommands
from .options import HelpShown
from .render import LiveCell, RenderOptions
from .screen import Screen, screen_for
from .stops import NOTHING_RUNS, told_when_interrupted
from .transcript import Text

_LAST_CELL = 1_000_000  # the highest number in --cells
_EVERYTHING = RenderOptions(max_lines=0, max_chars=0)
_CODE_CHARS = 80  # of a cell's first line in the list
_AS_IT_CAME = replace(_EVERYTHING, merge="all", is_kept=False)


class SessionCommands:
    """The commands of one notebook."""

    def __init__(self, ipython: Any, holder: SessionHolder, boards: Boards) -> None:
        self._ipython = ipython
        self._holder = holder
        self._boards = boards
        self._hosts = HostCommands(ipython, holder)

    def run(self, line: str) -> None:
        """Run the command of a line. Raises: HelpShown, UsageError, and the errors of the command."""
        parser = options.session_parser()
        args = parser.parse_line(line)
        if args.command is None:
            raise HelpShown(parser.format_help())
        owner, name = (self._hosts, args.command) if hasattr(self._hosts, args.command) else (self, f"_{args.command}")
        try:
            with told_when_interrupted(f"%distributed {args.command}"):
                getattr(owner, name)(args)
        finally:
            self._boards.settle_ended()

    def _start(self, args: Any) -> None:
        given = {name: value for name, value in vars(args).items() if name in StartOptions.__dataclass_fields__}
        wanted = StartOptions(**{**given, "env": tuple(args.env)})
        session = self._holder.session
        if session is not None and session.is_alive:
            if different := self._holder.differs(wanted):
                change = f"restart -n {wanted.count}" if different == ["-n"] else "stop first"
                raise UsageError(
                    f"%distributed start: the session with {count_ranks(len(session.ranks))} was started with another "
                    f"{', '.join(different)}; to change that, %distributed {change} (all variables are lost)"
                )
            print(f"session {session.name!r} is already running with {count_ranks(len(session.ranks))}")
            return
        with told_when_interrupted("%distributed start", NOTHING_RUNS):
            print(self._holder.start(wanted))

    def _stop(self, args: Any) -> None:
        with told_when_interrupted("%distributed stop", "the ranks are being stopped in the background"):
            self._holder.end(args.name, cold=args.cold)

    def _restart(self, args: Any) -> None:
        if args.ranks is None:
            left = "the ranks have been stopped, and their variables are lost; %distributed restart starts new ones"
            with told_when_interrupted("%distributed restart", left):
                print(self._holder.restart(args.count, env=args.env, cold=args.cold, force=args.force))
            return
        if args.env or args.cold:
            raise UsageError(
                f"%distributed restart: {'--env' if args.env else '--cold'} applies to all ranks: leave out -r"
            )
        self._replace(args.ranks, "%distributed restart")

    def _replace(self, ranks: str, prog: str) -> None:
        session = self._holder.running()
        chosen = session.ranks.choose(ranks)
        with told_when_interrupted(prog, f"the restart of {format_ranks(chosen)} continues"):
            session.restart(chosen)
        print(_fresh(chosen, session))

    def _shrink(self, args: Any) -> None:
        number = self._holder.running().ranks.shrink()
        moved = ", ".join(f"{old} is now {new}" for old, new in number.items() if old != new)
        left = "one rank is left and keeps its" if len(number) == 1 else f"{len(number)} ranks are left and keep their"
        print(f"{left} variables{f'; rank {moved}' if moved else ''}")

    def _list(self, args: Any) -> None:
        own = self._holder.session.name if self._holder.session else None
        lines = [
            f"{name}  {known}  "
            + ("(this notebook)" if name == own else f"{known.own_end}; %distributed stop {name} stops it")
            for name, known in known_sessions().items()
        ]
        if kept_s := seconds_kept():
            lines.append(f"torch stays imported for this notebook's next start for {kept_s:.0f} s: stop --cold ends it")
        print("\n".join(lines) or "no session is running on this machine, or was started from it")

    def _attach(self, args: Any) -> None:
        with told_when_interrupted("%distributed attach", "the ranks keep running without this notebook"):
            session = self._holder.attach(args.name, nodes=args.nodes, steal=args.steal, without=args.without)
        left = "this notebook holds the session; %distributed log --cell N shows the missed output of a cell"
        with told_when_interrupted("%distributed attach", left):
            self._show_all_missed(session)

    def _show_all_missed(self, session: Session) -> None:
        self._say(f"{session}\n")
        running = session.log.running_cells
        for number in sorted({*session.log.missed, *running}):
            self._show_missed(session, number)
        if news := session.news.pop_losses():
            self._say(f"{news}\n", "stderr")
        session.log.confirm_missed()
        for number, ranks in session.log.running_cells.items():
            self._say(f"cell {number} is still running on {format_ranks(ranks)}; its output appears here\n")
        if session.failure:
            raise session.failure

    def _show_missed(self, session: Session, number: int) -> None:
        """Show all that is known of a cell, in order of arrival; later output of a running cell follows below it."""
        screen = screen_for(self._ipython)
        is_there = number in session.log.printed or number in session.log.running_cells
        screen.show(Text("stdout", f"cell {number}:\n" if is_there else f"cell {number} has ended\n"))
        plan = session.ranks.plan_of(number)
        live = LiveCell(screen, session.ranks.choose(None, plan=plan), number, _AS_IT_CAME, nodes=plan.node_names)
        shown: set[int] = set()  # the ranks whose errors have been shown

        def show_end(run: Cell) -> None:
            live.end(run.bundles())
            _show_errors(run, screen, world_size=plan.world_size, except_of=shown)
            if has_left:
                screen.show(Text("stdout", f"cell {number} has ended\n"))

        has_left = False
        run = session.log.follow(number, live, on_end=show_end)
        if run.is_cut_off:
            show_end(run)
        else:
            _show_errors(run, screen, world_size=plan.world_size, except_of=shown)
        live.leave()
        has_left = True

    def _say(self, text: str, stream: str = "stdout") -> None:
        """Show a text in order with the output of screens, which a print would not keep."""
        screen = screen_for(self._ipython)
        screen.show(Text(stream, text))
        screen.close()

    def _detach(self, args: Any) -> None:
        session = self._holder.running()
        self._holder.detach()
        print(f"detached: the ranks keep running; %distributed attach {session.name} reconnects to them")

    def _status(self, args: Any) -> None:
        display(self._holder.running().status())

    def _board(self, args: Any) -> None:
        self._boards.show(self._holder.running())

    def _vars(self, args: Any) -> None:
        session = self._holder.running()
        names = [name for words in args.names for name in words.split(",") if name]
        if getattr(self._ipython, "kernel", None) is None:
            display(session.variables(names, ranks=args.ranks))
            return
        from ..widgets import vars  # anywidget is slow to import

        display(vars(session, names, ranks=args.ranks))

    def _where(self, args: Any) -> None:
        display(self._holder.running().ranks.where())

    def _interrupt(self, args: Any) -> None:
        session = self._holder.running()
        if args.kill is not None:
            self._replace(args.kill, "%distributed interrupt")
        elif args.ranks is not None:
            session.ranks.interrupt(args.ranks)
        else:
            stories = [f"cell {number}: {story}" for number, story in session.stop_cells().items()]
            print("\n".join(stories) or "no cell is running")

    def _replay(self, args: Any) -> None:
        session = self._holder.running()
        everyone = tuple(range(len(session.ranks)))

        screen = screen_for(self._ipython)
        drawn = replace(_AS_IT_CAME, redraws=self._holder.settings.output == "live")
        shown: list[LiveCell] = []

        def observer(number: int) -> LiveCell:
            for before in shown[-1:]:
                before.end({})
            shown.append(LiveCell(screen, everyone, number, drawn, nodes=session.ranks.node_names))
            return shown[-1]

        cells = None if args.cells is None else _parse_cells(args.cells)
        try:
            replayed = session.log.replay(args.ranks, cells=cells, observer=observer)
        finally:
            for last in shown[-1:]:
                last.end({})
            screen.close()
        self._say(session.log.describe_replay(replayed, are_chosen=cells is not None) + "\n")
        for cell, error in replayed.items():
            if error is not None:
                self._say(f"cell {cell}: {error}\n", "stderr")

    def _config(self, args: Any) -> None:
        holder = self._holder
        if args.assignment is None:
            print(holder.settings)
            return
        holder.settings = holder.settings.changed(args.assignment)
        if holder.session is not None and (words := holder.apply_settings(holder.session)):
            print(words)
        if holder.settings.warm:
            shorten_kept(holder.settings.warm)
        else:
            drop_kept()

    def _log(self, args: Any) -> None:
        session = self._holder.running()
        if args.list:
            self._say(_cells(session))
            return
        cells = sorted({*session.log.printed, *(session.log.running_cells if args.follow else ())})
        wanted = _wanted_cell(args.cell, cells, session)
        if wanted in session.log.lacking and wanted not in cells:
            raise UsageError(f"%distributed log: the log has nothing of cell {wanted}: {session.log.lacking[wanted]}")
        if wanted not in cells and wanted in session.log.cells_before:
            raise UsageError(
                f"%distributed log: output of cell {wanted}, if any, was shown before this notebook attached"
            )
        if wanted not in cells:
            which = f"cell {wanted}, the last one," if args.cell is None else f"cell {args.cell}"
            known = ", ".join(map(str, cells)) or "none so far"
            raise UsageError(f"%distributed log: {which} printed nothing; cells that did: {known} (--list shows all)")
        plan = session.ranks.plan_of(wanted)
        everyone, chosen = range(plan.world_size), session.ranks.choose(args.ranks, plan=plan)
        screen = screen_for(self._ipython)
        drawn = replace(_EVERYTHING, merge=self._holder.settings.merge, is_live=args.follow)
        live = LiveCell(screen, chosen, wanted, drawn, nodes=plan.node_names)
        try:
            if args.follow:
                run = self._follow(session, wanted, live)
            else:
                run = session.log.show_again(wanted, live, ranks=chosen)
        except KeyboardInterrupt:
            session.log.unfollow(wanted, live)
            live.finish({})
            self._say(
                f"no longer following cell {wanted}, which keeps running: %distributed interrupt stops it\n", "stderr"
            )
            return
        live.finish({rank: bundle for rank, bundle in run.bundles().items() if rank in chosen})
        _show_errors(run, screen, world_size=plan.world_size, except_of=set(everyone) - set(chosen))
        notes = []
        if plan.world_size > len(session.ranks):
            notes.append(f"cell {wanted} ran before the session shrank; its output has the rank numbers of that time")
        if why := session.log.lacking.get(wanted):
            notes.append(f"later output of cell {wanted} is not in the log: {why}")
        if wanted in session.log.cells_before:
            notes.append(f"output of cell {wanted} from before this notebook attached is not in the log")
        for words in notes:
            screen.show(Text("stderr", f"{words}\n"))
        screen.close()

    def _follow(self, session: Session, number: int, live: LiveCell) -> Cell:
        run = session.log.follow(number, live)
        while run.running and not run.is_cut_off:
            run.wait(0.5)
        return run


def _show_errors(run: Cell, screen: Screen, *, world_size: int, except_of: set[int]) -> None:
    """Show the errors of a cell, except those of the ranks in ``except_of``; adds the shown ranks to that set."""
    errors = {rank: error for rank, error in run.errors().items() if rank not in except_of}
    if errors:
        except_of.update(errors)
        lines = RankError(errors, world_size=world_size)._render_traceback_()
        screen.show(Text("stderr", "\n".join(lines) + "\n"))


def _fresh(ranks: Sequence[int], session: Session) -> str:
    """Return what to print about ranks that the user had replaced."""
    short = short_ranks(ranks)
    others = ", the others kept their variables" if len(ranks) < len(session.ranks) else ""
    words = (
        f"{format_ranks(ranks)} restarted{others}:\n  %distributed replay -r {short}  runs earlier cells there again"
    )
    has_source = others and 0 not in ranks
    return f"{words}\n  %broadcast NAME -r {short}  copies variables from rank 0" if has_source else words


def _wanted_cell(asked: int | None, printed: Sequence[int], session: Session) -> int:
    """Return the number of the cell to show: the last that ran, ``asked``, or counted back from the last output."""
    if asked is None:
        known = [ran.cell for ran in session.log.cells] or printed
        return known[-1] if known else 0
    if asked >= 0:
        return asked
    return printed[asked] if -asked <= len(printed) else 0


def _cells(session: Session) -> str:
    """Return a line per cell that ran: number, ranks, first line of code, and the state of its output."""
    printed, running, lacking = session.log.printed, session.log.running_cells, session.log.lacking
    lines = []
    for ran in session.log.cells:
        first = next((line.strip() for line in ran.code.splitlines() if line.strip()), "")
        on = "" if len(ran.ranks) == len(session.ranks) else f"[{short_ranks(ran.ranks)}] "
        kept = f" (output is incomplete: {lacking[ran.cell]})" if ran.cell in lacking else ""
        is_before = ran.cell in session.log.cells_before
        nothing = " (ran before the attach: output not kept)" if is_before else " (printed nothing)"
        state = " (running)" if ran.cell in running else kept or ("" if ran.cell in printed else nothing)
        lines.append(f"cell {ran.cell}: {on}{one_line(first[:_CODE_CHARS])}{state}\n")
    return "".join(lines) or "no cell has run\n"


def _parse_cells(text: str) -> list[int]:
    """Return the cell numbers of a text such as ``1-4,7``. Raises: UsageError."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise UsageError(f"%distributed replay: {part!r} is not a range of cells: give numbers such as 1-4,7")
        if dash and int(last) < int(first):
            raise UsageError(f"%distributed replay: {part!r} runs backwards: give {last}-{first}")
        if int(last or first) > _LAST_CELL:
            raise UsageError(f"%distributed replay: there is no cell {last or first}")
        found += range(int(first), int(last or first) + 1)
    return found
