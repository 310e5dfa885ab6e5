"""Trials of the zoo's models in every layout, on real ranks that are reused between trials."""

from __future__ import annotations

import functools
import logging
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from detrain_nb import Session
from detrain_nb.errors import CellTimeout, RankError, RankLost
from detrain_nb.node.system.gpus import count_gpus

from .entry import on
from .everything import ENTRIES, OF_TRANSFORMERS
from .looking import look

LAYOUTS: dict[str, dict[str, int]] = {
    "looks": {},  # not laid out: profiled, split, planned, and compared with what it was
    "pp": {"pp": 2},
    "tp": {"tp": 2},
    "dp_shard": {"dp_shard": 2},
    "pp x tp": {"pp": 2, "tp": 2},
}
_LIMIT_S = 100.0  # for a hang; a loaded machine is slow
_IMPORT = f"import sys; sys.path.insert(0, {str(Path(__file__).parent.parent)!r}); from zoo import ranks"
# Sums are in float32 without TF32; ranks that share a GPU are those of the session on the CPU.
_ON_GPU = """
torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
there = f"cuda:{local_rank % torch.cuda.device_count()}"
torch.cuda.set_device(there); torch.ones(1, device=there)
"""
_QUIET = "import logging, warnings; warnings.simplefilter('ignore'); logging.disable(logging.WARNING)"


@dataclass(frozen=True)
class Outcome:
    """The outcome of one trial.

    ``kind``: "right", "refused" (a SpecError, with its message in ``told``), "wrong", "error", "hang", or "not possible
    here" if the whole model does not run. ``cut``: how many of its tensors tensor parallel ranks have parts of, and the
    number of all.
    """

    kind: str
    told: str = ""
    cut: tuple[int, int] | None = None

    def __str__(self) -> str:
        return f"{self.kind}: {self.told}" if self.told else self.kind


class Trials:
    """Sessions of 2 and 4 ranks, each started when it is first needed, and restarted after a hang.

    ``device``: of the models, "cpu" or "cuda". With "cuda" ranks share a GPU over gloo if there are not enough GPUs.
    """

    def __init__(self, device: str = "cpu") -> None:
        self._device = device
        self._sessions: dict[int, Session] = {}
        self._with_transformers: set[Session] = set()

    def __enter__(self) -> Trials:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, at: TracebackType | None) -> None:
        while self._sessions:
            self._sessions.popitem()[1].stop()

    def run(self, name: str, layout: str, *, timeout_s: float = _LIMIT_S) -> Outcome:
        axes = LAYOUTS[layout]
        if self._device != "cpu" and (why := _why_it_does_not_run(name, self._device)):
            return Outcome("not possible here", why)
        if not axes:
            return _of_look(name, self._device)
        session = self._session(axes, name)
        try:
            values = session.run_cell(f"ranks.train({name!r}, {axes}, there)", timeout_s=timeout_s).values
        except CellTimeout as exc:
            self._drop(session)
            told = " ".join(str(exc).split())
            return Outcome("error" if " failed with " in told else "hang", told)
        except RankLost as exc:
            self._drop(session)
            return Outcome("error", f"RankLost: {exc}")  # its text has the rank's last words
        except RankError as exc:
            return _of_errors(exc)
        return _of_figures(values, close=ENTRIES[name].close)

    def _session(self, axes: dict[str, int], name: str) -> Session:
        count = 1
        for size in axes.values():
            count *= size
        if count not in self._sessions:
            is_shared = self._device == "cuda" and count_gpus() < count
            self._sessions[count] = Session.start(count, device="cpu" if is_shared else self._device)
            there = _ON_GPU if self._device == "cuda" else "there = 'cpu'"
            self._sessions[count].run_cell(f"{_QUIET}\n{_IMPORT}\n{there}", timeout_s=_LIMIT_S)
        session = self._sessions[count]
        if name in OF_TRANSFORMERS and session not in self._with_transformers:
            session.run_cell("import transformers.generation, transformers.modeling_utils", timeout_s=_LIMIT_S)
            self._with_transformers.add(session)
        return session

    def _drop(self, session: Session) -> None:
        self._sessions = {count: each for count, each in self._sessions.items() if each is not session}
        session.stop()


@functools.cache
def _why_it_does_not_run(name: str, device: str) -> str:
    """Return why the whole model does not run: some models make tensors on the CPU, wherever their parameters are."""
    entry = ENTRIES[name]
    try:
        entry.model().to(device)(**on(device, entry.inputs(2)))
    except RuntimeError as exc:
        return f"the model itself: {exc}"
    return ""


def _of_errors(exc: RankError) -> Outcome:
    """Return the outcome for the first error that does not follow from another rank's."""
    errors = sorted(exc.errors.values(), key=lambda error: (error.follows_another, error.rank))
    first = errors[0]
    kinds = {error.name for error in errors if not error.follows_another}
    alone = "" if len(kinds) < 2 else f" ({', '.join(f'rank {error.rank}: {error.name}' for error in errors)})"
    if first.name == "SpecError" and len(errors) == exc.world_size:
        return Outcome("refused", first.message + alone)
    if first.name == "AssertionError" and any("zoo/ranks.py" in line for line in first.traceback):
        return Outcome("wrong", first.message + alone)
    partly = "" if len(errors) == exc.world_size else f" on {len(errors)} of {exc.world_size} ranks"
    return Outcome("error", f"{first.name}{partly}: {first.message}{alone}")


def _of_look(name: str, device: str) -> Outcome:
    """Inspect the model in this process, without output: a dry run needs a process without a process group."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            left, refused = look(name, device)
    finally:
        logging.disable(disabled)
    if not left:
        if "profile" in refused:
            return Outcome("refused", ", ".join(sorted(refused)))
        is_one = ("split" in refused) == ("dry_run" in refused)
        return (
            Outcome("right")
            if is_one
            else Outcome("wrong", f"{' '.join(refused & {'split', 'dry_run'})} alone refuses")
        )
    is_raw = all(how.startswith("raises ") for how in left.values())
    return Outcome("error" if is_raw else "wrong", "; ".join(f"{what}: {how}" for what, how in left.items()))


def _of_figures(values: dict[int, dict[str, Any]], *, close: float) -> Outcome:
    faults, cut = Counter[str](), None
    for rank, found in values.items():
        cut = found.pop("cut", cut)
        for what, value in found.items():
            if isinstance(value, str):
                return Outcome("wrong", f"{what}: {value}")
            if not value < close:
                faults[f"{what} on rank {rank}"] = value
    if faults:
        return Outcome("wrong", ", ".join(f"{what} {value:.2g}" for what, value in faults.items()))
    return Outcome("right", "{}/{} tensors cut".format(*cut) if cut else "", cut)
