"""The commands of a shell script, split but never run: nothing is expanded, but expansions are reported.

The time is linear in the length. Control flow (if, case, loops, functions) is not followed: all commands are
returned, in order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ..documents.content import MOST_VALUES
from ..errors import SpecError
from ..storage import shown

__all__ = ["FILLS", "Command", "Word", "as_words", "split_script"]

_MOST_COMMANDS, _MOST_WORDS, _MOST_PIECES = 10_000, MOST_VALUES, 2 * MOST_VALUES
# What the shell expands; a match ends at the next $ at the latest, so one pass finds all.
FILLS = re.compile(r"\$\{[^}$]*+\}?|\$\([^)$]*+\)?|\$[A-Za-z_]\w*+|\$[0-9@*#?$!-]|`[^`]*+`?", re.ASCII)
_PIECE = re.compile(
    r"""
    (?P<blank> [ \t\r]++ )
  | (?P<joined> \\\r?\n )
  | (?P<comment> (?<![^\s;&|()]) \# )
  | (?P<end> \n | ;; | && | \|\| | [;|()] | &(?!>) )
  | (?P<redirect> &>>? | (?:(?<![^\s;&|()]) [0-9]{1,3})? (?: <<< | <<-? | >> | [<>]& | >\| | [<>] ) )
  | (?P<single> '[^']*+' )
  | (?P<escaped> \\. )
  | (?P<opens> " | \$\( | \$\{ )
  | (?P<filled> \$[A-Za-z_]\w*+ | \$[0-9@*\#?$!-] | `[^`]*+` | \$'(?:[^'\\]|\\.)*+' )
  | (?P<plain> [^ \t\r\n;&|()<>'"\\$`]++ | \$(?![({]) )
    """,
    re.VERBOSE | re.DOTALL | re.ASCII,
)
# What to look for inside quotes, $(...) and ${...}, keyed by what closes them: escapes, nested openings, the close.
_INSIDE = {
    '"': re.compile(r"""\\.|`[^`]*+`|\$[({]|["]""", re.DOTALL),
    ")": re.compile(r"""\\.|`[^`]*+`|'[^']*+'|\$[({]|["()]""", re.DOTALL),
    "}": re.compile(r"""\\.|`[^`]*+`|\$[({]|["}]""", re.DOTALL),
}
_NO_BEGIN = re.compile("#|[0-9]++")
_DOCUMENT = re.compile("[0-9]*<<-?")  # the redirect that begins a here-document
_WHOLE = re.compile(r"1?>\|?")  # a redirect that makes stdout the whole content of a file
_CLOSES = {'"': '"', "$(": ")", "(": ")", "${": "}"}
_MOST_LEVELS = 100
_OF_WORDS = ("single", "double", "escaped", "filled", "plain")
# What the shell expands to file names, or to several words, unless quoted.
_FILES, _BRACES = re.compile(r"[*?]|\[[^\[\]]++\]"), re.compile(r"\{([^{}]*+)\}")
_TILDE = re.compile(r"(?:[A-Za-z_]\w*+=(?:[^:~]*+:)*+)?(~[^:]*+)", re.ASCII)
_ARRAY = re.compile(r"([A-Za-z_]\w*+)\+?=", re.ASCII)
_ESCAPED = re.compile(r"\\.", re.DOTALL)
_IN_QUOTES = re.compile(r"""\\(["\\$`])|\\\n""")


@dataclass(frozen=True)
class Word:
    """One word as the shell passes it on; ``fills`` are the parts that the shell would expand.

    ``written`` is its spelling in the script, with its quotes.
    """

    text: str
    fills: tuple[str, ...] = ()
    written: str = field(default="", compare=False)

    def is_known(self, *names: str) -> bool:
        """Return whether it expands alike in any shell: it has only ``~``, and variables of these names."""
        return all(fill[0] == "~" or fill.strip("${}") in names for fill in self.fills)


@dataclass
class Command:
    """The words of one command, its line in the script, and the files of its redirects."""

    line: int = 0
    words: list[Word] = field(default_factory=list)
    files: list[Word] = field(default_factory=list)
    outputs: dict[str, bool] = field(default_factory=dict)  # files after >; whether its output is all they contain
    is_sure: bool = False  # this shell runs it, apart from keywords: no &&, no ||, no pipe, no parentheses
    ends_branch: bool = False  # of a case: ;; follows it, possibly with no words
    array: str = ""  # the name of a variable that is set to these words, which are then not a command

    def __str__(self) -> str:
        return " ".join(word.text for word in self.words)


def as_words(argv: Sequence[str]) -> list[Word]:
    """Return words of an argv; a ``$NAME`` in one is reported as an expansion, as in a script."""
    return [Word(text, tuple(part for part in FILLS.findall(text) if part != "$$")) for text in argv]


def split_script(text: str) -> list[Command]:
    """Split a script into its commands. Raises: SpecError with the line, also when there are too many."""
    found: list[Command] = []
    for command in _Splitter(text).commands():
        found += [command] if command.words or command.ends_branch else []
        if len(found) > _MOST_COMMANDS:
            raise SpecError(f"line {command.line}: more than {_MOST_COMMANDS:,} commands up to here: give fewer")
    return found


class _Splitter:
    """One pass over a script, which yields its commands."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0
        self._line = 1
        self._ends: list[tuple[str, bool]] = []  # of here-documents; whether tabs may precede them

    def commands(self) -> Iterator[Command]:
        command, pieces, is_file, num_words = Command(), list[tuple[str, str]](), False, 0
        redirect, before, depth = "", "\n", 0
        for number, (kind, piece, line) in enumerate(self._pieces()):
            if number == _MOST_PIECES:
                raise SpecError(f"line {line}: more than {_MOST_PIECES:,} blanks, quotes, words up to here: give fewer")
            if piece == "(" and kind == "end" and not command.words and (name := _name_array(pieces)):
                command, pieces = Command(line=command.line, array=name), []
                continue
            if kind == "joined":
                continue
            if kind in _OF_WORDS:
                command.line = command.line or line
                pieces.append((kind, piece))
                continue
            if pieces:
                num_words += 1
                if num_words > _MOST_WORDS:
                    raise SpecError(f"line {line}: more than {_MOST_WORDS:,} words up to here: give fewer")
                word = _join(pieces)
                is_copy = redirect[-1:] == "&" and (word.text.isdecimal() or word.text == "-")  # as in 2>&1
                if not is_file:
                    command.words.append(word)
                elif not is_copy:
                    command.files.append(word)
                    if "<" not in redirect:
                        command.outputs[word.text] = bool(_WHOLE.fullmatch(redirect))
                if is_file and _DOCUMENT.fullmatch(redirect):
                    self._ends.append((word.text, redirect.endswith("-")))
                pieces, is_file = [], False
            if kind == "redirect":
                is_file, redirect = True, piece
            elif kind == "end" and (piece != "\n" or not command.array):
                command.ends_branch = piece == ";;"
                command.is_sure = not depth and before in ("\n", ";", "&") and piece in ("\n", ";")
                depth = max(0, depth + {"(": 1, ")": -1}.get(piece, 0))
                if command.words or piece != "\n" or before not in ("&&", "||", "|"):
                    before = piece
                yield command
                command, is_file = Command(), False
        yield command

    def _pieces(self) -> Iterator[tuple[str, str, int]]:
        is_in_word = False
        while self._at < len(self._text):
            found = _PIECE.match(self._text, self._at)
            if found is None:
                sign = self._text[self._at]
                raise SpecError(f"line {self._line}: {sign!r} is not closed: close it")
            piece, kind, line = found[0], str(found.lastgroup), self._line
            if kind == "opens":
                piece, kind = self._read_to_end(piece), "double" if piece == '"' else "filled"
            elif is_in_word and kind in ("comment", "redirect") and (plain := _NO_BEGIN.match(piece)):
                piece, kind = plain[0], "plain"  # after an escaped character, which looks like the end of a word
            elif kind == "comment":
                piece = self._text[self._at : self._line_end()]
            is_in_word = kind in _OF_WORDS or (is_in_word and kind == "joined")
            self._at += len(piece)
            self._line += piece.count("\n")
            yield kind, piece, line
            if piece == "\n" and self._ends:
                self._pass_documents()
        yield "end", "\n", self._line

    def _line_end(self) -> int:
        end = self._text.find("\n", self._at)
        return len(self._text) if end < 0 else end

    def _read_to_end(self, opened: str) -> str:
        """Return the text from ``opened`` to what closes it."""
        closes, at = [_CLOSES[opened]], self._at + len(opened)
        while closes:
            found = _INSIDE[closes[-1]].search(self._text, at)
            if found is None or len(closes) > _MOST_LEVELS:
                raise SpecError(f"line {self._line}: {opened!r} is not closed: close it")
            at = found.end()
            if found[0] == closes[-1]:
                closes.pop()
            elif found[0] in _CLOSES:
                closes.append(_CLOSES[found[0]])
        return self._text[self._at : at]

    def _pass_documents(self) -> None:
        """Skip the here-documents that were begun."""
        for end, is_indented in self._ends:
            begun, line = self._line, None
            while line != end:
                if self._at >= len(self._text):
                    raise SpecError(f"line {begun}: the here-document has no line {shown(repr(end), most=60)}: add it")
                after = self._text.find("\n", self._at) + 1 or len(self._text) + 1
                line = self._text[self._at : after - 1].removesuffix("\r")
                line = line.lstrip("\t") if is_indented else line
                self._at = after
                self._line += 1
        self._ends.clear()


def _name_array(pieces: Sequence[tuple[str, str]]) -> str:
    """Return the name of the variable whose array begins after these pieces; empty if none does."""
    match = _ARRAY.fullmatch(pieces[0][1]) if len(pieces) == 1 and pieces[0][0] == "plain" else None
    return match[1] if match else ""


def _is_expanded(plain: str) -> bool:
    return bool(_FILES.search(plain)) or any("," in each or ".." in each for each in _BRACES.findall(plain))


def _join(pieces: Sequence[tuple[str, str]]) -> Word:
    """Join adjacent pieces into one word."""
    texts, fills = list[str](), list[str]()
    if pieces[0][0] == "plain" and (home := _TILDE.match(pieces[0][1])):
        fills.append(home[1])
    for kind, piece in pieces:
        if kind == "single":
            texts.append(piece[1:-1])
        elif kind == "escaped":
            texts.append(piece[1:])
        elif kind == "double":
            fills += FILLS.findall(_ESCAPED.sub("", piece))
            texts.append(_IN_QUOTES.sub(lambda found: found[1] or "", piece[1:-1]))
        else:
            fills += [piece] if kind == "filled" or _is_expanded(piece) else []
            texts.append(piece)
    return Word("".join(texts), tuple(fills), "".join(piece for _, piece in pieces))
