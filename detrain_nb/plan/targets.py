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
            "price": "the most that a block may cost for a node, a whole number",
            "denom": "what it is paid in, uact or uakt; default: uact",
            "cpus": "how many processors a node has",
            "memory": "the memory of a node, as 32Gi",
            "disk": "the disk of a node, as 20Gi",
            "shm": "the shared memory of a node, as 16Gi",
            "volume": "the volume of a node's checkpoints, as 50Gi",
        },
    ),
}
OPTIONS: Mapping[str, str] = {  # of all of them, each with the formats that have it
    name: "; ".join(f"of {kind}: {target.options[name]}" for kind, target in TARGETS.items() if name in target.options)
    for name in dict.fromkeys(name for target in TARGETS.values() for name in target.options)
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
