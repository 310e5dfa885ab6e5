"""Checks that a text is Python, in a process of its own: a short text can exhaust memory, or crash the parser."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import lru_cache

from ..errors import SpecError

__all__ = ["check_python"]

MOST_BYTES = 2_000_000  # of one text
_MAGIC = re.compile(r"[%!?]|\w+ *= *[%!]|.*\?$")  # at the start of a line or of its value, or the help of IPython
_LIMIT_S = 30  # the child may use the CPU for a third of it
_READER = """
import contextlib, json, sys, warnings
with contextlib.suppress(ImportError, OSError, ValueError):  # this system has other limits, or none
    import resource
    for limit, most in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_CPU, 10), (resource.RLIMIT_AS, 1 << 30)):
        resource.setrlimit(limit, (most, most))
warnings.simplefilter("ignore")
for number, text in enumerate(json.load(sys.stdin)):
    try:
        compile(text, "script", "exec", dont_inherit=True)  # more than its grammar: return, break, await
    except SyntaxError as exc:
        fault = exc.lineno or 1, exc.msg
    except (ValueError, RecursionError, MemoryError) as exc:  # a NUL; what is nested too deeply
        fault = None, str(exc) or "nested too deeply"
    else:
        continue
    json.dump([number, *fault], sys.stdout)
    break
else:
    json.dump(None, sys.stdout)
"""


def check_python(*texts: tuple[str, str]) -> None:
    """Check that texts are Python; each has its place. Raises: SpecError for the first that is not, with its line."""
    for text, where in texts:
        if len(text.encode("utf-8", "surrogatepass")) > MOST_BYTES:
            raise SpecError(f"{where}: larger than {MOST_BYTES // 1_000_000} MB: move data from it into files")
    try:
        fault = _find_fault(tuple(text for text, _ in texts))
    except OSError as exc:
        raise SpecError(f"{texts[-1][1]}: no process could be started to parse it: {exc.strerror}") from None
    except (subprocess.SubprocessError, ValueError):  # it was killed, for example by a limit
        raise SpecError(f"{texts[-1][1]}: is not Python that can be parsed: nested too deeply, or too long") from None
    if fault is None:
        return
    number, line_number, why = fault
    text, where = texts[number]
    if line_number is None:
        raise SpecError(f"{where}: is not Python: {why}")
    lines = text.splitlines() or [""]
    line = lines[min(line_number, len(lines)) - 1].strip()
    why = "a script cannot have magics" if _MAGIC.match(line) else why
    raise SpecError(f"{where}, line {line_number}: is not Python: {why}")


@lru_cache(maxsize=4)  # the same text is checked again at each step of a submission
def _find_fault(texts: tuple[str, ...]) -> tuple[int, int | None, str] | None:
    """Return the first text that is not Python, its line, and why. Raises: OSError, SubprocessError, ValueError."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", _READER],
        input=json.dumps(texts).encode(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        timeout=_LIMIT_S,
        check=True,
    )
    return None if (said := json.loads(done.stdout)) is None else tuple(said)
