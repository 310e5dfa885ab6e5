"""A stand-in for the command line of Run:ai: it accepts the documented flags, and becomes one of the pods.

The flags are facts of its reference: those that our export writes, and all others. The old one: docs.run.ai/v2.x, CLI
Reference, runai submit and submit-dist pytorch. The new one: docs.run.ai/v2.20, runai training pytorch submit and runai
training standard submit. Flags that newer releases have added, such as `--env-secret`:
run-ai-docs.nvidia.com/self-hosted, reference, runai xgboost submit, a training like these, of 2.23 or newer, and
docs.nvidia.com/run-ai/self-hosted/v3.0. When run as a program, it can import the standard library only.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


def _read(flags: str) -> dict[str, str]:
    """Map each flag to the name used for it here; the name of a flag that takes a value ends in =."""
    return {name.rstrip("="): names.split("|")[0] for names in flags.split() for name in names.split("|")}


_OLD = _read("""
-a=|--annotation= --add-capability= --address= --allow-privilege-escalation --attach --backoff-limit= --command
--configmap-volume= --cpu= --cpu-limit= --create-home-dir -e=|--environment= --existing-pvc= --extended-resource=
-g=|--gpu= --git-sync= --gpu-memory= -h|--help --host-ipc --host-network -i=|--image= --image-pull-policy=
--job-name-prefix= -l=|--label= --large-shm --loglevel= --memory= --memory-limit= --mig-profile= --mount-propagation
--name= --new-pvc= --nfs-server= --node-pools= --node-type= -p=|--project= --port= --preferred-pod-topology-key=
--pvc= --pvc-exists= --pvc-new= --required-pod-topology-key= --run-as-gid= --run-as-user --s3= -s=|--service-type=
--stdin -t|--tty --template= --toleration= --ttl-after-finish= -v=|--volume= --working-dir=
""")
_OLD_PYTORCH = _read("--clean-pod-policy= --max-replicas= --min-replicas= --workers=")
_OLD_ALONE = _read("--completions= --elastic --interactive --jupyter --parallelism= --preemptible")
_NEW = _read("""
--allow-privilege-escalation --annotation= --attach --auto-deletion-time-after-completion= --backoff-limit=
--capability= --command|-c --compute= --config-file= --config-path= --configmap-map-volume= --cpu-core-limit=
--cpu-core-request= --cpu-memory-limit= --cpu-memory-request= --create-home-dir -d|--debug --datasource= --datavolume=
--empty-dir-volume= -e=|--environment-variable= --env-my-credentials= --env-pod-field-ref= --env-secret=
--environment= --exclude-node= --existing-pvc= --extended-resource= --external-url= --git-sync=
-g=|--gpu-devices-request= --gpu-memory-limit= --gpu-memory-request= --gpu-portion-limit= --gpu-portion-request=
--gpu-request-type= -h|--help --host-ipc --host-network --host-path= -i=|--image= --image-pull-my-credentials=
--image-pull-policy= --label= --large-shm --name-prefix= --new-pvc= --nfs= --node-pools= --node-type= -p=|--project=
--pod-running-timeout= --port= --preemptibility= --preferred-pod-topology-key= --priority= --privileged -q|--quiet
--required-pod-topology-key= --run-as-gid= --run-as-non-root --run-as-uid= --run-as-user --s3= --seccomp-profile=
--secret-volume= --stdin --supplemental-groups= -t|--tty --template= --termination-grace-period= --toleration=
--user-group-source= --verbose --wait-for-submit= --working-dir=
""")
_NEW_PYTORCH = _read("""
--clean-pod-policy= --master-args= --master-command= --master-cpu-core-limit= --master-cpu-core-request=
--master-cpu-memory-limit= --master-cpu-memory-request= --master-environment= --master-environment-variable=
--master-extended-resource= --master-gpu-devices-request= --master-gpu-portion-limit= --master-gpu-portion-request=
--master-no-pvcs --master-restart-policy= --max-replicas= --mig-profile= --min-replicas= --no-master --restart-policy=
--workers=
""")
_NEW_ALONE = _read("--parallelism= --runs=")
COMMANDS: Mapping[tuple[str, ...], Mapping[str, str]] = {
    ("training", "pytorch", "submit"): {**_NEW, **_NEW_PYTORCH},
    ("training", "submit"): {**_NEW, **_NEW_ALONE},
    ("submit-dist", "pytorch"): {**_OLD, **_OLD_PYTORCH},
    ("submit",): {**_OLD, **_OLD_ALONE},
}
_WHOLE, _PVC = re.compile(r"[1-9][0-9]*"), re.compile(r"claimname=[a-z0-9.-]+,path=/[^,]+")
_FORMS = {  # narrower than Run:ai's: its -g and --cpu also accept fractions
    "-g": _WHOLE,
    "--workers": _WHOLE,
    "--backoff-limit": re.compile(r"[0-9]+"),
    "--cpu": _WHOLE,
    "--cpu-core-request": _WHOLE,
    "--existing-pvc": _PVC,
    "--env-secret": re.compile(r"\w+=[a-z0-9.-]+,key=[\w.-]+"),
    "-e": re.compile(r"\w+=(SECRET:[a-z0-9.-]+,[\w.-]+|(?!SECRET:).*)"),
}
_ANY = re.compile(r"\S+")


@dataclass
class Submitted:
    """A command line that was parsed; the wording of ``faults`` is ours, not Run:ai's."""

    command: tuple[str, ...] = ()
    flags: dict[str, list[str]] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)  # positional arguments
    argv: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @property
    def pods(self) -> int:
        """The number of pods: the workers and one master."""
        return int(self.flags.get("--workers", ["0"])[0]) + 1

    @property
    def secrets(self) -> dict[str, str]:
        """The variables that come from a secret, each with its key there."""
        texts = [*self.flags.get("--env-secret", []), *(t for t in self.flags.get("-e", []) if "=SECRET:" in t)]
        return {
            name: value.rpartition(",")[2].removeprefix("key=") for name, _, value in (t.partition("=") for t in texts)
        }


