"""The filter that decides what of a rank's output is shown.

A node is not trusted. Nothing from it runs in the notebook: JavaScript and widget views are dropped everywhere, HTML
and SVG are shown only from ranks on this machine, which are as trusted as the cell that the user wrote, and from hosts
that the user trusts (deploy/trust.py).
"""

from __future__ import annotations

import base64
import binascii
import codecs
import itertools
import re
import string
import textwrap
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ...errors import behind_ours
from ...text import escape, printable
from ...wire import SIZES, Completions, Message
from .image_size import Size, read_size

Bundle = dict[str, Any]

_ALWAYS = ("text/plain", "image/png", "image/jpeg", "image/gif", "application/json")
_IMAGES = ("image/png", "image/jpeg", "image/gif")
_BASE64, _BLANKS = string.ascii_letters.encode() + b"0123456789+/", b" \t\r\n\v\f"
MOST_TEXT_CHARS = 4 << 20  # of one shown text; in JSON, of all texts together
MOST_CHARS_AT_FIRST = 200_000  # of one text of another machine, in its cell: a page needs an element for each colour
_LONGEST_SIDE = 10_000  # in pixels, of an image as shown
_MOST_PIXELS = 50_000_000  # of an image file: a browser needs four bytes or more for each
_MOST_HEADER_CHARS = 8 << 20  # of an image, searched for its size
_MOST_BITS = 1024  # of an int: more than the largest float has
_MAX_DEPTH = 20  # of JSON that is shown
_MAX_NAME_CHARS, _MOST_VARIABLE_CHARS = 300, 80
_MOST_COMPLETIONS, _LONGEST_COMPLETION = 2000, 200
_NAMES = re.compile(r"\.?\w+(?:\.\w+)*=?")  # also of an attribute, a module, an argument; or a number as a key
_KEY = re.compile(r"'[^'\"\\]*'|\"[^'\"\\]*\"")
_FROM_THIS_MACHINE = ("text/html", "image/svg+xml", "text/markdown", "text/latex")
# colours (SGR) are kept; other escape sequences, and control characters but tab, newline and return, are removed
_COLOURS = r"\x1b\[[0-9;:]{0,64}m"
_MOVES = r"\x08+|\x1b\[[0-9]{0,9}[A-GJK]"  # cursor moves and erasing: allowed within a rank's own lines only
_OTHERS = (
    r"\x1b\[[0-?]*[ -/]*[@-~]?"  # control sequences
    r"|\x1b[\]PX^_][^\x07\x1b\n]*(?:\x07|\x1b\\)?"  # strings for the terminal: titles, links, clipboard
    r"|\x1b[ -/]*[0-~]?"
    r"|\x08+|[\x00-\x07\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f-\x9f]+"
)
_COLOUR = re.compile(_COLOURS)
_BESIDE_IMAGE = "    "  # indented, so that no line passes for one with a rank's label
_ESCAPES = re.compile(f"({_COLOURS})|{_OTHERS}")
_ESCAPES_BUT_MOVES = re.compile(f"({_COLOURS}|{_MOVES})|{_OTHERS}")
_BEGUN = re.compile(r"\x1b(?:\[[0-?]*[ -/]*|[\]PX^_][^\x07\x1b\n]*\x1b?|[ -/]*)\Z")
_MAX_BEGUN_CHARS = 100
_HARMLESS = b"\t\n\r" + bytes(number for number in range(32, 256) if number not in (0x7F, 0xC2))  # 0xC2: C1 controls


def clean_text(text: str, *, keeps_moves: bool = False) -> str:
    """Remove all terminal control sequences but colours; the result can be encoded as UTF-8.

    With ``keeps_moves``, also keep those that move the cursor or erase, for callers that draw a rank's own lines with
    them.
    """
    if not _NEEDS_CLEANING.search(text):
        return text
    escapes = _ESCAPES_BUT_MOVES if keeps_moves else _ESCAPES
    return _SURROGATES.sub("\ufffd", escapes.sub(lambda match: match[1] or "", text))


def without_colours(text: str) -> str:
    """Remove the colours from clean text."""
    return _COLOUR.sub("", text)


def clean_words(text: str) -> str:
    """Clean text that follows other text on its line: it cannot move back and overwrite that."""
    return _OTHER_ENDS.sub("\n", clean_text(text))


