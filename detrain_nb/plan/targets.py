"""The formats that a pipeline is exported to, and what can be said of each: for who offers them without making one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Target:
    """One format: the suffix of its files, what such a file is, and its options with what to give."""

    suffix: str
    about: str
    options: Mapping[str, str] = field(default_factory=dict)


_KUBERNETES = {
    "namespace": "its namespace; default: that of kubectl",
    "pvc": "a claim that is there: it keeps what the job makes",
    "pvc_size": "the size of a claim that is made to keep it: 10Gi",
    "storage_class": "the storage class of a claim that is made",
    "shm": "how much shared memory a node has: 2Gi",
    "cpus": "how many processors a node has: 8",
    "memory": "how much memory a node has: 32Gi",
    "secret": "the Secret with the variables of secrets; default: the name of the job",
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
    "pytorchjob": Target(".yaml", "a PyTorchJob for Kubeflow's training operator on Kubernetes", _KUBERNETES),
    "trainjob": Target(
        ".yaml",
        "a TrainJob for Kubeflow Trainer on Kubernetes",
        {**_KUBERNETES, "runtime": "the ClusterTrainingRuntime: torch-distributed"},
    ),
}


def _describe(name: str) -> str:
    """Say what is given for an option, once for the formats that say the same of it."""
    kinds: dict[str, list[str]] = {}
    for kind, target in TARGETS.items():
        if name in target.options:
            kinds.setdefault(target.options[name], []).append(kind)
    return "; ".join(f"of {', '.join(each)}: {words}" for words, each in kinds.items())


OPTIONS: Mapping[str, str] = {  # of all of them, each with the formats that have it
    name: _describe(name) for name in dict.fromkeys(name for target in TARGETS.values() for name in target.options)
}
