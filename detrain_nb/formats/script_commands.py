"""What the commands of a shell's script do up to where they start ranks, read and not run."""

from __future__ import annotations

import itertools
import posixpath
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..documents.content import MOST_BYTES, MOST_VALUES, TOO_LARGE
from ..errors import SpecError
from ..launch import Program, Rendezvous, launch_job
from ..storage import shown
from .clone_import import Repository, read_clone
from .command_import import Launch, find_launcher, put_variables
from .command_words import ASSIGNMENT, KEYWORDS, find_text, name_before_text
from .job_import import read_job
from .job_script import FOLDER
from .secret_words import may_be_secret
from .shell_values import BATCH_NUMBERS, Values
from .shell_words import Command, Word, split_script

__all__ = ["Script", "take_all"]

_SETS_UP = ("module", "source", ".", "conda", "ulimit", "spack")
_WITHOUT_EFFECT = ("set", "then", "else", "fi", "do", "done", "esac", "{", "}", ":", "true", "exit", "wait")
_OF_NODE = ("HOME", "USER")  # variables that every node has
_MOST_VARIABLES, _MOST_PATH_CHARS = 1000, 4096
_MOST_COMMANDS, _MOST_FILLS = 20_000, 10_000  # in all texts of shells together
_SOURCE, _JOB_SPEC = f"${FOLDER}/source", f"${FOLDER}/job_spec.json"  # in the scripts that we export
_LAUNCH_ENV = launch_job(  # what every launch sets
    Rendezvous("c10d", "", ("", 0), max_restarts=1), Program("module", ("a",)), nodes=1, ranks=1, node_rank=0, python=""
).env


