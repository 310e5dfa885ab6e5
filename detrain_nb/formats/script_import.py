"""Shell scripts that start torchrun or accelerate, and single command lines, as a spec; nothing in them is run."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..documents.content import put_place
from ..errors import FieldError, SpecError
from ..plan.names import make_name
from ..spec import PipelineSpec
from ..storage import shown
from .command_import import Launch, describe_nodes, read_command
from .command_words import find_text, name_before_text
from .imported import Foreign, Imported, Importer
from .job_import import keep_own_setup, read_meeting
from .script_commands import Script, take_all
from .secret_words import warn_of_secrets
from .shell import show_breaks
from .shell_values import BATCH_NUMBERS, Values, read_batch_options
from .shell_words import split_script

__all__ = ["COMMAND", "import_command"]

_STARTS = re.compile(
    r"\btorchrun\b|\btorch\.distributed\.(?:run|launch)\b|\baccelerate[ \t]+launch\b|\baccelerate-launch\b"
    r"|\baccelerate\.commands\.launch\b"
)
_MOST_LINES = 5
_OUR_COMMANDS = ("fail", "printf", "[", "mkdir", "rm", "cd", "on_node", "srun", "unset", "*", "*$*")
_OUR_OWN = re.compile(r"\$?DETRAIN_NB_|--node-rank: |--local-addr: |--rdzv-endpoint: |--rdzv-conf is_host: |srun: ")
_OUR_SBATCH = ("job-name", "nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "output")


def import_command(words: Sequence[str]) -> Imported:
    """Import a command line that has been split into words. Raises: SpecError."""
    script = Script()
    if (text := find_text(words)) is not None:
        found = _read_text(text, "")
        return replace(found, left_out=(*name_before_text(words, text), *found.left_out))
    script.launches.append((0, read_command(words)))
    return _make(script, "")


def _is_one(foreign: Foreign) -> bool:
    return not foreign.suffix and bool(_STARTS.search(foreign.text))


def _read(foreign: Foreign) -> Imported:
    try:
        return _read_text(foreign.text, foreign.stem)
    except FieldError as exc:
        raise FieldError(exc.faults, where=foreign.name) from None
    except SpecError as exc:
        raise SpecError(put_place(foreign.name, str(exc))) from None


COMMAND = Importer(_is_one, _read, "a command line of torchrun or accelerate launch, or a shell script with one")


def _read_text(text: str, stem: str) -> Imported:
    script = Script()
    options, numbers = read_batch_options(text)
    commands = split_script(show_breaks(text))
    take_all(script, commands, Values(commands, numbers, used=script.filled))
    used = {name for name in options if script.filled.intersection(BATCH_NUMBERS.get(name, ()))}
    named = [name for name in options if name not in used and (not script.job or name not in _OUR_SBATCH)]
    if named:
        shown_names = ", ".join(f"--{name}" if name[1:] else f"-{name}" for name in named)
        script.left_out.append(f"#SBATCH {shown_names}: only for Slurm: see the options of export slurm")
    return _make(script, stem)


def _make(script: Script, stem: str) -> Imported:
    job = script.job
    names = job.pop("nodes", ())
    if len(names) > 1:
        keep_own_setup([launch for _, launch in script.launches])
    launches = _order(script)
    first = launches[0]
    nodes, missing = describe_nodes(launches, count=len(names))
    fields = {"name": first.name or make_name(stem, default="imported"), **first.fields, **job}
    if job:
        known = script.variables | {name: word for name, (word, _) in script.own.items()}
        fields["rendezvous"] = read_meeting(first, job["name"], names, variables=known)
    for node, name in zip(nodes, names, strict=False):
        node["host"] = name or node["host"]
        missing = []
    if nodes:
        fields["nodes"] = nodes
        # the remaining nodes are copies: a fault is then not reported thousands of times
        PipelineSpec.from_dict({**fields, "nodes": nodes[: len(launches) + 1]})
    if script.image:
        fields["image"] = script.image
    if len(launches) == 1 and first.node_rank and not job:
        missing.append(f"node {first.node_rank}: the command is for this node: all nodes get the same")
    own = [
        f"{name}: a shell variable that is not exported (line {line})"
        for name, (_, line) in script.own.items()
        if name not in script.filled
    ]
    left_out = [*own, *script.left_out, *(each for launch in launches for each in launch.left_out), *missing]
    setup = first.fields["source"].get("setup", ())  # of all nodes
    left_out += [f"source.setup: {said}" for line in setup for said in warn_of_secrets(line.split())]
    for path in list(script.written):
        script.forget(path)
    for name, found in script.others.items():
        if not (lines := [line for line in sorted(found) if name != "printf" or line not in script.used_lines]):
            continue
        at = ", ".join(map(str, lines[:_MOST_LINES])) + (" and more" if lines[_MOST_LINES:] else "")
        if not job or not (name in _OUR_COMMANDS or name.isdecimal() or name in names):
            left_out.append(f"{shown(name, most=60)} (line {at}): a shell command: put it into source.setup if needed")
    if job:  # the lines of our own script are imported
        left_out = [line for line in left_out if not _OUR_OWN.match(line) and not line.startswith(f"{first.address}: ")]
    return Imported("command", PipelineSpec.from_dict(fields), left_out=tuple(dict.fromkeys(left_out)))


def _whole(launch: Launch) -> dict[str, Any]:
    """Return its fields with the path of the program as one, so that launches can be compared."""
    source = dict(launch.fields["source"])
    path, entry = source.pop("path", ""), source.pop("entry", "")
    named = posixpath.join(path, entry) if path else source.pop("script", entry)
    return {**launch.fields, "source": {**source, "script": named}}


def _order(script: Script) -> list[Launch]:
    """Return the commands that start ranks, sorted by node rank. Raises: SpecError for several jobs."""
    if not script.launches:
        raise SpecError("no command starts torchrun or accelerate directly: write that command out")
    (line, first), *others = script.launches
    for other_line, other in others:
        if _whole(other) != _whole(first) or other.nodes != first.nodes:
            raise SpecError(f"line {other_line}: starts a different job than line {line}: give a file with one of them")
    launches = [launch for _, launch in sorted(script.launches, key=lambda each: each[1].node_rank)]
    if not script.job and others and len({launch.node_rank for launch in launches}) < len(launches):
        raise SpecError(f"line {others[0][0]}: starts the same job as line {line}: give a file with one of them")
    return launches
