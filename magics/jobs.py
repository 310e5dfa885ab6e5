"""%job, %%torchrun: parse the line, call detrain_nb.jobs, show the result."""

from __future__ import annotations

import ast
import contextlib
import keyword
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class
from IPython.display import display

from ..errors import CellSyntaxError, DetrainError, JobError, SpecError
from ..jobs.job_status import describe_state
from ..plan.names import MOST_NAME_CHARS
from ..text import CopyProgress
from .given_spec import file_of, read_spec, show_findings
from .guard import PROG, guard
from .holder import ask_passphrase
from .job_cell import JobCell
from .job_options import parse_job_line, parse_torchrun_line
from .notebook import RunCells, kernel_name, session_name
from .options import HelpShown, Settings
from .progress import redrawn_line
from .render import RenderOptions
from .screen import screen_for
from .stops import told_when_interrupted

if TYPE_CHECKING:
    from ..jobs import Job, JobList, JobStatus
    from ..jobs.job_report import JobReport
    from ..spec import PipelineSpec

__all__ = ["JobMagics"]


@magics_class
class JobMagics(Magics):
    """The job magics of one notebook, which need no session; ``settings`` returns the notebook's settings."""

    def __init__(self, shell: Any, settings: Callable[[], Settings], run_cells: RunCells) -> None:
        super().__init__(shell)
        self._ipython = shell
        self._settings = settings
        self._run_cells = run_cells

    @line_magic
    def job(self, line: str) -> Any:
        """Submit and manage jobs: scripts that run to completion on all nodes, even without this notebook.

        A spec defines what runs where (docs/jobs.md): a file, its URL, or a variable. A %%torchrun cell needs none.

            %job submit train.toml                        start the job and return it; --follow shows its output
            %job submit train.toml --training.epochs 2    the same with another value of a field
            %job check train.toml --on-nodes              find faults of the spec; nothing is started
            %job submit train.toml --dry-run              show what would run where, and the files to copy

        JOB is an id, the beginning of an id, or a name, which means the newest job of that name.

            %job list                                     the newest jobs and their states
            %job show train                               one job: its nodes, its plan, its last metrics
            %job view train                               the same live: progress, curves, logs; stop, restart, download
            %job attach train                             follow its output to the end; the stop button leaves it
            %job logs train --tail 20                     its output so far; also -f, --rank 3, --node gpu1
            %job exec train -- nvidia-smi                 run a shell command on all its nodes
            %job fetch train *.pt --to models             copy files that it has made to this machine
            %job stop train                               stop it; %job restart train submits its spec again
            %job rm train                                 remove it once it has finished; or all, --older-than 30

        %job COMMAND --help shows all options. `list` returns the jobs, `stop` a state, `show` its report.
        """
        return guard("%job", lambda: self._run(line))

    @cell_magic
    def torchrun(self, line: str, code: str) -> Any:
        """Run the cell as a script under torchrun on all nodes, detached, and return the job.

            %%torchrun -n 2                              two ranks on this machine
            %%torchrun --nodes gpu1,gpu2 --follow        on hosts; the output is shown here, to the end
            %%torchrun --spec train.toml -- --lr 0.1     the spec without its script; --lr 0.1 is for the cell
            %%torchrun --name demo --out job             the job is in the variable job, and %job knows it as demo

        The script is plain Python in its own processes, without the notebook's variables and IPython's magics.
        --SECTION.FIELD VALUE sets a field of the spec: --training.epochs 2. %%torchrun --help shows all options.
        """
        return guard("%%torchrun", lambda: self._torchrun(line, code))

    def _run(self, line: str) -> Any:
        """Run the command of a line. Raises: HelpShown, UsageError, and the errors of the command."""
        parser, args = parse_job_line(line)
        if args.command is None:
            raise HelpShown(parser.format_help())
        with told_when_interrupted(f"%job {args.command}"):
            return getattr(self, f"_{args.command}")(args)

    # ---- start

    def _submit(self, args: Any) -> Job | None:
        from ..jobs import submit

        spec = self._read_spec(args)
        if args.dry_run:
            display(submit(spec, dry_run=True, notices=self._notices(spec)))
            return None
        return self._submit_spec("%job submit", spec, args, file=file_of(args.spec))

    def _torchrun(self, line: str, code: str) -> Job | None:
        args = parse_torchrun_line(line)
        if args.out is not None and not (args.out.isidentifier() and not keyword.iskeyword(args.out)):
            raise UsageError(f"%%torchrun: --out {args.out!r} is not a valid variable name")
        _check_script(code)
        source: dict[str, Any] = {"script_text": f"\n{code}", "arguments": args.arguments}  # the cell's line numbers
        if args.spec is None:
            name = session_name(self._ipython.user_ns, kernel_name(self._ipython))
            data: dict[str, Any] = {"name": name[:MOST_NAME_CHARS]}
        else:
            data = read_spec(self._ipython, args.spec).to_dict()
            before = data.get("source", {})
            source |= {key: before[key] for key in ("setup", "argument_style") if key in before}
        spec = _from_dict({**data, "source": source})
        spec = spec.with_overrides(spec.parse_overrides(_fields(args)))
        if args.count is not None:
            spec = spec.with_ranks(args.count)
        return self._submit_spec("%%torchrun", spec, args)

    def _submit_spec(self, prog: str, spec: PipelineSpec, args: Any, *, file: str | None = None) -> Job | None:
        """Submit a spec; returns the job for display: None if the cell follows or views it, or ``--out`` names it."""
        from ..jobs import submit

        with told_when_interrupted(prog, "%job list shows whether it is running"), self._line() as say:
            job = submit(
                spec,
                file=file,
                storage=args.storage,
                on_progress=say,
                ask_passphrase=ask_passphrase,
                notices=self._notices(spec),
            )
        return self._begun(prog, job, args)

    def _notices(self, spec: PipelineSpec) -> list[str]:
        path = spec.source.notebook
        if path is None or not self._run_cells.are_newer_than(path):
            return []
        return [f"{path} has unsaved changes, and the job runs the saved version: save it and submit again"]

    def _restart(self, args: Any) -> Job | None:
        job = self._find(args.job)
        with told_when_interrupted("%job restart", "%job list shows whether it is running"), self._line() as say:
            again = job.restart(on_progress=say)
        return self._begun("%job restart", again, args)

    def _begun(self, prog: str, job: Job, args: Any) -> Job | None:
        if out := getattr(args, "out", None):
            self._ipython.user_ns[out] = job
        notes = [f"note: {notice}" for notice in job.notices]
        if args.view and not args.follow:
            for note in notes:
                print(note)
            display(_live_view(job))
            return None
        if args.follow:
            titles = [
                *notes,
                f"job {job.id} is running: %job stop {job.id} stops it, an interrupt of this cell does not",
            ]
            self._follow(prog, job, max_lines=args.max_lines, titles=titles)
            return None
        for note in notes:
            print(note)
        print(f"job {job.id} is running: %job logs -f {job.id} follows it")
        return None if out else job

    # ---- state

    def _list(self, args: Any) -> JobList:
        from ..jobs import jobs

        return jobs(limit=args.limit, ask_passphrase=ask_passphrase)

    def _view(self, args: Any) -> Any:
        return _live_view(self._find(args.job))

    def _show(self, args: Any) -> JobReport:
        return self._find(args.job).show()

    def _check(self, args: Any) -> None:
        from ..jobs import check_here, check_nodes

        spec = self._read_spec(args)
        if args.on_nodes:
            findings = check_nodes(spec, storage=args.storage, ask_passphrase=ask_passphrase, on_progress=print)
        else:
            findings = check_here(spec)
        show_findings(findings, args.spec)
        with contextlib.suppress(SpecError):  # it fits only on nodes with GPUs, as a warning says
            display(spec.plan())

    def _stop(self, args: Any) -> JobStatus:
        return self._find(args.job).stop(grace_s=args.grace)

    # ---- output

    def _attach(self, args: Any) -> None:
        self._follow("%job attach", self._find(args.job), max_lines=args.max_lines)

    def _logs(self, args: Any) -> None:
        job = self._find(args.job)
        which = {"node": args.node, "rank": args.rank, "torchrun": args.torchrun, "tail": args.tail}
        if args.follow:
            self._follow("%job logs", job, max_lines=args.max_lines, **which, fails=False)
            return
        view = self._lines_of(job, args.max_lines, node=args.node, rank=args.rank, is_live=False)
        job.logs(**which, on_line=view.take, on_piece=view.take_piece)
        view.finish()

    def _follow(
        self,
        prog: str,
        job: Job,
        *,
        max_lines: int | None,
        node: str | None = None,
        rank: int | None = None,
        torchrun: bool = False,
        tail: int | None = None,
        titles: Sequence[str] = (),
        fails: bool = True,
    ) -> None:
        """Follow a job to its end. Raises: JobFailed for a failure, if ``fails``; SessionError on interrupt."""
        view = self._lines_of(job, max_lines, node=node, rank=rank)
        for title in titles:
            view.say(title)
        status: JobStatus | None = None
        goes_on = f"job {job.id} keeps running: %job attach {job.id} follows it again, %job stop {job.id} stops it"
        with told_when_interrupted(prog, goes_on):
            try:
                status = job.attach(
                    view.take,
                    node=node,
                    rank=rank,
                    torchrun=torchrun,
                    tail=tail,
                    on_metrics=view.take_metrics,
                    on_reports=view.take_reports,
                    on_piece=view.take_piece,
                )
            finally:
                view.finish(status)
        if fails:
            if not status.is_over:
                raise JobError(str(status))
            status.check()
        print(f"job {job.id}: {describe_state(status.state, status.exit_code)}")

    def _lines_of(
        self, job: Job, max_lines: int | None, *, node: str | None, rank: int | None, is_live: bool = True
    ) -> JobCell:
        settings = self._settings()
        most = settings.max_lines if max_lines is None else max_lines
        options = RenderOptions(
            merge=settings.merge,
            is_live=is_live and settings.output == "live",
            max_lines=most,
            max_chars=settings.max_chars if most else 0,
        )
        return JobCell(screen_for(self._ipython), job, options, node=node, rank=rank)

    # ---- results, and removal

    def _fetch(self, args: Any) -> None:
        job = self._find(args.job)
        again = "run the same line again to copy what is missing"
        with told_when_interrupted("%job fetch", again), self._line() as draw:
            bar = CopyProgress("fetch", draw)
            fetched = job.fetch(
                args.patterns or None, args.to, anyway=args.anyway, replace=args.replace, on_progress=bar
            )
        print(fetched)

    def _exec(self, args: Any) -> None:
        from ..deploy.chosen_nodes import transports_to
        from ..jobs import execute

        if (args.job is None) == (args.nodes is None):
            raise UsageError("%job exec: give either a job or --nodes: %job exec JOB -- COMMAND")
        if not args.shell_line:
            raise UsageError("%job exec: no command was given: write it after --, as in %job exec JOB -- nvidia-smi")
        with told_when_interrupted("%job exec", "the command was stopped on all nodes"):
            if args.job is not None:
                job = self._find(args.job)
                executed = job.execute(args.shell_line, timeout_s=args.timeout, on_line=print)
            else:
                nodes = transports_to(args.nodes, ask_passphrase=ask_passphrase)
                executed = execute(nodes, args.shell_line, timeout_s=args.timeout, on_line=print)
        failed = [
            str(each) if isinstance(each, DetrainError) else f"{node}: exit {each}"
            for node, each in executed.statuses.items()
            if each != 0
        ]
        if failed:
            raise JobError("\n".join(failed))

    def _rm(self, args: Any) -> None:
        from ..jobs import prune

        if not args.jobs and args.older_than is None:
            raise UsageError("%job rm: give jobs, or --older-than DAYS")
        for job in [self._find(wanted) for wanted in args.jobs]:  # an unknown job is an error before any is removed
            job.remove(anyway=args.anyway)
            print(f"removed {job.id}")
        kept: list[str] = []

        def tell(job: str, failure: DetrainError | None) -> None:
            if isinstance(failure, JobError):
                failure.prog = PROG
            if failure is None:
                print(f"removed {job}")
            else:
                kept.append(f"kept {job}: {failure}")

        if args.older_than is not None:
            prune(args.older_than, anyway=args.anyway, on_job=tell, ask_passphrase=ask_passphrase)
        if kept:
            raise JobError("\n".join(kept))

    # ---- shared

    def _read_spec(self, args: Any) -> PipelineSpec:
        return read_spec(self._ipython, args.spec, _fields(args))

    def _find(self, wanted: str | None) -> Job:
        """Find a job; without a name the last one submitted, whose id is printed."""
        from ..jobs import find_job

        job = find_job(wanted, ask_passphrase=ask_passphrase)
        if wanted is None:
            print(f"job {job.id} was submitted last")
        return job

    def _line(self) -> Any:
        return redrawn_line(self._ipython, is_live=self._settings().output == "live", is_alone=True)


def _live_view(job: Job) -> Any:
    """Return the widget of a job, whose libraries are imported when one is shown."""
    from ..widgets import job as view_of

    return view_of(job)


def _from_dict(data: dict[str, Any]) -> PipelineSpec:
    from ..spec import PipelineSpec

    return PipelineSpec.from_dict(data)


def _fields(args: Any) -> list[str]:
    """Return the fields that the line sets, including name and nodes, as words."""
    named = [f"--{name}={text}" for name in ("name", "nodes") if (text := getattr(args, name)) is not None]
    return [*args.fields, *named]


def _check_script(code: str) -> None:
    """Check the script before anything is sent. Raises: CellSyntaxError; UsageError when it is empty."""
    if not code.strip():
        raise UsageError("%%torchrun: the cell is empty: write the script below its first line")
    try:
        compile(f"\n{code}", "<cell>", "exec", ast.PyCF_ONLY_AST)
    except SyntaxError as exc:
        raise CellSyntaxError(exc) from None
