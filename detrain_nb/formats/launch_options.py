"""The options of torchrun and accelerate launch on a command line, and the program that follows them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..errors import SpecError
from ..storage import shown
from ..text import show
from .shell_words import Word

__all__ = ["ACCELERATE", "TORCHRUN", "Launcher", "Options", "read_options"]

_MORE_OPTIONS = re.compile(r"\$\{?\w*(?:ARGS|OPTS|OPTIONS|FLAGS)\w*(?:\[[@*]\])?\}?", re.IGNORECASE | re.ASCII)
_WHOLE = re.compile(r"[0-9]{1,15}")


@dataclass(frozen=True)
class Launcher:
    """A command: its options, spelled with ``-``, and the meanings of its single letters.

    ``valued`` are the options with a value, which may be abbreviated as in argparse; None: all options but the flags.
    """

    name: str
    flags: frozenset[str]
    valued: frozenset[str] | None
    letters: Mapping[str, str]

    def find(self, name: str) -> str:
        """Return the full name of an option, spelled with ``-``. Raises: SpecError."""
        wanted = name.replace("_", "-")
        if self.valued is None or wanted in self.flags | self.valued:
            return wanted
        begun = sorted(option for option in self.flags | self.valued if option.startswith(wanted))
        if len(begun) == 1:
            return begun[0]
        said = f"{self.name} --{shown(name, most=60)}:"
        if begun:
            raise SpecError(f"{said} could be {' or '.join(f'--{each}' for each in begun[:4])}: write it out")
        raise SpecError(f"{said} no such option: correct it, or leave it out")


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


TORCHRUN = Launcher(  # of torch 2.13; --use-env is torch.distributed.launch's
    "torchrun",
    flags=_names("standalone module no-python run-path virtual-local-rank use-env"),
    valued=_names(
        "nnodes nproc-per-node rdzv-backend rdzv-endpoint rdzv-id rdzv-conf max-restarts monitor-interval start-method "
        "event-log-handler role log-dir redirects tee local-ranks-filter duplicate-stdout-filters "
        "duplicate-stderr-filters node-rank master-addr master-port local-addr logs-specs numa-binding "
        "signals-to-handle shutdown-timeout"
    ),
    letters={"m": "module", "r": "redirects", "t": "tee"},
)
ACCELERATE = Launcher(  # of accelerate 1
    "accelerate launch",
    flags=_names(
        "quiet cpu multi-gpu tpu ipex enable-cpu-affinity dynamo-use-fullgraph dynamo-use-dynamic "
        "dynamo-use-regional-compilation use-deepspeed use-fsdp use-megatron-lm use-xpu use-parallelism-config "
        "same-network module no-python tpu-cluster no-tpu-cluster tpu-use-sudo downcast-bf16 debug "
        "fp8-use-autocast-during-eval"
    ),
    valued=None,
    letters={"m": "module", "q": "quiet", "t": "tee"},
)


@dataclass
class Options:
    """The options and program of one command line; options that are not taken are reported as left out."""

    launcher: Launcher
    given: dict[str, Word] = field(default_factory=dict)
    program: list[Word] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    has_more: bool = False  # in a variable of the shell

    def has(self, name: str) -> bool:
        """Take a flag; returns whether it was given."""
        return self.given.pop(name, None) is not None

    def text(self, name: str, default: str = "") -> str:
        """Take the value of an option; one that the shell would expand is left out."""
        word = self.given.pop(name, None)
        if word is None:
            return default
        if word.fills:
            self.leave(name, f"the shell expands {shown(word.fills[0], most=60)}: write out the value")
            return default
        return word.text

    def whole(self, name: str, default: int, *, least: int = 0, most: int) -> int:
        """Take a whole number. Raises: SpecError."""
        text = self.text(name, str(default))
        if not _WHOLE.fullmatch(text) or not least <= int(text) <= most:
            raise self.fault(name, text, f"a whole number, {least} to {most:,}")
        return int(text)

    def fault(self, name: str, text: str, advice: str) -> SpecError:
        return SpecError(f"{self.launcher.name} --{name} {show(text)}: give {advice}")

    def leave(self, name: str, reason: str) -> None:
        """Report an option as left out, without its value, which may be a secret."""
        self.given.pop(name, None)
        self.left_out.append(f"--{name}: {reason}")


def read_options(launcher: Launcher, words: Sequence[Word]) -> Options:
    """Take the options at the start of ``words``, and the program after them. Raises: SpecError."""
    options, at, has_end = Options(launcher), 0, False
    while at < len(words) and _is_option(words[at]):
        word = words[at]
        at += 1
        if word.fills[:1] == (word.text,):
            options.left_out.append(
                f"{shown(word.text, most=60)}: options of {launcher.name} in a variable of the shell: write them out"
            )
            options.has_more = True
            continue
        if word.text == "--":
            has_end = True
            break
        name, value = _take_apart(launcher, word)
        if name in launcher.flags:
            value = Word("")
        elif value is None:
            if at == len(words):
                raise SpecError(f"{launcher.name} --{name} has no value: give one")
            value = words[at]
            at += 1
        options.given[name] = value
    options.program = list(words[at:])
    if not has_end and [word.text for word in words[at + 1 : at + 2]] == ["--"]:  # argparse drops the first one
        del options.program[1]
    if not options.program:
        raise SpecError(f"{launcher.name}: no program after its options: give a script, or -m and a module")
    return options


def _is_option(word: Word) -> bool:
    """Return whether a word is an option, or by its variable's name several: ``${DISTRIBUTED_ARGS[@]}``."""
    if word.fills[:1] == (word.text,):
        return bool(_MORE_OPTIONS.fullmatch(word.text))
    return word.text.startswith("-") and word.text != "-"


def _take_apart(launcher: Launcher, word: Word) -> tuple[str, Word | None]:
    if word.text.startswith("--"):
        name, has_value, value = word.text[2:].partition("=")
        return launcher.find(name), Word(value, word.fills) if has_value else None
    letter, value = word.text[1], word.text[2:].removeprefix("=")
    if letter not in launcher.letters:
        known = ", ".join(f"-{each}" for each in launcher.letters)
        raise SpecError(f"{launcher.name} -{shown(letter)}: no such option: give one of {known}")
    return launcher.letters[letter], Word(value, word.fills) if value else None
