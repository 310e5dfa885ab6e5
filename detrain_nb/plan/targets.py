"""The export formats of a pipeline with their options, and the kinds of files that can be imported.

For menus and help texts; the files are written and read in formats/.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Target:
    """One format: the suffix of its files, a description, and its options with their help texts."""

    suffix: str
    about: str
    options: Mapping[str, str] = field(default_factory=dict)


GPUS = "number of GPUs of a node whose devices are not set; default: none"  # an option of all formats
_TORCHTITAN = {
    "model": "name of the model; default: llama3",
    "flavor": "size of the model, e.g. 8B; default: debugmodel",
    "seq_len": "length of a sample in tokens; default: 2048",
    "hf_assets": "folder with the tokenizer; default: that of torchtitan's tests",
    "dataset": "name of the dataset, e.g. c4; default: c4_test",
}
_KUBERNETES = {
    "namespace": "namespace of the job; default: that of kubectl",
    "pvc": "existing volume claim for the job's results",
    "pvc_size": "size of a new volume claim for the job's results, e.g. 50Gi",
    "storage_class": "storage class of the new volume claim",
    "shm": "shared memory of a node, e.g. 16Gi; default: 2Gi",
    "cpus": "number of processors of a node, e.g. 8",
    "memory": "memory of a node, e.g. 32Gi",
    "secret": "Secret with the variables of secrets; default: the name of the job",
}
# The values of options that allow only these, the default first.
CHOICES: Mapping[str, tuple[str, ...]] = {
    "start": ("job", "session"),
    "part": ("all", "first", "others"),
    "denom": ("uact", "uakt"),
    "cli": ("new", "old"),
    "release": ("0.3", "main"),
}
TARGETS: Mapping[str, Target] = {
    "torchrun": Target(".sh", "a shell script to run on every node"),
    "slurm": Target(
        ".sbatch",
        "a batch script for sbatch",
        {
            "time": "time limit in sbatch's form, e.g. 02:00:00",
            "partition": "name of the partition",
            "account": "name of the account",
        },
    ),
    "akash": Target(
        ".sdl.yaml",
        "an SDL file for a deployment on Akash",
        {
            "start": "job, or session: nodes that wait for %distributed start; default: job",
            "part": "nodes in the lease: all, first or others; default: all",
            "ssh_key": "your public key, the line in ~/.ssh/id_ed25519.pub",
            "gpu_model": "NVIDIA models, e.g. a100:80Gi,h100; default: any",
            "price": "highest price of a node per block, a whole number; default: 10000, with GPUs 100000",
            "denom": "currency of the price, uact or uakt; default: uact",
            "cpus": "number of processors of a node; default: 2 per rank, 8 per rank on a GPU",
            "memory": "memory of a node, e.g. 64Gi; default: 4Gi per rank, 32Gi per rank on a GPU",
            "disk": "disk of a node, e.g. 100Gi; default: 20Gi",
            "shm": "shared memory of a node, e.g. 8Gi; default: 2Gi, with GPUs 16Gi",
            "volume": "volume for the checkpoints of a node, e.g. 200Gi; default: 50Gi",
        },
    ),
    "pytorchjob": Target(".yaml", "a PyTorchJob for Kubeflow's training operator on Kubernetes", _KUBERNETES),
    "trainjob": Target(
        ".yaml",
        "a TrainJob for Kubeflow Trainer on Kubernetes",
        {**_KUBERNETES, "runtime": "name of the ClusterTrainingRuntime; default: torch-distributed"},
    ),
    "runai": Target(
        ".sh",
        "a shell script that submits the job to Run:ai",
        {
            "cli": "version of Run:ai's command line, new or old; default: new",
            "project": "name of the project",
            "pvc": "existing volume claim, e.g. my-claim:/mnt/data",
            "secret": "Kubernetes Secret with the spec's secrets; default: the name of the job",
            "log_ranks": "local ranks whose output is logged, e.g. 0,1; default: all",
        },
    ),
    "torchtitan": Target(
        ".py",
        "a torchtitan configuration, as a Python function",
        {**_TORCHTITAN, "release": "0.3, or main as of 2026-08; default: 0.3"},
    ),
    "torchtitan-toml": Target(".toml", "a configuration of torchtitan up to v0.2.2", _TORCHTITAN),
    "accelerate": Target(
        ".yaml",
        "a configuration of Hugging Face Accelerate, for one node",
        {"node": "name or number of the node; default: the first"},
    ),
}


def as_typed(option: str) -> str:
    """Return an option as it is typed, such as ``--gpu-model``; errors of exports use this form, too."""
    return f"--{option.replace('_', '-')}"


def _describe(name: str) -> str:
    """Return the help text of an option, with the formats in front of each text when their texts differ."""
    kinds: dict[str, list[str]] = {}
    for kind, target in TARGETS.items():
        if name in target.options:
            kinds.setdefault(target.options[name], []).append(kind)
    if len(kinds) == 1:
        return next(iter(kinds))
    return "; ".join(f"{', '.join(each)}: {words}" for words, each in kinds.items())


OPTIONS: Mapping[str, str] = {  # of all formats
    name: _describe(name) for name in dict.fromkeys(name for target in TARGETS.values() for name in target.options)
}
# The kinds of files that can be imported; a file is of the first kind that fits.
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
