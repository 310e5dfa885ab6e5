"""Expansion of shell variables whose value is certain: set once, to plain text, or by a number of #SBATCH.

A variable that a branch, a loop, another shell or a command may change is not expanded, nor is a likely secret.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from .command_words import ASSIGNMENT
from .secret_words import may_be_secret, warn_of_secrets
from .shell_words import FILLS, Command, Word

__all__ = ["BATCH_NUMBERS", "Values", "read_batch_options"]

BATCH_NUMBERS: Mapping[str, tuple[str, ...]] = {  # the variables that sbatch sets from an option
    **dict.fromkeys(("nodes", "N"), ("SLURM_NNODES", "SLURM_JOB_NUM_NODES")),
    **dict.fromkeys(("ntasks", "n"), ("SLURM_NTASKS", "SLURM_NPROCS")),
    **dict.fromkeys(("cpus-per-task", "c"), ("SLURM_CPUS_PER_TASK",)),
    "ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
    "gpus-per-node": ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"),
    "gres": ("SLURM_GPUS_ON_NODE",),
}
_BATCH_LINE = re.compile(r"^#SBATCH[ \t]++([^\n]*+)", re.MULTILINE)
_BATCH_OPTION = re.compile(r"--([A-Za-z][A-Za-z-]*+)=?(.*)|-([A-Za-z])=?(.*)", re.DOTALL)
_NUMBER, _GPUS = re.compile("[1-9][0-9]{0,5}"), re.compile("gpu:(?:[A-Za-z][A-Za-z0-9_.-]*+:)?([1-9][0-9]{0,2})")
_MOST_CHARS, _MOST_FILLS = 1000, 10  # of an #SBATCH line; in one word
_PLAIN = re.compile(r"[A-Za-z0-9_./:,@%+-]{1,100}")
_OPENS, _CLOSES = ("if", "case", "for", "while", "until", "select", "{"), ("fi", "esac", "done", "}")
_KEYWORDS = (*_OPENS, *_CLOSES, "then", "else", "elif", "do", "!", "time")
_CHANGES = re.compile(r"([A-Za-z_]\w*+) ?(?:\+\+|--|[-+*/%]?=|\[)", re.ASCII)
_NAME, _DEFAULT = re.compile(r"[A-Za-z_]\w*+", re.ASCII), re.compile(r"\$\{(\w++):?=", re.ASCII)
_SETTERS = (
    *("read", "unset", "getopts", "mapfile", "readarray", "let", "printf"),
    *("declare", "typeset", "local", "readonly"),
)


class Values:
    """The certain values of variables in one shell's commands; ``used`` collects the names of those expanded."""

    def __init__(self, commands: Sequence[Command], known: Mapping[str, str], *, used: set[str]) -> None:
        times = Counter(name for name, _ in _list_changes(commands))
        self._once = {name for name, is_sure in _list_changes(commands) if is_sure and times[name] == 1}
        self.known = {name: value for name, value in known.items() if name not in times}
        self._used = used

    def note(self, name: str, word: Word) -> None:
        """Record the value of an assignment, if the variable keeps it."""
        is_plain = not word.fills and _PLAIN.fullmatch(word.text)
        if name in self._once and is_plain and not may_be_secret(name, word.text):
            self.known[name] = word.text

    def fill(self, words: Sequence[Word]) -> list[Word]:
        """Return the words with certain variables expanded."""
        filled: list[Word] = []
        for before, word in zip([Word(""), *words], words):
            new = self._fill(word)
            if new is not word and any(warn_of_secrets([before.text, new.text])):
                new = word
            if new is not word:
                self._used.update(_name_of(fill) for fill in word.fills if fill not in new.fills)
            filled.append(new)
        return filled

    def _fill(self, word: Word) -> Word:
        if (
            not word.fills
            or len(word.fills) > _MOST_FILLS
            or not any(_name_of(each) in self.known for each in word.fills)
        ):
            return word
        if FILLS.findall(word.text) != [fill for fill in word.fills if fill[0] in "$`"]:  # some are quoted
            return word

        def put(found: re.Match[str]) -> str:
            return self.known.get(_name_of(found[0]), found[0])

        left = tuple(fill for fill in word.fills if _name_of(fill) not in self.known)
        return replace(word, text=FILLS.sub(put, word.text), fills=left, written=FILLS.sub(put, word.written))


def _name_of(fill: str) -> str:
    return fill.strip("${}") if fill.startswith("$") else ""


def _list_changes(commands: Sequence[Command]) -> Iterator[tuple[str, bool]]:
    """Yield each variable that a command changes, and whether the assignment is certain to run as written."""
    depth = 0
    for command in commands:
        texts, at = [word.text for word in command.words], 0
        while at < len(texts) and texts[at] in _KEYWORDS:
            depth += (texts[at] in _OPENS) - (texts[at] in _CLOSES)
            at += 1
        rest = texts[at:]
        sets = rest[1:] if rest[:1] == ["export"] else rest
        is_sure = command.is_sure and not at and depth < 1
        if sets is not rest or all(map(_CHANGES.match, sets)):
            found = ((_CHANGES.match(text), ASSIGNMENT.fullmatch(text)) for text in sets)
            yield from ((change[1], is_sure and bool(is_given)) for change, is_given in found if change)
        elif change := _CHANGES.match(" ".join(rest[:2])):  # N += 1 in ((...))
            yield change[1], False
        elif rest[0] in _SETTERS or texts[at - 1 : at] in (["for"], ["select"]):
            yield from ((name[0], False) for text in rest if (name := _NAME.match(text)))
        yield from ((name[1], False) for word in command.words for fill in word.fills if (name := _DEFAULT.match(fill)))
        if command.array:
            yield command.array, False


def read_batch_options(text: str) -> tuple[list[str], dict[str, str]]:
    """Return the options in #SBATCH lines, and the values of the variables that sbatch sets from them."""
    given: dict[str, set[str]] = {}
    for line in _BATCH_LINE.findall(text):
        words = _split(line)
        for word, after in zip(words, [*words[1:], ""]):
            if match := _BATCH_OPTION.fullmatch(word):
                given.setdefault(match[1] or match[3], set()).add(match[2] or match[4] or after)
    numbers: dict[str, set[str]] = {}
    for name, values in given.items():
        for variable in BATCH_NUMBERS.get(name, ()):
            numbers.setdefault(variable, set()).update(_read_number(name, value) for value in values)
    return list(given), {
        name: next(iter(found)) for name, found in numbers.items() if len(found) == 1 and "" not in found
    }


def _read_number(name: str, value: str) -> str:
    if name == "gres":
        gpus = _GPUS.fullmatch(value)
        return gpus[1] if gpus else ""
    return value if _NUMBER.fullmatch(value) else ""


def _split(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True) if len(line) < _MOST_CHARS else line.split()
    except ValueError:
        return line.split()