@dataclass
class Script:
    """What the commands of a script have done, up to here."""

    folder: str = ""
    left: str = ""  # the folder before that one
    variables: dict[str, Word] = field(default_factory=dict)
    filled: set[str] = field(default_factory=set)  # the names of those whose values are in words now
    values: Values = field(default_factory=lambda: Values([], {}, used=set()))
    own: dict[str, tuple[Word, int]] = field(default_factory=dict)  # not exported, with their lines
    repositories: list[Repository] = field(default_factory=list)
    setup: list[str] = field(default_factory=list)
    written: dict[str, tuple[str, int]] = field(default_factory=dict)  # files, with their texts and the lines of these
    used_lines: set[int] = field(default_factory=set)  # of texts of programs
    needed: list[str] = field(default_factory=list)  # variables without which it does not go on
    image: str = ""
    before_case: Script | None = None
    num_commands: int = 0
    num_fills: int = 0
    num_chars: int = 0  # in texts that shells are given
    num_seen: int = 0  # by all that it starts: variables, repositories
    launches: list[tuple[int, Launch]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    others: dict[str, list[int]] = field(default_factory=dict)  # commands that are not carried over, with their lines

    @property
    def job(self) -> dict[str, Any]:
        """What a script that we have exported says of its job; empty for any other."""
        found = self.written.get(_JOB_SPEC)
        return read_job(found[0]) if found is not None else {}

    def forget(self, path: str) -> None:
        """Say of a file no more what stands in it: who wrote it is a command that is not carried over."""
        if (found := self.written.pop(path, None)) is not None:
            self.others.setdefault("printf", []).append(found[1])

    def begin_case(self) -> None:
        self.before_case = replace(self, variables=dict(self.variables), setup=list(self.setup), before_case=None)

    def end_branch(self) -> None:
        """Forget what a branch of a case has done to the shell: another one runs instead of it."""
        if (before := self.before_case) is not None:
            self.folder, self.left = before.folder, before.left
            self.variables, self.setup = dict(before.variables), list(before.setup)


def take_all(script: Script, commands: Sequence[Command], values: Values) -> None:
    """Take the commands of one shell."""
    outer, script.values = script.values, values
    script.num_commands += len(commands)
    if script.num_commands > _MOST_COMMANDS:
        said = f"there are more than {_MOST_COMMANDS:,} commands up to here: give fewer"
        raise SpecError(f"line {commands[0].line}: {said}")
    for command in commands:
        script.num_fills += sum(len(word.fills) for word in command.words)
        may_fill = script.num_fills <= _MOST_FILLS  # what is not filled in is told
        _take(script, replace(command, words=values.fill(command.words) if may_fill else command.words))
    script.values = outer


def _take(script: Script, command: Command) -> None:
    for path in command.outputs:
        script.forget(_go(script.folder, path))
    if command.words:
        _take_words(script, command)
    if command.ends_branch:
        script.end_branch()


def _take_words(script: Script, command: Command) -> None:
    try:
        launch = find_launcher(command.words)
    except SpecError as exc:
        raise SpecError(f"line {command.line}: {exc}") from None
    texts = [word.text for word in command.words]
    begun = (text for text in texts if text not in KEYWORDS and not ASSIGNMENT.fullmatch(text))
    name = posixpath.basename(next(begun, texts[0]))
    if launch:
        _start(script, launch, command)
    elif command.array:
        script.own[command.array] = Word(""), command.line
    elif (text := find_text(texts)) is not None:
        script.left_out += name_before_text(texts, text)
        script.num_chars += 1000 + len(text)  # each is handed the variables, too
        if script.num_chars > MOST_BYTES:
            raise SpecError(f"line {command.line}: the texts of shells up to here are {TOO_LARGE}")
        _take_inner(script, command, split_script(text))
    elif name == "export" or _are_variables(texts):
        _take_variables(script, command, is_exported=name == "export")
    elif name == "cd" and len(texts) == 2 and (texts[1].startswith(_SOURCE) or command.words[1].is_known()):
        script.left, script.folder = script.folder, _go(script.folder, texts[1])
        if len(script.folder) > _MOST_PATH_CHARS:
            raise SpecError(f"line {command.line}: cd leads to a path of more than {_MOST_PATH_CHARS:,} characters")
    elif name == "git" and "clone" in texts:
        _take_clone(script, command)
    elif name == "git" and "checkout" in texts and script.repositories and not command.words[-1].fills:
        script.repositories[-1].git["ref"] = texts[-1].removeprefix("origin/")
    elif name in _SETS_UP and all(word.is_known(*_OF_NODE) for word in command.words):
        script.setup.append(" ".join(word.written for word in command.words))
    elif name == "runai":
        _take_runai(script, texts)
    elif not _take_ours(script, command, texts) and (name not in _WITHOUT_EFFECT or _sets_variable(texts)):
        script.others.setdefault(name, []).append(command.line)


def _are_variables(texts: Sequence[str]) -> bool:
    """Whether they give variables values, maybe behind a ``then``."""
    plain = [text for text in texts if text not in KEYWORDS]
    return bool(plain) and all(ASSIGNMENT.fullmatch(text.replace("+=", "=", 1)) for text in plain)


def _take_inner(script: Script, command: Command, commands: list[Command]) -> None:
    """Take what a shell is given as a text: it has what is exported, but for the variables of its own command."""
    for inner in commands:
        inner.line, inner.files = command.line, [*inner.files, *command.files[:1]]
    own = {match[1] for word in command.words if (match := ASSIGNMENT.fullmatch(word.text))}
    exported = {*script.variables, *itertools.chain(*BATCH_NUMBERS.values())} - own
    known = {name: value for name, value in script.values.known.items() if name in exported}
    is_whole = not any(word.fills for word in command.words)  # else the outer shell fills in some of it
    take_all(script, commands, Values(commands if is_whole else [], known if is_whole else {}, used=script.filled))


def _go(folder: str, path: str) -> str:
    """Say where a path leads from that folder; one of a variable or a home is whole."""
    return posixpath.normpath(path if path.startswith(("$", "~")) else posixpath.join(folder, path))


def _sets_variable(texts: Sequence[str]) -> bool:
    """Whether ``set`` has more than options, as in other shells than those of POSIX, where it sets a variable."""
    return texts[0] == "set" and any(
        text[:1] not in ("-", "+") and not (before[-1:] == "o" and before[:1] in ("-", "+"))
        for before, text in itertools.pairwise(texts)
    )


def _take_ours(script: Script, command: Command, texts: list[str]) -> bool:
    """Take what the scripts consist of that we export; say whether that is any."""
    last = command.words[-1]
    if texts[0] == "case":
        script.begin_case()
    elif texts[:2] == ["printf", "%s"] and len(texts) == 3 and any(command.outputs.values()) and not last.fills:
        path = next(path for path, is_whole in command.outputs.items() if is_whole)
        script.written[_go(script.folder, path)] = texts[2], command.line
    elif texts[:2] == ["[", "-n"] and texts[2:] and (needed := re.fullmatch(r"\$\{(\w+)-\}", texts[2])):
        script.needed.append(needed[1])
    elif texts[0] == "unset" and (gone := {*texts} & {*script.needed, *script.variables, *script.own}):
        script.needed = [name for name in script.needed if name not in gone]
        script.variables = {name: word for name, word in script.variables.items() if name not in gone}
    elif texts[0] == "eval" and len(texts) == 2 and not last.fills:
        script.setup += texts[1].split("\n")
    else:
        return False
    return True


def _take_variables(script: Script, command: Command, *, is_exported: bool) -> None:
    for word in command.words:
        name, is_added, _ = word.text.partition("+=")
        if match := ASSIGNMENT.fullmatch(word.text):
            value = Word(match[2], word.fills)
            script.values.note(match[1], value)
            is_set_up = is_exported and word.fills and word.is_known(*_OF_NODE, match[1])
            if is_set_up and not may_be_secret(match[1], match[2]):
                script.setup.append(f"export {word.written}")
            elif is_exported or match[1] in script.variables:  # which stays exported
                script.variables[match[1]] = value
            else:
                script.own[match[1]] = value, command.line
        elif is_exported and word.text in script.own:
            script.variables[word.text] = script.own.pop(word.text)[0]
        elif is_added:
            script.left_out.append(f"{shown(name, most=60)}: more is added to it (line {command.line}): write it out")
    if len(script.variables) + len(script.own) > _MOST_VARIABLES:
        raise SpecError(f"line {command.line}: there are more than {_MOST_VARIABLES:,} variables: give fewer")


def _take_clone(script: Script, command: Command) -> None:
    clone = read_clone(command)
    script.left_out += clone.left_out
    if clone.git:
        script.repositories.append(Repository(clone.git, _go(script.folder, clone.folder)))
    else:
        script.others.setdefault("git clone", []).append(command.line)


def _take_runai(script: Script, texts: Sequence[str]) -> None:
    """Take the image of a command that submits to Run:ai; what else it says is Run:ai's."""
    for option, value in itertools.pairwise(texts):
        if option in ("-i", "--image"):
            script.image = value
    script.left_out.append("runai: of what it is given the image alone is carried over")


def _start(script: Script, launch: Launch, command: Command) -> None:
    """Note a command that starts ranks, with what it finds: variables, and the folder that it is in.

    Raises: SpecError where so many are started that it would take minutes.
    """
    script.num_seen += len(script.needed) + len(script.repositories)
    texts = [*(word.text for word in script.variables.values()), *script.setup]
    script.num_seen += sum(1 + len(text) // 1000 for text in texts)
    if script.num_seen > MOST_VALUES:
        said = "the commands up to here start ranks with too many variables, or lines before them: give fewer"
        raise SpecError(f"line {command.line}: {said}")
    put_variables(launch, {name: word for name, word in script.variables.items() if word.text != _LAUNCH_ENV.get(name)})
    if script.needed:
        secrets = [name for name in script.needed if name not in launch.fields.get("env", {})]
        launch.fields["secrets"] = list(dict.fromkeys([*launch.fields.get("secrets", []), *secrets]))
    if command.files:
        launch.left_out.append(f"{shown(command.files[0].text, most=60)}: a job writes its own logs")
    source = launch.fields["source"]
    is_placed = "script" in source and _place_source(script, source)
    if script.folder and not is_placed and not script.folder.startswith(_SOURCE):
        if script.folder.startswith(("/", "~")):
            launch.node["workdir"] = script.folder
        else:
            launch.left_out.append(f"cd {shown(script.folder, most=60)}: give nodes.workdir")
    if setup := [line for line in script.setup if line.strip()]:
        source["setup"] = setup
    script.launches.append((command.line, launch))


def _place_source(script: Script, source: dict[str, Any]) -> bool:
    """Say in which folder, or repository, the script is; whether that is where its ranks run."""
    named = source["script"]
    if named.startswith(_SOURCE):  # torchrun is told $$ there, for $
        named = _SOURCE + named.removeprefix(_SOURCE).replace("$$", "$")
    path = _go(script.folder, named)
    if path in script.written:
        source["script_text"], line = script.written[path]
        script.used_lines.add(line)
        del source["script"]
        return False
    is_ours = _JOB_SPEC in script.written  # it goes to the folder of the source first, and on to that of the node
    folders = [script.folder, *([script.left] if is_ours else [])]
    for repository in reversed(script.repositories):
        if path.startswith(f"{repository.folder}/"):
            here = next((folder for folder in folders if folder.startswith(_SOURCE)), script.folder)
            repository.place(source, path, here=here)
            return not is_ours or here == script.folder
    above = max((folder for folder in folders if folder and path.startswith(f"{folder}/")), key=len, default="")
    if above:
        source |= {"path": above, "entry": path.removeprefix(f"{above}/")}
        del source["script"]
    return bool(above) and above == script.folder
