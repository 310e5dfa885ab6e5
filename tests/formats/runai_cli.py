"""A stand-in for the command line of Run:ai: it takes the flags that are documented, and becomes one of the pods.

The flags are facts of its reference: docs.run.ai/v2.x, "CLI Reference" (the old one: `runai submit`), and
docs.nvidia.com/run-ai/self-hosted/v3.0, "reference/cli" (the new one: `runai training`). Only what we write is here,
with what each flag takes. Run as a program, it has the standard library alone.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

_WORD, _WHOLE = re.compile(r"\S+"), re.compile(r"[1-9][0-9]*")
_PVC = re.compile(r"claimname=[a-z0-9.-]+,path=/[^,]+")
_OF_BOTH: Mapping[str, re.Pattern[str] | None] = {
    "-p": _WORD,  # the project; else the default one
    "-i": _WORD,  # the image
    "-g": _WHOLE,  # GPUs of each pod
    "--backoff-limit": re.compile(r"[0-9]+"),
    "--large-shm": None,  # a flag without a value
    "--existing-pvc": _PVC,
    "--command": None,  # what follows -- stands in the place of the image's entrypoint
}
_NEW = {**_OF_BOTH, "--cpu-core-request": _WHOLE, "--env-secret": re.compile(r"\w+=[a-z0-9.-]+,key=[\w.-]+")}
_OLD = {**_OF_BOTH, "--name": _WORD, "--cpu": _WHOLE, "-e": re.compile(r"\w+=SECRET:[a-z0-9.-]+,[\w.-]+")}
COMMANDS: Mapping[tuple[str, ...], Mapping[str, re.Pattern[str] | None]] = {
    ("training", "pytorch", "submit"): {**_NEW, "--workers": _WHOLE},
    ("training", "submit"): _NEW,
    ("submit-dist", "pytorch"): {**_OLD, "--workers": _WHOLE},
    ("submit",): _OLD,
}


@dataclass
class Submitted:
    """What the command line says; ``faults`` are in the words of nobody."""

    command: tuple[str, ...] = ()
    flags: dict[str, list[str]] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)  # what stands alone
    argv: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @property
    def pods(self) -> int:
        """Those called workers, and one called the master."""
        return int(self.flags.get("--workers", ["0"])[0]) + 1

    @property
    def secrets(self) -> dict[str, str]:
        """Each variable, with the key of the secret that it comes from."""
        texts = [*self.flags.get("--env-secret", []), *self.flags.get("-e", [])]
        return {
            name: value.rpartition(",")[2].removeprefix("key=") for name, _, value in (t.partition("=") for t in texts)
        }


def parse(argv: list[str]) -> Submitted:
    """Read a command line without its first word."""
    command = next((each for each in COMMANDS if tuple(argv[: len(each)]) == each), None)
    if command is None:
        return Submitted(faults=[f"no such command: {argv[:3]}"])
    known, rest = COMMANDS[command], argv[len(command) :]
    end = rest.index("--") if "--" in rest else len(rest)
    found, words = Submitted(command, argv=rest[end + 1 :]), rest[:end]
    while words:
        word = words.pop(0)
        if not word.startswith("-"):
            found.names.append(word)
        elif word not in known:
            found.faults.append(f"unknown flag: {word}")
        else:
            pattern = known[word]
            value = "" if pattern is None else words.pop(0) if words else ""
            if pattern is not None and not pattern.fullmatch(value):
                found.faults.append(f"{word} {value!r} is not of its form")
            found.flags.setdefault(word, []).append(value)
    _check(found)
    return found


def _check(found: Submitted) -> None:
    is_new = found.command[0] == "training"
    name = found.names if is_new else found.flags.get("--name", [])
    if len(name) != 1 or (not is_new and found.names):
        found.faults.append("one name: it stands alone in the new one, and after --name in the old one")
    elif not re.fullmatch(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?", name[0]):
        found.faults.append(f"{name[0]!r} is no label of DNS")
    if "-i" not in found.flags:
        found.faults.append("no image")
    if found.argv and "--command" not in found.flags:
        found.faults.append("what follows -- would be arguments of the image's entrypoint")


def expand(text: str, env: Mapping[str, str]) -> str:
    """Do what Kubernetes does with an argument of a container: $$ is $, $(NAME) the variable where there is one."""

    def replace(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else env.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", replace, text)


def run_pod(found: Submitted, *, rank: int, around: Mapping[str, str]) -> Callable[[], None]:
    """Return what becomes the pod of that number; its secrets are those variables of ``around`` that are named."""
    env = {name: around[name] for name in ("PATH", "HOME", "LC_ALL", "SEEN_AT") if name in around}
    env |= {name: around[key] for name, key in found.secrets.items() if key in around}
    if found.pods > 1:  # the operator of PyTorch jobs
        env |= {"MASTER_ADDR": "first", "MASTER_PORT": "29500", "WORLD_SIZE": str(found.pods), "RANK": str(rank)}
    argv = [expand(word, env) for word in found.argv]
    return lambda: os.execvpe(argv[0], argv, env)


if __name__ == "__main__":
    submitted = parse(sys.argv[1:])
    if submitted.faults:
        sys.exit("\n".join(submitted.faults))
    run_pod(submitted, rank=int(os.environ["POD"]), around=os.environ)()