class PieceCleaner:
    """A cleaner of text that arrives in pieces, which may end within a character or a control sequence.

    Cursor moves are kept.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._begun = ""  # of a control sequence

    def clean(self, piece: bytes) -> str:
        if not self._begun and not self._decoder.getstate()[0] and not piece.translate(None, _HARMLESS):
            return self._decoder.decode(piece)
        text = self._begun + self._decoder.decode(piece)
        self._begun = ""
        if (last := text.rfind("\x1b")) >= 0:
            before = text.rfind("\x1b", 0, last)  # the last may be the first half of a string terminator
            found = before >= 0 and _BEGUN.match(text, before) or _BEGUN.match(text, last)
            if found:
                self._begun = _shortened(found[0])
                text = text[: found.start()]
        return clean_text(text, keeps_moves=True)


def _shortened(begun: str) -> str:
    """Shorten the beginning of a sequence without changing what follows it: a sequence may never end."""
    if begun[1:2] in ("]", "P", "X", "^", "_"):
        return begun[:2] + ("\x1b" if begun.endswith("\x1b") else "")
    if len(begun) <= _MAX_BEGUN_CHARS:
        return begun
    return ("\x1b[?" if begun[1] == "[" else "\x1b") + (" " if begun[-1] in " !\"#$%&'()*+,-./" else "")


def one_line(text: str, *, most_chars: int = _MAX_NAME_CHARS) -> str:
    """Return a name as one line that affects nothing around it; invisible characters are shown as escapes."""
    shown = printable(text[:most_chars], _escaped)
    return _UNSEEN.sub(lambda match: _escaped(match[0]), shown)


def variable_names(said: Iterable[str]) -> list[str]:
    """Filter the valid variable names out of what a node sent: no other words may appear within our texts."""
    short = (name for name in said if len(name) <= _MOST_VARIABLE_CHARS)
    return [name for name in short if name.isidentifier() and not _UNSEEN.search(name)]


def show_hidden(text: str) -> str:
    """Clean text, and show invisible characters and those that change the writing direction as escapes."""
    return _HIDDEN.sub(lambda match: _escaped(match[0]), clean_words(text))


def quote(text: str) -> str:
    """Clean a text of a node for use after our own words, so that no line of it passes for one of ours."""
    return behind_ours(show_hidden(text))


def safe_completions(found: Completions, *, code: str, position: int) -> Completions:
    """Keep the completions that only extend the text before the cursor: a name, an attribute, a key.

    A front end inserts a single completion without asking: none may rewrite the cell, or be more than it seems.
    """
    start = found.start if 0 <= found.start <= position else position
    before, typed = code[:start], code[start:position]
    offered = itertools.zip_longest(found.matches[:_MOST_COMPLETIONS], found.types[:_MOST_COMPLETIONS], fillvalue="")
    kept = [
        (match, one_line(kind))
        for match, kind in offered
        if start == found.start and found.end == position and match.startswith(typed) and _can_follow(before, match)
    ]
    matches, types = [match for match, _ in kept], [kind for _, kind in kept]
    return replace(found, matches=matches, types=types, start=start, end=position)


def _can_follow(before: str, match: str) -> bool:
    """Return whether ``match`` is a whole name after ``before``, or a dict's key there, whose quote may be open."""
    last = before[-1:]
    if len(match) > _LONGEST_COMPLETION or not match.isprintable() or _UNSEEN.search(match):
        return False
    if last in ("'", '"'):
        return before[:-1].rstrip("bBrRuU").endswith("[") and _KEY.fullmatch(f"{last}{match}{last}") is not None
    if last == "[" and _KEY.fullmatch(match):
        return True
    return _NAMES.fullmatch(match) is not None and not (_is_in_name(last) and _is_in_name(match[0]))


def _is_in_name(char: str) -> bool:
    return char == "_" or char.isalnum()


def _escaped(char: str) -> str:
    return " " if char in "\t\r\n" else escape(char)


def cleaned(message: Message) -> Message:
    """Return a message with all its texts cleaned; lists of texts are lists of names."""
    texts: dict[str, Any] = {}
    for name, value in vars(message).items():
        if isinstance(value, str):
            texts[name] = clean_words(value)
        elif isinstance(value, list) and value and isinstance(value[0], str):
            texts[name] = [one_line(text) for text in value]
    made: Message = replace(message, **texts)  # type: ignore[type-var]
    return made


_NEEDS_CLEANING = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")
_OTHER_ENDS = re.compile("\r\n?|[\u2028\u2029]")  # of lines
_SURROGATES = re.compile(r"[\ud800-\udfff]")
# Letters and marks that are drawn as nothing, or as a blank; some are valid in Python names.
_BLANK = "\\u034f\\u115f\\u1160\\u17b4\\u17b5\\u180b-\\u180f\\u2800\\u3164\\uffa0\\U000e0100-\\U000e01ef"
_HIDDEN = re.compile(rf"[\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff{_BLANK}]")
_UNSEEN = re.compile(rf"[\ufe00-\ufe0f{_BLANK}]")  # in a name; in a text, the first ones select how an emoji is drawn


