"""The commands in a script of a shell, taken apart and never run: nothing is filled in, and what would be is told.

The time grows with the length alone. What decides which commands run (if, case, loops, functions) is not followed: all
of them are given, in their order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ..documents.content import MOST_VALUES
from ..errors import SpecError
from ..storage import shown

__all__ = ["Command", "Word", "as_words", "split_script"]

_MOST_COMMANDS, _MOST_WORDS, _MOST_PIECES = 10_000, MOST_VALUES, 2 * MOST_VALUES
# What the shell fills in; it ends at the next $ at the latest: all of them are found in one pass.
_FILLS = re.compile(r"\$\{[^}$]*+\}?|\$\([^)$]*+\)?|\$[A-Za-z_]\w*+|\$[0-9@*#?$!-]|`[^`]*+`?", re.ASCII)
_PIECE = re.compile(
    r"""
    (?P<blank> [ \t\r]++ | \\\r?\n )
  | (?P<comment> (?<![^\s;&|()]) \#[^\n]*+ )
  | (?P<end> \n | ;; | && | \|\| | [;&|()] )
  | (?P<redirect> (?:(?<![^\s;&|()]) [0-9]{1,3})? (?: <<-? | >> | [<>]& | >\| | [<>] ) )
  | (?P<single> '[^']*+' )
  | (?P<escaped> \\. )
  | (?P<opens> " | \$\( | \$\{ )
  | (?P<filled> \$[A-Za-z_]\w*+ | \$[0-9@*\#?$!-] | `[^`]*+` | \$'(?:[^'\\]|\\.)*+' )
  | (?P<plain> [^ \t\r\n;&|()<>'"\\$`]++ | \$(?![({]) )
    """,
    re.VERBOSE | re.DOTALL | re.ASCII,
)
# What may stand in quotes, in $(...) and in ${...}, each by what ends it, and what ends what begins there.
_INSIDE = {
    '"': re.compile(r"""\\.|`[^`]*+`|\$[({]|["]""", re.DOTALL),
    ")": re.compile(r"""\\.|`[^`]*+`|'[^']*+'|\$[({]|["()]""", re.DOTALL),
    "}": re.compile(r"""\\.|`[^`]*+`|\$[({]|["}]""", re.DOTALL),
}
_CLOSES = {'"': '"', "$(": ")", "(": ")", "${": "}"}
_MOST_LEVELS = 100
_OF_WORDS = ("single", "double", "escaped", "filled", "plain")
_ESCAPED = re.compile(r"\\.", re.DOTALL)
# Without quotes: what a shell takes for a home, for names of files, or for several words.
_EXPANDED = re.compile(r"[*?]|\[[^\[\]]++\]|\{(?=[^{}]*(?:,|\.\.))[^{}]*+\}")
_HOME = re.compile(r"(?:[A-Za-z_]\w*+=)?~", re.ASCII)
_IN_QUOTES = re.compile(r"""\\(["\\$`])|\\\n""")


@dataclass(frozen=True)
class Word:
    """One word as the shell hands it on; ``fills``: the parts of it that the shell would put something in place of.

    ``expanded``: those that it may put words in place of, as ``~`` and ``*.pt``.
    """

    text: str
    fills: tuple[str, ...] = ()
    expanded: tuple[str, ...] = ()


@dataclass
class Command:
    """The words of one command, its line in the script, and the words behind ``<`` and ``>``, which are none of it."""

    line: int = 0
    words: list[Word] = field(default_factory=list)
    files: list[Word] = field(default_factory=list)
    ends_branch: bool = False  # of a case: ;; stands behind it, maybe with no word before

    def __str__(self) -> str:
        return " ".join(word.text for word in self.words)


def as_words(argv: Sequence[str]) -> list[Word]:
    """Take words that a shell, or nobody, has split; a ``$NAME`` in one is told as in a script."""
    return [Word(text, tuple(part for part in _FILLS.findall(text) if part != "$$")) for text in argv]


def split_script(text: str) -> list[Command]:
    """Split a script into its commands. Raises: SpecError with the line; so where there are very many of them."""
    found: list[Command] = []
    for command in _Splitter(text).commands():
        found += [command] if command.words or command.ends_branch else []
        if len(found) > _MOST_COMMANDS:
            raise SpecError(f"line {command.line}: has more than {_MOST_COMMANDS:,} commands: give fewer")
    return found


class _Splitter:
    """One pass over a script."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0
        self._line = 1
        self._ends: list[str] = []  # of the here-documents that begin behind this line

    def commands(self) -> Iterator[Command]:
        command, pieces, is_file, num_words = Command(), list[tuple[str, str]](), False, 0
        for number, (kind, piece, line) in enumerate(self._pieces()):
            if number == _MOST_PIECES:
                raise SpecError(f"line {line}: has more than {_MOST_PIECES:,} blanks, quotes and words: give fewer")
            if kind in _OF_WORDS:
                command.line = command.line or line
                pieces.append((kind, piece))
                continue
            if pieces:
                num_words += 1
                if num_words > _MOST_WORDS:
                    raise SpecError(f"line {line}: has more than {_MOST_WORDS:,} words: give fewer")
                word = _join(pieces)
                (command.files if is_file else command.words).append(word)
                if is_file and self._ends and not self._ends[-1]:
                    self._ends[-1] = word.text
                pieces, is_file = [], False
            if kind == "redirect":
                is_file = True
                self._ends += [""] if piece.endswith(("<<", "<<-")) else []
            elif kind == "end":
                command.ends_branch = piece == ";;"
                yield command
                command, is_file = Command(), False
        yield command

    def _pieces(self) -> Iterator[tuple[str, str, int]]:
        while self._at < len(self._text):
            found = _PIECE.match(self._text, self._at)
            if found is None:
                sign = self._text[self._at]
                raise SpecError(f"line {self._line}: {sign!r} begins what does not end: close it")
            piece, kind, line = found[0], str(found.lastgroup), self._line
            if kind == "opens":
                piece, kind = self._read_to_end(piece), "double" if piece == '"' else "filled"
            self._at += len(piece)
            self._line += piece.count("\n")
            yield kind, piece, line
            if piece == "\n" and self._ends:
                self._pass_documents()
        yield "end", "\n", self._line

    def _read_to_end(self, opened: str) -> str:
        """Return what begins here with ``opened``, with all that stands inside of it."""
        closes, at = [_CLOSES[opened]], self._at + len(opened)
        while closes:
            found = _INSIDE[closes[-1]].search(self._text, at)
            if found is None or len(closes) > _MOST_LEVELS:
                raise SpecError(f"line {self._line}: {opened!r} begins what does not end: close it")
            at = found.end()
            if found[0] == closes[-1]:
                closes.pop()
            elif found[0] in _CLOSES:
                closes.append(_CLOSES[found[0]])
        return self._text[self._at : at]

    def _pass_documents(self) -> None:
        """Go on behind the here-documents that were begun."""
        for end in self._ends:
            begun, line = self._line, None
            while line != end:
                if self._at >= len(self._text):
                    raise SpecError(f"line {begun}: the text up to {shown(repr(end), most=60)} has no end: give one")
                after = self._text.find("\n", self._at) + 1 or len(self._text) + 1
                line = self._text[self._at : after - 1].lstrip("\t").removesuffix("\r")
                self._at = after
                self._line += 1
        self._ends.clear()


def _join(pieces: Sequence[tuple[str, str]]) -> Word:
    """Make one word of what stands there without a blank."""
    texts, fills, expanded = list[str](), list[str](), list[str]()
    for number, (kind, piece) in enumerate(pieces):
        if kind == "single":
            texts.append(piece[1:-1])
        elif kind == "escaped":
            texts.append(piece[1:])
        elif kind == "double":
            fills += _FILLS.findall(_ESCAPED.sub("", piece))
            texts.append(_IN_QUOTES.sub(lambda found: found[1] or "", piece[1:-1]))
        else:
            fills += [piece] if kind == "filled" else []
            is_home = not number and _HOME.match(piece)
            expanded += [piece] if kind == "plain" and (is_home or _EXPANDED.search(piece)) else []
            texts.append(piece)
    return Word("".join(texts), tuple(fills), tuple(expanded))
