"""Values in shell scripts: sh, bash, dash and zsh read exactly the bytes that were written."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

MOST_ARGUMENT_BYTES = (128 << 10) - 1  # Linux allows 32 pages per argument, with its zero byte
_FOR_ZSH = re.compile(r"(?:^|[=:])=")  # zsh expands =NAME to the path of a command
_RETURN, _BREAK = "DETRAIN_NB_RETURN=$(printf '\\r')", "'\"$DETRAIN_NB_RETURN\"'\n"
_HOME = re.compile(r"(~[A-Za-z0-9._-]*)(?:/(.*))?", re.DOTALL)


def quote(text: str) -> str:
    """Quote a text as one shell word; here-documents are avoided, as dash drops text that resembles their end."""
    quoted = shlex.quote(text)
    return f"'{text}'" if quoted == text and _FOR_ZSH.search(text) else quoted


def hide_breaks(lines: Sequence[str]) -> str:
    """Join a script's lines without CRLF, which sbatch refuses, while its quoted texts keep theirs."""
    text = "\n".join(lines) + "\n"
    if "\r\n" in text:
        text = text.replace("\r\n", _BREAK).replace("\nset -e\n", f"\nset -e\n{_RETURN}\n", 1)
    return text


def show_breaks(script: str) -> str:
    """Undo `hide_breaks`; other scripts are returned unchanged."""
    return script.replace(_BREAK, "\r\n") if _RETURN in script else script


def quote_path(path: str) -> str:
    """Quote a path as one shell word; a leading ``~`` is left for the node's shell to expand."""
    if home := _HOME.fullmatch(path):
        return f"{home[1]}/{quote(home[2])}" if home[2] else home[1]
    return quote(path)


def quote_command(argv: Sequence[str], *, options: Mapping[str, str] | None = None, below: str = "") -> str:
    """Return a torchrun command line, with line continuations.

    The first word is a path. ``options`` replace the values of torchrun's own options, and ``below`` is the folder of
    the program: both are shell text, and are not quoted.
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
    """Return a line that exports an environment variable."""
    return f"export {name}={quote(text)}"


def write_file(text: str, *, to: str) -> str:
    """Return a line that writes a text to a file; ``to`` is a shell word."""
    return f"printf '%s' {quote(text)} >{to}"
