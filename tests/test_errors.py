"""The error of ranks that failed together: the rank that caused the failure comes first."""

from __future__ import annotations

from detrain_nb.errors import RankError, RemoteError


def test_rank_that_failed_by_itself_stands_before_those_that_it_took_along() -> None:
    hung_up = "[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4711"
    errors = {
        0: RemoteError(0, "here", "RuntimeError", hung_up),
        1: RemoteError(1, "here", "KeyboardInterrupt", "", interrupted=True),
        2: RemoteError(2, "here", "ValueError", "no such token"),
    }
    error = RankError(errors, world_size=3)
    assert str(error).startswith("rank 2 on here: ValueError: no such token\nrank 0 on here: RuntimeError")
    assert error._render_traceback_()[0] == "--- rank 2 on here ---"
    assert list(error.errors) == [0, 1, 2], "by rank, for programs"
