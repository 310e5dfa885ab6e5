"""The formats that a pipeline is exported to, what can be said of each, and the kinds of files that are imported.

They are for who offers them without making or reading one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Target:
    """One format: the suffix of its files, what such a file is, and its options with what to give."""

    suffix: str
    about: str
    options: Mapping[str, str] = field(default_factory=dict)


GPUS = "how many GPUs a node has that names no devices; default: none"  # an option of all
_TORCHTITAN = {
    "model": "the name of a model; default: llama3",
    "flavor": "one of its sizes, as 8B; default: debugmodel",
    "seq_len": "the length of a sample in tokens; default: 2048",
    "hf_assets": "the folder with the tokenizer; default: that of torchtitan's tests",
    "dataset": "the name of a dataset, as c4; default: c4_test",
}
_KUBERNETES = {
    "namespace": "the namespace of the job; default: that of kubectl",
    "pvc": "a claim that is there: it keeps what the job makes",
    "pvc_size": "the size of a claim that is made to keep it, as 50Gi",
    "storage_class": "the storage class of a claim that is made",
    "shm": "how much shared memory a node has, as 16Gi; default: 2Gi",
    "cpus": "how many processors a node has, as 8",
    "memory": "how much memory a node has, as 32Gi",
    "secret": "the Secret with the variables of secrets; default: the name of the job",
}
# Of the options that take one of few words: these, the default first.
CHOICES: Mapping[str, tuple[str, ...]] = {
    "start": ("job", "session"),
    "part": ("all", "first", "others"),
    "denom": ("uact", "uakt"),
    "cli": ("new", "old"),
    "release": ("0.3", "main"),
}
TARGETS: Mapping[str, Target] = {
    "torchrun": Target(".sh", "a shell script that is run on every node"),
    "slurm": Target(
        ".sbatch",
        "a batch script for sbatch",
        {
            "time": "the longest time, as sbatch takes it: 02:00:00",
            "partition": "the name of a partition",
            "account": "the name of an account",
        },
    ),
    "akash": Target(
        ".sdl.yaml",
        "an SDL that Akash deploys",
        {
            "start": "job, or session: nodes that wait for %distributed start; default: job",
            "part": "which nodes the lease has: all, first or others; default: all",
            "ssh_key": "your public key, the line of ~/.ssh/id_ed25519.pub",
            "gpu_model": "models of NVIDIA, as a100:80Gi,h100; default: any",
            "price": "the most that a block may cost for a node, a whole number; default: 10000, with GPUs 100000",
            "denom": "what it is paid in, uact or uakt; default: uact",
            "cpus": "how many processors a node has; default: 2 for a rank, 8 for one on a GPU",
            "memory": "the memory of a node, as 64Gi; default: 4Gi for a rank, 32Gi for one on a GPU",
            "disk": "the disk of a node, as 100Gi; default: 20Gi",
            "shm": "the shared memory of a node, as 8Gi; default: 2Gi, with GPUs 16Gi",
            "volume": "the volume of a node's checkpoints, as 200Gi; default: 50Gi",
        },
    ),
    "pytorchjob": Target(".yaml", "a PyTorchJob for Kubeflow's training operator on Kubernetes", _KUBERNETES),
    "trainjob": Target(
        ".yaml",
        "a TrainJob for Kubeflow Trainer on Kubernetes",
        {**_KUBERNETES, "runtime": "the ClusterTrainingRuntime; default: torch-distributed"},
    ),
    "runai": Target(
        ".sh",
        "a shell script that submits the job to Run:ai",
        {
            "cli": "new, by default, or old: its command line",
            "project": "the name of a project",
            "pvc": "a volume that is there, as my-claim:/mnt/data",
            "secret": "the Kubernetes secret with those of the spec; default: the one of the job's name",
            "log_ranks": "local ranks whose lines are in the log: 0,1; default: all",
        },
    ),
    "torchtitan": Target(
        ".py",
        "a configuration of torchtitan, as a function in Python",
        {**_TORCHTITAN, "release": "0.3, by default, or main, which is that of 2026-08"},
    ),
    "torchtitan-toml": Target(".toml", "a configuration of torchtitan up to v0.2.2", _TORCHTITAN),
    "accelerate": Target(
        ".yaml",
        "a configuration of Hugging Face Accelerate, for one node",
        {"node": "the name or the number of that node; default: the first"},
    ),
}


def as_typed(option: str) -> str:
    """Return an option as it is typed in a line, as ``--gpu-model``; errors of exports name it so, too."""
    return f"--{option.replace('_', '-')}"


def _describe(name: str) -> str:
    """Say what is given for an option; of which format, where they do not say the same of it."""
    kinds: dict[str, list[str]] = {}
    for kind, target in TARGETS.items():
        if name in target.options:
            kinds.setdefault(target.options[name], []).append(kind)
    if len(kinds) == 1:
        return next(iter(kinds))
    return "; ".join(f"of {', '.join(each)}: {words}" for words, each in kinds.items())


OPTIONS: Mapping[str, str] = {  # of all of them
    name: _describe(name) for name in dict.fromkeys(name for target in TARGETS.values() for name in target.options)
}
# What is imported; a file is of the first kind that fits.
KINDS = (
    "detrain",
    "akash",
    "lease",
    "hypha",
    "torchtitan",
    "ravnest",
    "accelerate",
    "command",
    "ssh_config",
    "hostfile",
)
