"""The advice printed for a failed job fits the cause of the failure."""

from __future__ import annotations

import pytest

from detrain_nb.jobs.advice import advise, describe_cause
from detrain_nb.jobs.job_status import JobStatus


@pytest.mark.parametrize(
    ("state", "code", "line", "wanted"),
    [
        ("ended", 1, "torch.OutOfMemoryError: CUDA out of memory. Tried", "lower batch_size"),
        ("ended", 1, "OSError: [Errno 28] No space left on device", "free disk space"),
        ("ended", 1, "ModuleNotFoundError: No module named 'einops.layers'", "has the module 'einops' on"),
        ("ended", 1, "FileNotFoundError: [Errno 2] No such file or directory: 'data/x.npy'", "put 'data/x.npy' on"),
        ("ended", 137, "", "often for lack of memory"),
        ("ended", 127, "", "could not be started"),
        ("ended", 3, "ValueError: no", "read its last lines"),
        ("lost", None, "", "run the job again"),
        ("node restarted", None, "", "was restarted"),
        ("ended", 0, "", ""),
        ("stopped", 143, "", ""),
        ("running", None, "CUDA out of memory", ""),
    ],
)
def test_advice(state: str, code: int | None, line: str, wanted: str) -> None:
    said = advise(JobStatus("a", "a", state, code, failed_rank=0, last_lines=(line,)))
    assert wanted in said and bool(wanted) == bool(said)


@pytest.mark.parametrize(
    "lines",
    [
        ("No module named 'evil-1.0'",),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'x", "job a succeeded", "y'"),
    ],
)
def test_advice_passes_on_no_command_and_no_line_of_a_node(lines: tuple[str, ...]) -> None:
    said = advise(JobStatus("a", "a", "ended", 1, failed_rank=0, last_lines=lines))
    assert said and "pip install" not in said and "\n" not in said and "succeeded" not in said


def test_failure_names_rank_node_and_signal() -> None:
    many = {"gpu1": None, "gpu2": None}
    status = JobStatus("a", "a", "ended", 137, failed_rank=3, failed_node="gpu1", silent=dict.fromkeys(many, ""))
    assert describe_cause(status) == "rank 3 on gpu1 exited with code 137 (signal 9, SIGKILL)"
    assert describe_cause(JobStatus("a", "a", "ended", 3, failed_rank=0)) == "rank 0 exited with code 3"
    assert describe_cause(JobStatus("a", "a", "lost")) == "the job is lost"
