"""The effects of a shell script's commands up to those that start ranks; nothing is run."""

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
_MOST_COMMANDS, _MOST_FILLS = 20_000, 10_000  # in all texts passed to shells together
_SOURCE, _JOB_SPEC = f"${FOLDER}/source", f"${FOLDER}/job_spec.json"  # in the scripts that we export
_LAUNCH_ENV = launch_job(  # what every launch sets
    Rendezvous("c10d", "", ("", 0), max_restarts=1), Program("module", ("a",)), nodes=1, ranks=1, node_rank=0, python=""
).env


@dataclass
class Script:
    """The state of a script after the commands read so far."""

    folder: str = ""
    left: str = ""  # the folder before that one
    variables: dict[str, Word] = field(default_factory=dict)
    filled: set[str] = field(default_factory=set)  # the names of those that were expanded
    values: Values = field(default_factory=lambda: Values([], {}, used=set()))
    own: dict[str, tuple[Word, int]] = field(default_factory=dict)  # variables that are not exported, with their lines
    repositories: list[Repository] = field(default_factory=list)
    setup: list[str] = field(default_factory=list)
    written: dict[str, tuple[str, int]] = field(default_factory=dict)  # files, each with its text and line
    used_lines: set[int] = field(default_factory=set)  # of files that are started
    needed: list[str] = field(default_factory=list)  # variables without which the script exits
    image: str = ""
    before_case: Script | None = None
    num_commands: int = 0
    num_fills: int = 0
    num_chars: int = 0  # in texts passed to shells
    num_seen: int = 0  # variables and repositories, summed over all launches
    launches: list[tuple[int, Launch]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    others: dict[str, list[int]] = field(default_factory=dict)  # commands that are not imported, with their lines

    @property
    def job(self) -> dict[str, Any]:
        """The job that one of our own exported scripts runs; empty for other scripts."""
        found = self.written.get(_JOB_SPEC)
        return read_job(found[0]) if found is not None else {}

    def forget(self, path: str) -> None:
        """Forget the text of a file; the command that wrote it then counts as not imported."""
        if (found := self.written.pop(path, None)) is not None:
            self.others.setdefault("printf", []).append(found[1])

    def begin_case(self) -> None:
        self.before_case = replace(self, variables=dict(self.variables), setup=list(self.setup), before_case=None)

    def end_branch(self) -> None:
        """Undo the effects of a case's branch on the shell, as the next branch is an alternative."""
        if (before := self.before_case) is not None:
            self.folder, self.left = before.folder, before.left
            self.variables, self.setup = dict(before.variables), list(before.setup)


def take_all(script: Script, commands: Sequence[Command], values: Values) -> None:
    """Apply the commands of one shell to ``script``. Raises: SpecError."""
    outer, script.values = script.values, values
    script.num_commands += len(commands)
    if script.num_commands > _MOST_COMMANDS:
        said = f"more than {_MOST_COMMANDS:,} commands up to here: give fewer"
        raise SpecError(f"line {commands[0].line}: {said}")
    for command in commands:
        script.num_fills += sum(len(word.fills) for word in command.words)
        may_fill = script.num_fills <= _MOST_FILLS  # variables that stay unexpanded are reported
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
        script.num_chars += 1000 + len(text)  # each shell gets a copy of the variables, too
        if script.num_chars > MOST_BYTES:
            raise SpecError(f"line {command.line}: the text passed to shells up to here is {TOO_LARGE}")
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
    """Return whether a command only assigns variables, possibly after a keyword such as ``then``."""
    plain = [text for text in texts if text not in KEYWORDS]
    return bool(plain) and all(ASSIGNMENT.fullmatch(text.replace("+=", "=", 1)) for text in plain)


def _take_inner(script: Script, command: Command, commands: list[Command]) -> None:
    """Apply the commands passed to a shell as a text: it inherits the exported variables, except those set for it."""
    for inner in commands:
        inner.line, inner.files = command.line, [*inner.files, *command.files[:1]]
    own = {match[1] for word in command.words if (match := ASSIGNMENT.fullmatch(word.text))}
    exported = {*script.variables, *itertools.chain(*BATCH_NUMBERS.values())} - own
    known = {name: value for name, value in script.values.known.items() if name in exported}
    is_whole = not any(word.fills for word in command.words)  # otherwise the outer shell expands parts of it
    take_all(script, commands, Values(commands if is_whole else [], known if is_whole else {}, used=script.filled))


def _go(folder: str, path: str) -> str:
    """Return a path relative to a folder, joined with it; one that begins with a variable or ``~`` is absolute."""
    return posixpath.normpath(path if path.startswith(("$", "~")) else posixpath.join(folder, path))


def _sets_variable(texts: Sequence[str]) -> bool:
    """Return whether ``set`` has arguments besides options, which sets a variable in shells other than POSIX ones."""
    return texts[0] == "set" and any(
        text[:1] not in ("-", "+") and not (before[-1:] == "o" and before[:1] in ("-", "+"))
        for before, text in itertools.pairwise(texts)
    )


def _take_ours(script: Script, command: Command, texts: list[str]) -> bool:
    """Apply a command as our own exported scripts use them; returns whether it is such a command."""
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
            elif is_exported or match[1] in script.variables:  # a variable stays exported
                script.variables[match[1]] = value
            else:
                script.own[match[1]] = value, command.line
        elif is_exported and word.text in script.own:
            script.variables[word.text] = script.own.pop(word.text)[0]
        elif is_added:
            script.left_out.append(f"{shown(name, most=60)}: += (line {command.line}) is not applied: give the value")
    if len(script.variables) + len(script.own) > _MOST_VARIABLES:
        raise SpecError(f"line {command.line}: more than {_MOST_VARIABLES:,} variables: give fewer")


def _take_clone(script: Script, command: Command) -> None:
    clone = read_clone(command)
    script.left_out += clone.left_out
    if clone.git:
        script.repositories.append(Repository(clone.git, _go(script.folder, clone.folder)))
    else:
        script.others.setdefault("git clone", []).append(command.line)


def _take_runai(script: Script, texts: Sequence[str]) -> None:
    """Take the image from a command that submits to Run:ai; its other options are for Run:ai."""
    for option, value in itertools.pairwise(texts):
        if option in ("-i", "--image"):
            script.image = value
    script.left_out.append("runai: of its options only the image is imported")


def _start(script: Script, launch: Launch, command: Command) -> None:
    """Add a command that starts ranks, with the variables and the folder that it sees.

    Raises: SpecError when there are so many that it would take minutes.
    """
    script.num_seen += len(script.needed) + len(script.repositories)
    texts = [*(word.text for word in script.variables.values()), *script.setup]
    script.num_seen += sum(1 + len(text) // 1000 for text in texts)
    if script.num_seen > MOST_VALUES:
        said = "the commands up to here start ranks with too many variables, or too many setup lines: give fewer"
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
    """Put the folder, or the repository, of the script into ``source``; returns whether its ranks run there."""
    named = source["script"]
    if named.startswith(_SOURCE):  # in arguments of torchrun $$ means $
        named = _SOURCE + named.removeprefix(_SOURCE).replace("$$", "$")
    path = _go(script.folder, named)
    if path in script.written:
        source["script_text"], line = script.written[path]
        script.used_lines.add(line)
        del source["script"]
        return False
    is_ours = _JOB_SPEC in script.written  # it changes to the folder of the source, then to that of the node
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
