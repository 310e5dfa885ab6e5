"""Checks that only a GPU can make, each in its own process with a deadline; one table, and one file in results/.

    make test-gpu                                  # tests/gpu by pytest, then this
    python benchmarks/gpu.py                       # this alone, from a checkout in which nothing is installed
    python benchmarks/gpu.py --list                # the checks; --only NAME ... runs some of them
    python benchmarks/gpu.py --device cpu          # checks that work without a GPU: does the script itself work?

It needs Python 3.11, torch 2.9.1 or newer with CUDA, and for checks of a session IPython, numpy, pydantic, packaging,
pathspec and fsspec. Missing packages are named in the file, and the checks that need them are left out. Neither pytest
nor paramiko is needed, no network, and no installation: the package is taken from this checkout (magics/, which only an
installation maps into it, is not needed). If packages are in a folder of their own:
PYTHONPATH=/that/folder python benchmarks/gpu.py.

With one GPU, collectives on NCCL have a world size of 1; in checks of several ranks, these share the GPU over gloo.
Exit status: 0 all possible checks have passed, 1 some check has failed, 2 no check was possible.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent
_CHECKOUT = _HERE.parent
sys.path[:0] = [path for path in (str(_CHECKOUT), str(_HERE)) if path not in sys.path]

from gpu_check import FAILED, FOR_A_SESSION, FOR_LAYOUTS, NOT_POSSIBLE, PASSED, Check, Notes, NotPossible, Place  # noqa: E402
from report import describe_machine  # noqa: E402

from detrain_nb.node.system.gpus import count_gpus  # noqa: E402
from detrain_nb.node.system.processes import adopt_orphans, descendants, end_descendants  # noqa: E402

_RESULTS = _HERE / "results"
_STACKS_BEFORE_S = 1.0  # a check that hangs prints its stacks this long before it is killed
_END_LIMIT_S = 10.0
_SHOWN_CHARS = 8000
_OLDEST_TORCH = (2, 9, 1)


def list_checks() -> list[Check]:
    """Return all checks in the order in which they run: quick ones first."""
    return [
        Check("fork", "no CUDA before the fork", _of_sessions("check_fork")),
        Check("collectives", "collectives on NCCL and on gloo", _of_sessions("check_collectives")),
        Check("hung", "a hung collective is stopped", _of_sessions("check_hung")),
        Check("long-kernel", "a stop while the GPU computes", _of_sessions("check_long_kernel")),
        Check("killed", "a killed rank is replaced alone", _of_sessions("check_killed")),
        Check("broken", "a sticky CUDA error is named", _of_sessions("check_broken")),
        Check("out-of-memory", "CUDA out of memory is named", _of_sessions("check_out_of_memory")),
        Check("times", "start and cells beside torchrun", _of_sessions("check_times"), limit_s=400.0),
        *_layouts(),
    ]


def list_rehearsals() -> list[Check]:
    """Return checks that do not pass, to test that they are recorded and do not stop others."""
    return [
        Check("rehearsal-fails", "fails", _rehearse("fails"), (), 20.0),
        Check("rehearsal-hangs", "hangs", _rehearse("hangs"), (), 3.0),
        Check("rehearsal-dies", "dies", _rehearse("dies"), (), 20.0),
        Check("rehearsal-needs", "needs a module that nobody has", _rehearse("fails"), ("no_such_module",), 20.0),
    ]


def _of_sessions(name: str) -> Any:
    """Import the check when it runs: without its modules, other checks can still run."""

    def run(place: Place, notes: Notes) -> None:
        getattr(importlib.import_module("gpu_sessions"), name)(place, notes)

    return run


def _layouts() -> list[Check]:
    from gpu_layouts import checks

    return checks()


def _rehearse(how: str) -> Any:
    def run(place: Place, notes: Notes) -> None:
        notes.add(begun=True)
        if how == "fails":
            raise ValueError("as it was asked to")
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        subprocess.Popen(["sleep", "600"], start_new_session=True)  # it must be stopped, too
        time.sleep(600)

    return run


# ---- one check, in its own process


def _run_one(check: Check, place: Place, path: Path) -> None:
    """Write the outcome to ``path``."""
    faulthandler.dump_traceback_later(max(0.5, check.limit_s - _STACKS_BEFORE_S))
    notes = Notes(path)
    try:
        check.run(place, notes)
    except NotPossible as exc:
        notes.write(outcome=NOT_POSSIBLE, reason=str(exc))
    except BaseException as exc:  # noqa: BLE001  any error is recorded
        shown = getattr(exc, "_render_traceback_", list)()  # the error of a rank
        text = "\n".join([traceback.format_exc(), *shown])
        notes.write(outcome=FAILED, reason=_first_line(f"{type(exc).__name__}: {exc}"), error=text[-_SHOWN_CHARS:])
    else:
        notes.write(outcome=PASSED)


# ---- all checks


def run_check(check: Check, place: Place, arguments: Sequence[str], log_path: Path) -> dict[str, Any]:
    """Run a check until it exits or reaches its deadline, and stop what it started. Returns its entry in the file."""
    missing = [name for name in check.needs if not _is_there(name)]
    entry: dict[str, Any] = {"name": check.name, "title": check.title}
    if missing:
        return {**entry, "outcome": NOT_POSSIBLE, "reason": f"{', '.join(missing)} is missing", "seconds": 0.0}
    place.folder.mkdir()
    path = place.folder.with_suffix(".json")
    began = time.monotonic()
    with open(log_path, "wb") as log:
        started = subprocess.Popen(
            [sys.executable, __file__, "--run", check.name, str(path), str(place.folder), str(place.gpus), *arguments],
            cwd=place.folder,
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            status: int | None = started.wait(check.limit_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            left = len([pid for pid in descendants(os.getpid()) if pid != started.pid])
            with contextlib.suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)
            started.wait(_END_LIMIT_S)
            end_descendants()
    seconds = round(time.monotonic() - began, 2)
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"measured": {}}
    said = log_path.read_text(encoding="utf-8", errors="replace")[-_SHOWN_CHARS:]
    if "outcome" not in found:  # it was killed, or crashed
        how = f"did not end within {check.limit_s:g} s" if status is None else f"its process ended with {status}"
        found |= {"outcome": FAILED, "reason": how, "error": said}
    elif found["outcome"] == FAILED:
        found["log"] = said
    if left and status is not None:
        found["left_behind"] = left  # processes that outlived the check; they are stopped now
    return {**entry, "seconds": seconds, **found}


def _environment() -> dict[str, str]:
    """Return an environment in which every process uses the checkout's package, even if another one is installed."""
    path = os.pathsep.join([str(_CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def _is_there(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def describe_gpus(kind: str) -> tuple[int, dict[str, Any]]:
    """Return the number of GPUs that torch sees, and all that figures depend on; queried in a separate process."""
    code = """
import json, sys, torch
found = {"torch": torch.__version__, "cuda": torch.version.cuda, "gpus": []}
if sys.argv[1] == "cuda" and torch.cuda.is_available():
    for index in range(torch.cuda.device_count()):
        each = torch.cuda.get_device_properties(index)
        found["gpus"].append([each.name, each.total_memory, f"{each.major}.{each.minor}"])
    found["nccl"] = list(torch.cuda.nccl.version())
print(json.dumps(found))
"""
    try:
        told = subprocess.run(
            [sys.executable, "-c", code, kind], env=_environment(), capture_output=True, text=True, timeout=120
        )
        found: dict[str, Any] = json.loads(told.stdout.splitlines()[-1])
    except (subprocess.TimeoutExpired, IndexError, ValueError) as exc:
        return 0, {"error": f"torch does not say which GPUs there are: {exc!r}"}
    names = ("CUDA_VISIBLE_DEVICES", "NCCL_DEBUG", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    found["counted_without_cuda"] = count_gpus()  # with this, a session decides how many ranks fit
    found["environment"] = {name: os.environ[name] for name in names if name in os.environ}
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        asked = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,mig.mode.current", "--format=csv,noheader"]
        if kind == "cuda":
            found["nvidia_smi"] = subprocess.run(asked, capture_output=True, text=True, timeout=30).stdout.splitlines()
    return len(found["gpus"]), found


def _why_torch_is_no_use(about: Mapping[str, Any]) -> str:
    """Return why torch cannot run the checks; empty if it can."""
    if "error" in about:
        return str(about["error"])
    version = tuple(int(part) for part in re.findall(r"\d+", about["torch"].partition("+")[0])[:3])
    if version < _OLDEST_TORCH:
        return f"torch {about['torch']} is too old: {'.'.join(map(str, _OLDEST_TORCH))} is needed"
    return ""


def main() -> int:
    """Read the command line, run the checks, print the table and keep the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: what makes sense without a GPU")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these checks; layout or memory: all that begin so")
    parser.add_argument("--list", action="store_true", help="name the checks, and run none")
    parser.add_argument(
        "--rehearse", action="store_true", help="first run checks that fail, hang and die: are they told?"
    )
    parser.add_argument(
        "--results", type=Path, metavar="FOLDER", help="where the file goes (default: results/, of a GPU)"
    )
    parser.add_argument("--run", nargs=4, help=argparse.SUPPRESS)  # one check, in the process that is started for it
    args = parser.parse_args()
    known = [*list_rehearsals(), *list_checks()]
    if args.run:
        name, path, folder, gpus = args.run
        check = next(check for check in known if check.name == name)
        _run_one(check, Place(args.device, int(gpus), Path(folder)), Path(path))
        return 0
    chosen = _choose(known if args.rehearse else list_checks(), args.only)
    if args.list:
        print("\n".join(f"{check.name:45}  {check.title}" for check in chosen))
        return 0
    started_at = time.time()
    gpus, about = describe_gpus(args.device)
    entries = []
    with _running_alone() as folder:
        for number, check in enumerate(chosen):
            print(f"{time.strftime('%H:%M:%S')}  {check.name}", end="", file=sys.stderr, flush=True)
            place = Place(args.device, gpus, folder / str(number))
            entries.append(_run_or_say_why_not(check, place, about, folder / f"{number}.log"))
            print(f": {entries[-1]['outcome']}", file=sys.stderr, flush=True)
    print(format_table(entries))
    if not any(entry["outcome"] in (PASSED, FAILED) for entry in entries):
        print("nothing was checked: the column why says what is missing here")
    missing = [name for name in dict.fromkeys([*FOR_A_SESSION, *FOR_LAYOUTS]) if not _is_there(name)]
    if missing:
        print(f"missing here: {', '.join(missing)}")
    if results := args.results or (_RESULTS if args.device == "cuda" and gpus else None):
        report = {
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(started_at)),
            "seconds": round(time.time() - started_at),
            "device": args.device,
            "machine": {**describe_machine(), "gpu": about},
            "load_average_after": [round(load, 2) for load in os.getloadavg()],
            "missing": missing,
            "checks": entries,
        }
        print(_write(results / f"gpu-{time.strftime('%Y-%m-%d-%H%M%S', time.localtime(started_at))}.json", report))
    outcomes = {entry["outcome"] for entry in entries}
    return 1 if FAILED in outcomes else 0 if PASSED in outcomes else 2


def _run_or_say_why_not(check: Check, place: Place, about: Mapping[str, Any], log_path: Path) -> dict[str, Any]:
    why = _why_torch_is_no_use(about) if check.needs else ""
    if not why and check.needs and place.is_gpu and not place.gpus:
        why = f"no GPU: torch {about['torch']}, built for CUDA {about['cuda']}, sees none"
    if why:
        return {"name": check.name, "title": check.title, "outcome": NOT_POSSIBLE, "reason": why, "seconds": 0.0}
    return run_check(check, place, ["--device", place.kind], log_path)


def _choose(checks: Sequence[Check], names: Sequence[str] | None) -> list[Check]:
    if names is None:
        return list(checks)
    if unknown := [name for name in names if not any(_is_meant(check, name) for check in checks)]:
        sys.exit(f"there is no check {unknown[0]!r}: --list names them")
    return [check for check in checks if any(_is_meant(check, name) for name in names)]


def _is_meant(check: Check, name: str) -> bool:
    return check.name == name or check.name.split(" ")[0] == name


@contextlib.contextmanager
def _running_alone() -> Iterator[Path]:
    """Run in a temporary folder; every process that was started is stopped afterwards."""
    adopt_orphans()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # in a shell's background, ranks ignore SIGINT
    try:
        with tempfile.TemporaryDirectory(prefix="detrain_nb-gpu-") as folder:
            os.environ["TMPDIR"] = tempfile.tempdir = folder
            os.environ["DETRAIN_NB_RUNTIME_DIR"] = str(Path(folder, "run"))
            yield Path(folder)
    finally:
        end_descendants()


def format_table(entries: Sequence[Mapping[str, Any]]) -> str:
    """Return a line for each check, with the reason if it has not passed."""
    lines = [["check", "outcome", "seconds", "why"]]
    for entry in entries:
        lines.append([entry["name"], entry["outcome"], f"{entry['seconds']:.1f}", _first_line(entry.get("reason", ""))])
    widths = [max(len(line[column]) for line in lines) for column in range(3)]
    table = ["  ".join([*(cell.ljust(width) for cell, width in zip(line, widths)), line[3]]).rstrip() for line in lines]
    counts = {
        outcome: sum(entry["outcome"] == outcome for entry in entries) for outcome in (PASSED, FAILED, NOT_POSSIBLE)
    }
    return "\n".join([*table, ", ".join(f"{count} {outcome}" for outcome, count in counts.items())])


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:200]


def _write(path: Path, report: Mapping[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1, default=str) + "\n", encoding="utf-8")
    return path


if __name__ == "__main__":
    sys.exit(main())
