"""IPython as it runs cells on a rank: output, values and errors of a cell go to callbacks, nothing is kept.

No history, no cache of outputs: a tensor that a cell showed is freed when the next one has run.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import json
import os
import subprocess
import sys
import types
import warnings
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from IPython.core.async_helpers import get_asyncio_loop
from IPython.core.compilerop import CachingCompiler
from IPython.core.completer import provisionalcompleter, rectify_completions
from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.interactiveshell import ExecutionResult, InteractiveShell
from traitlets import Type, default
from traitlets.config import Config

from ...wire import MAX_BUNDLE_BYTES, MAX_BUNDLE_VALUES, SIZES, count_values, json_body
from ..system.processes import stop_with_descendants
from .rings import break_rings
from .tracebacks import chain_of, describe_error
from .unattended import Exit

Bundle = dict[str, Any]
_NEVER_AUTOMAGIC = (ast.Pass, ast.For, ast.While, ast.With, ast.If, ast.FunctionDef, ast.ClassDef, ast.Import, ast.Try)
_EXIT_ADVICE = "To exit: use 'exit'"  # IPython's, for a user at a terminal
_WIDGET = "application/vnd.jupyter.widget-view+json"
_NO_WIDGETS = "widgets on ranks cannot reach the notebook: create them in a cell without %%distributed"


class _CellCompiler(CachingCompiler):
    """A compiler that names the code of cell 3 ``<cell 3>``: in tracebacks, faulthandler dumps, inspect.getsource."""

    lines_before = 0  # lines of the notebook's cell before the code

    def get_code_name(self, raw_code: str, transformed_code: str, number: int) -> str:
        return f"<cell {number}>"

    def cache(self, transformed_code: str, number: int = 0, raw_code: str | None = None) -> str:
        return str(super().cache("\n" * self.lines_before + transformed_code, number, raw_code))


class _CellDisplayHook(DisplayHook):
    shell: Any

    def __call__(self, result: object = None) -> None:
        self.check_for_underscore()
        if result is None or self.semicolon_at_end_of_expression(self.shell.cell_source):
            return
        bundle, metadata = self.compute_format_data(result)
        self.shell.user_ns["_"] = result
        self.fill_exec_result(result)
        self.shell.say_if_widget(bundle)
        self.shell.cell_value = sendable_bundle(bundle, metadata)


class _CellDisplayPublisher(DisplayPublisher):
    shell: Any

    def publish(
        self,
        data: Bundle,
        metadata: Bundle | None = None,
        source: object = None,
        *,
        transient: Bundle | None = None,
        update: bool = False,
        **kwargs: object,
    ) -> None:
        display_id = str((transient or {}).get("display_id", ""))
        self.shell.say_if_widget(data)
        self.shell.show_bundle(sendable_bundle(data, metadata), display_id, update)

    def clear_output(self, wait: bool = False) -> None:
        self.shell.clear_shown(wait)


class CellRunner(InteractiveShell):
    """The runner of a rank: ``run`` runs a cell; ``user_ns`` is the namespace of ``__main__``."""

    compiler_class = Type(_CellCompiler)
    displayhook_class = Type(_CellDisplayHook)
    display_pub_class = Type(_CellDisplayPublisher)
    compile: _CellCompiler
    show_bundle: Callable[[Bundle, str, bool], None]
    clear_shown: Callable[[bool], None]
    cell_source = ""
    cell_value: Bundle
    _has_said_widget = False  # in this cell
    _usual_cleanups: int

    @classmethod
    def create(cls, show: Callable[[Bundle, str, bool], None], clear: Callable[[bool], None]) -> CellRunner:
        """Create the only runner of this process; ``__main__`` becomes the module of the cells.

        Rich outputs go to ``show(bundle, display_id, is_update)`` and ``clear(wait)``.
        """
        main = types.ModuleType("__main__", "The cells of a rank.")
        sys.modules["__main__"] = main
        config = Config()
        config.HistoryManager.enabled = False
        config.InteractiveShell.cache_size = 0
        config.InteractiveShell.enable_tip = False
        config.Completer.use_jedi = False  # its first answer takes seconds; the live objects can be inspected instead
        config.InteractiveShell.loop_runner = _run_in_loop
        users_umask = os.umask(0o077)  # IPython creates a folder in the home whose files are executed
        try:
            runner: CellRunner = cls.instance(config=config, user_module=main)
        finally:
            os.umask(users_umask)
        runner.show_bundle, runner.clear_shown = show, clear
        runner.cell_value = {}
        runner._usual_cleanups = len(runner.input_transformers_cleanup)
        for prompt in ("ps1", "ps2", "ps3"):  # they mean an interactive user: Lightning would not train with DDP
            sys.__dict__.pop(prompt, None)
        warnings.filterwarnings("ignore", _EXIT_ADVICE)
        for trap in (runner.builtin_trap, runner.display_trap):
            trap.__enter__()  # entered once: nothing else uses this process, and each cell would enter and exit them
        return runner

    def run(self, code: str, cell: int, *, first_line: int = 1) -> tuple[Bundle, BaseException | None]:
        """Run ``code`` in the calling thread; lines are counted from ``first_line``.

        Returns the rich form of its last expression's value, and the exception that ended it, if any.
        Raises: KeyboardInterrupt when one arrived after the code had ended; its context is what the code had raised.
        """
        self.display_trap.set()  # a cell may have set sys.displayhook: IPython sets it for each cell
        self.execution_count = cell
        self.compile.lines_before = first_line - 1
        self.cell_source, self.cell_value = code, {}
        self._has_said_widget = False
        self._unreported: list[BaseException] = []
        try:
            result: ExecutionResult = self.run_cell(code, store_history=False)
            error = result.error_before_exec or result.error_in_exec
            _forget_error(result)
            if isinstance(error, KeyboardInterrupt):
                self._say_what_came_before(error)
            elif error is None:
                self._show_unreported()
            value, self.cell_value = self.cell_value, {}
            self._let_go_of_all_but(error)
        except KeyboardInterrupt as interrupt:  # it arrived while IPython worked after the code, or above
            self._say_what_came_before(interrupt)
            self._let_go_of_all_but(interrupt)
            self._unreported = []
            raise
        self._unreported = []
        return {} if error else value, error

    def say_if_widget(self, bundle: Bundle) -> None:
        """Print a notice, once per cell, when a rank shows a widget: it would never change."""
        if _WIDGET in bundle and not self._has_said_widget:
            self._has_said_widget = True
            sys.stderr.write(f"{_NO_WIDGETS}\n")

    def _show_unreported(self) -> None:
        """Print errors after which %run and the like continued.

        A method of its own, as a variable in the frame of ``run`` would make a reference cycle with each error.
        """
        for earlier in self._unreported:
            sys.stderr.write(describe_error(earlier))

    def _let_go_of_all_but(self, error: BaseException | None) -> None:
        """Drop errors after which IPython continued, and the one that it keeps, which differs after an interrupt."""
        for earlier in self._unreported:
            if earlier is not error:
                break_rings(earlier)
        if self.last_execution_result is not None:
            _forget_error(self.last_execution_result)

    def _say_what_came_before(self, interrupt: KeyboardInterrupt) -> None:
        """Make an error raised before an interrupt its context; Python links only errors being handled."""
        before = [error for error in self._unreported if error is not interrupt]
        raised = [error for error in before if not isinstance(error, KeyboardInterrupt)]
        if before and not any(error in before for error in chain_of(interrupt)):
            interrupt.__context__ = raised[-1] if raised else before[0]

    def complete_code(self, code: str, position: int) -> tuple[list[str], list[str], int, int]:
        """Return completions at ``position`` (characters), their types, and the span of the text they replace."""
        with provisionalcompleter():
            found = list(rectify_completions(code, self.Completer.completions(code, position)))
        if not found:
            return [], [], position, position
        return [c.text for c in found], [c.type or "" for c in found], found[0].start, found[0].end

    def inspect_name(self, name: str, detail: int) -> str:
        """Return what ``name?`` shows; empty if there is no such name."""
        try:
            bundle = self.object_inspect_mime(name, detail_level=detail)
        except KeyError:
            return ""
        return str(bundle.get("text/plain", ""))

    # ---- what IPython would do for a user at a terminal

    def transform_cell(self, raw_cell: str) -> str:
        """Leave plain Python unchanged: IPython's transformations would find nothing to do, and take time.

        A single expression may be an automagic (``pwd``), and added transformations must be applied.
        """
        if self.input_transformers_post or len(self.input_transformers_cleanup) != self._usual_cleanups:
            return str(super().transform_cell(raw_cell))
        try:
            body = ast.parse(raw_cell).body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return str(super().transform_cell(raw_cell))
        if len(body) < 2 and not (body and isinstance(body[0], _NEVER_AUTOMAGIC)):
            return str(super().transform_cell(raw_cell))
        return raw_cell if raw_cell.endswith("\n") else raw_cell + "\n"

    def transform_ast(self, node: ast.Module) -> ast.Module:
        """Count lines as in the notebook's cell."""
        node = super().transform_ast(node)
        if self.compile.lines_before:
            ast.increment_lineno(node, self.compile.lines_before)
        return node

    def should_run_async(self, raw_cell: str, **kwargs: Any) -> bool:
        """Test-compile a cell only if it could be async."""
        has_word = "await" in raw_cell or "async" in raw_cell
        return has_word and bool(super().should_run_async(raw_cell, **kwargs))

    @contextlib.contextmanager
    def _tee(self, channel: str) -> Iterator[None]:
        """Keep no copy of what a cell prints."""
        yield

    def showtraceback(self, *args: object, **kwargs: object) -> None:
        """Keep the error; ``run`` returns it, or prints it if IPython continues after it."""
        error = sys.exc_info()[1]
        if error is not None:
            self._unreported.append(error)

    showsyntaxerror = showindentationerror = showtraceback

    def system(self, cmd: str) -> None:
        """Run ``!cmd`` in the rank's process group; its output goes where the rank's own goes.

        When the cell is stopped, all processes of the command are stopped too: killing the shell alone would leave
        them.
        """
        sys.stdout.flush()
        command = self.var_expand(cmd, depth=1)
        process = subprocess.Popen(command, shell=True, stdin=subprocess.DEVNULL)  # noqa: S602
        try:
            self.user_ns["_exit_code"] = process.wait()
        except BaseException:
            stop_with_descendants(process)
            raise

    system_piped = system_raw = system

    def enable_gui(self, gui: str | None = None) -> None:
        """Do nothing: ``%matplotlib inline`` calls it, and a rank has no window."""

    @default("exiter")
    def _make_exiter(self) -> Exit:
        return Exit(self)