def parse(argv: list[str]) -> Submitted:
    """Parse a command line without its first word, ``runai``."""
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
            continue
        word, has_value, value = word.partition("=")
        name, takes_value, _ = known.get(word, "").partition("=")
        if not name or (has_value and not takes_value):
            found.faults.append(f"unknown flag: {word}{has_value}")
            continue
        if takes_value and not has_value:
            value = words.pop(0) if words else ""
        if takes_value and not _FORMS.get(name, _ANY).fullmatch(value):
            found.faults.append(f"{word} {value!r} is not of its form")
        found.flags.setdefault(name, []).append(value)
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
    """Expand an argument of a container as Kubernetes does: $$ becomes $, and $(NAME) the value of that variable."""

    def replace(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else env.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", replace, text)


def run_pod(found: Submitted, *, rank: int, around: Mapping[str, str]) -> Callable[[], None]:
    """Return a function that replaces this process by the pod ``rank``; its secrets are in the variables ``around``."""
    env = {name: around[name] for name in ("PATH", "HOME", "LC_ALL", "SEEN_AT") if name in around}
    env |= {name: around[key] for name, key in found.secrets.items() if key in around}
    if found.pods > 1:  # set by the operator of PyTorch jobs
        env |= {"MASTER_ADDR": "first", "MASTER_PORT": "29500", "WORLD_SIZE": str(found.pods), "RANK": str(rank)}
    argv = [expand(word, env) for word in found.argv]
    return lambda: os.execvpe(argv[0], argv, env)


if __name__ == "__main__":
    submitted = parse(sys.argv[1:])
    if submitted.faults:
        sys.exit("\n".join(submitted.faults))
    run_pod(submitted, rank=int(os.environ["POD"]), around=os.environ)()
