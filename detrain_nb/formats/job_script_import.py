"""What the script of a job says of its spec, where an exporter of ours has written it: see job_script.py."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ..errors import SpecError
from ..plan.job import JobSpec
from .command_import import Launch, find_launcher
from .job_script import FOLDER
from .shell_words import Command, split_script

__all__ = ["read_job_script"]

_SOURCE = f"${FOLDER}/source"
_JOB_SPEC = f"${FOLDER}/job_spec.json"
# What launch.py sets beside the variables of the spec.
_OF_LAUNCH = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
_TOKEN = re.compile(r'password=%s\\n" \S+ "\$(\w+)"')
_SECTIONS = ("training", "parallelism", "data", "model", "checkpoint", "artifacts", "description")


class _Script:
    """The commands of a script, by what they do."""

    def __init__(self, commands: list[Command]) -> None:
        self.files: dict[str, str] = {}  # that are written, by the word of the shell that is their path
        self.exported: dict[str, str] = {}
        self.needed: list[str] = []  # variables that the node has to have
        self.setup: list[str] = []
        self.folder = ""
        self.git: list[list[str]] = []
        self.launch: Launch | None = None
        for command in commands:
            self._take(command)

    def _take(self, command: Command) -> None:
        words = [word.text for word in command.words]
        if words[:2] == ["printf", "%s"] and len(words) == 3 and command.files:
            self.files[command.files[0].text] = words[2]
        elif words[0] == "export" and len(words) == 2:
            name, _, text = words[1].partition("=")
            self.exported[name] = text
        elif words[:2] == ["[", "-n"] and (match := re.fullmatch(r"\$\{(\w+)-\}", words[2] if words[2:] else "")):
            self.needed.append(match[1])
        elif words[0] == "eval" and len(words) == 2:
            self.setup += words[1].split("\n")
        elif words[0] == "cd" and len(words) == 2:
            self.folder = words[1]
        elif "git" in words[:3]:
            self.git.append(words)
        elif words[0] == "exec":
            self.launch = find_launcher(command.words)


def read_job_script(text: str) -> Launch | None:
    """Read what a script for one node runs; None where no exporter of ours has written it. Raises: SpecError."""
    if _JOB_SPEC.removeprefix("$") not in text:
        return None
    script = _Script(split_script(text))
    written = script.files.get(_JOB_SPEC)
    if written is None or script.launch is None:
        return None
    job, launch = JobSpec.from_json(written), script.launch
    source, node = _read_source(script, launch.fields["source"])
    launch.fields = {
        "name": job.name,
        **_read_sections(job),
        "source": {**source, **({"setup": script.setup} if script.setup else {})},
        "env": _read_env(script),
        "secrets": [name for name in script.needed if name != source.get("git", {}).get("token")],
        "rendezvous": _read_rendezvous(launch, job.name),
    }
    launch.node |= node
    launch.left_out = []
    return launch


def _read_sections(job: JobSpec) -> dict[str, Any]:
    fields = {name: value for name, value in asdict(job).items() if name in _SECTIONS and value is not None}
    if job.checkpoint and job.checkpoint.keep is None:
        fields["checkpoint"]["keep"] = "all"
    return {
        name: {key: each for key, each in value.items() if each is not None} if isinstance(value, dict) else value
        for name, value in fields.items()
    }


def _read_env(script: _Script) -> dict[str, str]:
    given = {name: text for name, text in script.exported.items() if not name.startswith("DETRAIN_NB_")}
    return {name: text for name, text in given.items() if _OF_LAUNCH.get(name) != text}


def _read_rendezvous(launch: Launch, name: str) -> dict[str, Any]:
    meeting = dict(launch.fields.get("rendezvous", {}))
    given = meeting.pop("id", launch.name)
    return meeting if given == name else {**meeting, "id": given}


def _read_source(script: _Script, started: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the source, and the folder of the node where that is another one than the source's."""
    arguments = {"arguments": started["arguments"]} if started.get("arguments") else {}
    node = {} if script.folder.startswith(_SOURCE) else {"workdir": script.folder}
    if "module" in started:
        return {"module": started["module"], **arguments}, node
    path: str = started["script"]
    if (text := script.files.get(path)) is not None:
        return {"script_text": text, **arguments}, node
    if path.startswith(f"{_SOURCE}/"):
        return {**_read_git(script, path.removeprefix(f"{_SOURCE}/")), **arguments}, node
    if path.startswith(f"{script.folder}/"):
        node = {}
    folder = script.folder if not node else path.rpartition("/")[0]
    return {"path": folder, "entry": path.removeprefix(f"{folder}/"), **arguments}, node


def _read_git(script: _Script, path: str) -> dict[str, Any]:
    clone = next((words for words in script.git if "clone" in words), None)
    if clone is None or "--" not in clone[:-2]:
        raise SpecError(f"the job's script runs {path}, and nothing brings it there")
    git: dict[str, Any] = {"url": clone[clone.index("--") + 1]}
    for words in script.git:
        if "checkout" in words:
            git.setdefault("ref", words[-1].removeprefix("origin/"))
    for word in clone:
        if match := _TOKEN.search(word):
            git["token"] = match[1]
        if word.startswith("GIT_SSH_COMMAND="):
            git["ssh_key"] = shlex.split(word.partition("=")[2])[-1]
    folder = script.folder.removeprefix(_SOURCE).strip("/") if script.folder.startswith(_SOURCE) else ""
    if folder and path.startswith(f"{folder}/"):
        git["folder"] = folder
        path = path.removeprefix(f"{folder}/")
    return {"git": git, "entry": path}