def _forget_error(result: ExecutionResult) -> None:
    """Drop the error of a result, with all objects that its frames hold."""
    result.error_before_exec = result.error_in_exec = None


def _run_in_loop(coroutine: Coroutine[Any, Any, ExecutionResult]) -> ExecutionResult:
    """Run a cell that awaits; on an interrupt, cancel it, else the next cell that awaits would resume it."""
    loop = get_asyncio_loop()
    cell = loop.create_task(coroutine)
    interrupt: BaseException | None = None
    while not cell.done():
        try:
            loop.run_until_complete(cell)
        except (KeyboardInterrupt, SystemExit) as exc:  # it arrived while all waited, or a task of the user raised it
            interrupt = exc
            cell.cancel()
    if interrupt is not None:
        raise interrupt
    result: ExecutionResult = cell.result()
    return result


def sendable_bundle(data: Bundle, metadata: Bundle | None = None) -> Bundle:
    """Convert a mime bundle to JSON of bounded size: images as base64 text, invalid values dropped.

    The display sizes of images are taken from ``metadata``.
    """
    bundle: Bundle = {}
    sizes = {mime: size for mime, size in (metadata or {}).items() if mime in data and isinstance(size, dict)}
    for mime, value in [*data.items(), *([(SIZES, sizes)] if sizes else [])]:
        if isinstance(value, bytes):
            bundle[mime] = base64.b64encode(value).decode("ascii")
        elif isinstance(value, str):
            bundle[mime] = value
        else:
            with contextlib.suppress(TypeError, ValueError):
                bundle[mime] = json.loads(json.dumps(value, allow_nan=False))
    lengths = {mime: len(json_body({mime: value})) for mime, value in bundle.items()}
    while sum(lengths.values()) > MAX_BUNDLE_BYTES:
        largest = max(lengths, key=lambda mime: lengths[mime])
        del bundle[largest]
        bundle["text/plain"] = f"<{largest} of {lengths.pop(largest) >> 20} MB is not shown>"
        lengths["text/plain"] = len(json_body({"text/plain": bundle["text/plain"]}))
    num_values = 4 * (len(bundle) + 1)  # an upper bound for the bundle itself
    for mime, value in list(bundle.items()):
        more = 0 if isinstance(value, str) else count_values(json_body(value))
        if num_values + more > MAX_BUNDLE_VALUES:
            del bundle[mime]
            words = f"<{mime} of {more:,} values is not shown>"
            bundle["text/plain"] = "\n".join(filter(None, [bundle.get("text/plain", ""), words]))
        else:
            num_values += more
    return bundle
