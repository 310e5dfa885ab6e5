"""Values in scripts of a shell: what sh, bash, dash and zsh read is, byte for byte, what was written."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

MOST_ARGUMENT_BYTES = (128 << 10) - 1  # Linux gives each argument of a command 32 pages, and ends it with a zero
_FOR_ZSH = re.compile(r"(?:^|[=:])=")  # what it takes for the path of a command
_RETURN, _BREAK = "DETRAIN_NB_RETURN=$(printf '\\r')", "'\"$DETRAIN_NB_RETURN\"'\n"
_HOME = re.compile(r"(~[A-Za-z0-9._-]*)(?:/(.*))?", re.DOTALL)


def quote(text: str) -> str:
    """Write a text as one word; no here-document is used for any: dash loses what looks like the begin of its end."""
    quoted = shlex.quote(text)
    return f"'{text}'" if quoted == text and _FOR_ZSH.search(text) else quoted


def hide_breaks(lines: Sequence[str]) -> str:
    """Write a script of which no line ends as in Windows, as sbatch wants it, though lines in quoted words do."""
    text = "\n".join(lines) + "\n"
    if "\r\n" in text:
        text = text.replace("\r\n", _BREAK).replace("\nset -e\n", f"\nset -e\n{_RETURN}\n", 1)
    return text


def show_breaks(script: str) -> str:
    """Undo `hide_breaks`; other scripts stay as they are."""
    return script.replace(_BREAK, "\r\n") if _RETURN in script else script


def quote_path(path: str) -> str:
    """Write a path as one word; a ``~`` at its begin stays the home of a user of the node."""
    if home := _HOME.fullmatch(path):
        return f"{home[1]}/{quote(home[2])}" if home[2] else home[1]
    return quote(path)


def quote_command(argv: Sequence[str], *, options: Mapping[str, str] | None = None, below: str = "") -> str:
    """Write a command line of torchrun, in lines that go on.

    The first word is a path. ``options`` are what a script of the shell puts in the place of the value of torchrun's
    own options, and ``below`` is the folder of the program: both are written as they are.
    """
    end = argv.index("--")
    words = [quote_path(argv[0]), *(_fill(word, options or {}) for word in argv[1:end]), "--"]
    first, *arguments = argv[end + 1 :]
    return " \\\n  ".join(
        [" ".join(words), " ".join([f"{below}/{quote(first)}" if below else quote(first), *map(quote, arguments)])]
    )


def _fill(word: str, options: Mapping[str, str]) -> str:
    option, is_given, _ = word.partition("=")
    return f"{option}={options[option]}" if is_given and option in options else quote(word)


def export(name: str, text: str) -> str:
    """Set an environment variable."""
    return f"export {name}={quote(text)}"


def write_file(text: str, *, to: str) -> str:
    """Write a text to a file; ``to`` is a word of the shell."""
    return f"printf '%s' {quote(text)} >{to}"