def safe_bundle(bundle: object, *, is_this_machine: bool, rest_is_in: str = "") -> Bundle:
    """Return the part of a rich output that may be shown, always with a text/plain.

    Long texts are cut before they are cleaned.

    ``rest_is_in``: the command that shows the rest; a text is cut sooner then.
    """
    if not isinstance(bundle, dict):
        return {"text/plain": ""}
    allowed = _ALWAYS + (_FROM_THIS_MACHINE if is_this_machine else ())
    said = {mime: bundle[mime] for mime in allowed if mime in bundle}
    safe = {mime: value for mime, value in said.items() if isinstance(value, str) or mime == "application/json"}
    refused = {} if is_this_machine else {mime: fault for mime in safe if (fault := _fault_of_image(mime, safe[mime]))}
    safe = {mime: value for mime, value in safe.items() if mime not in refused}
    safe["text/plain"] = _clean_beginning(safe.get("text/plain", ""), rest_is_in)
    if not is_this_machine and not safe.keys().isdisjoint(_IMAGES):  # a terminal shows it in place of the image
        safe["text/plain"] = textwrap.indent(without_colours(safe["text/plain"]), _BESIDE_IMAGE, lambda line: True)
    told = [f"... an {mime} {fault} is not shown ..." for mime, fault in refused.items()]
    safe["text/plain"] = "\n".join(filter(None, [safe["text/plain"], *told]))
    if "application/json" in safe:
        safe["application/json"] = _JsonCleaner().clean(safe["application/json"])
    if sizes := _safe_sizes(bundle.get(SIZES), safe):
        safe[SIZES] = sizes
    return safe


def _safe_sizes(said: object, shown: Bundle) -> dict[str, dict[str, int]]:
    """Return the valid sizes for showing the images, in pixels."""
    sizes: dict[str, dict[str, int]] = {}
    for mime in _IMAGES:
        of = said.get(mime) if isinstance(said, dict) and mime in shown else None
        if isinstance(of, dict) and (
            size := {name: of[name] for name in ("width", "height") if _is_size(of.get(name))}
        ):
            sizes[mime] = size
    return sizes


def _is_size(value: object) -> bool:
    return type(value) is int and 0 < value <= _LONGEST_SIDE


def _clean_beginning(text: str, rest_is_in: str) -> str:
    """Clean a text, cut if long: cleaning and drawing tens of megabytes take most of a minute."""
    most_chars = MOST_CHARS_AT_FIRST if rest_is_in else MOST_TEXT_CHARS
    if len(text) <= most_chars:
        return clean_words(text)
    advice = f", read it with {rest_is_in}" if rest_is_in else ""
    return f"{clean_words(text[:most_chars])}\n... the rest of {len(text):,} characters is not shown{advice} ..."


def _fault_of_image(mime: str, value: str) -> str:
    """Say why an image is not shown; empty if it may be, and for other types."""
    if mime not in _IMAGES:
        return ""
    size = _size_of_image(mime, value)
    if size is None:
        return "whose size cannot be read"
    width, height = size
    return f"of {width:,} x {height:,} pixels" if width * height > _MOST_PIXELS else ""


def _size_of_image(mime: str, value: str) -> Size | None:
    """Read the size of an image; None if it is not such an image, or could break out of a page's attribute."""
    try:
        rest = value.encode("ascii").translate(None, _BASE64 + _BLANKS)  # not split: that takes memory
        if rest and (rest not in (b"=", b"==") or value.rstrip().rstrip("=").count("=")):
            return None
        head = value[:_MOST_HEADER_CHARS].encode("ascii").translate(None, _BLANKS)
        return read_size(mime, base64.b64decode(head[: len(head) // 4 * 4]))
    except (binascii.Error, ValueError):
        return None


class _JsonCleaner:
    """A cleaner of the texts of one JSON value, up to a total size."""

    def __init__(self) -> None:
        self._room_chars = MOST_TEXT_CHARS

    def clean(self, value: Any, *, depth: int = 0) -> Any:
        """Clean all texts, and cut off levels so deep that a front end could not serialise them."""
        if isinstance(value, str):
            return self._clean_text(value)
        if isinstance(value, int) and value.bit_length() > _MOST_BITS:
            return str(value)  # JavaScript has no such number, and many take long to write
        if not isinstance(value, (list, dict)):
            return value
        if depth == _MAX_DEPTH:
            return "..."
        if isinstance(value, list):
            return [self.clean(item, depth=depth + 1) for item in value]
        return {self._clean_text(key): self.clean(item, depth=depth + 1) for key, item in value.items()}

    def _clean_text(self, text: str) -> str:
        shown = text[: self._room_chars]
        self._room_chars -= len(shown)
        return clean_text(shown)
