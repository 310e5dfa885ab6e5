"""What an import reads from our own exported scripts: the job's spec for its ranks, and how its nodes meet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ..plan.job import JobSpec
from .command_import import Launch
from .job_script import ENDPOINT, FIRST
from .shell_words import Word

__all__ = ["keep_own_setup", "read_job", "read_meeting"]


def read_job(text: str) -> dict[str, Any]:
    """Return the pipeline fields in a job's spec, and the names of its nodes. Raises: SpecError."""
    job = JobSpec.from_json(text)
    said = asdict(job)
    fields = {name: said[name] for name in ("name", "description", "artifacts")}
    for section in ("parallelism", "training", "data", "model", "checkpoint"):
        if said[section] is not None:
            fields[section] = {name: value for name, value in said[section].items() if value is not None}
    if job.checkpoint is not None and job.checkpoint.keep is None:
        fields["checkpoint"]["keep"] = "all"
    return {**fields, "nodes": [node.name for node in job.nodes]}


def read_meeting(first: Launch, name: str, nodes: Sequence[str], *, variables: Mapping[str, Word]) -> dict[str, Any]:
    """Return the rendezvous of a job's ``nodes``, without what its ``name`` and its first node imply."""
    meeting = dict(first.fields.get("rendezvous", {}))
    if first.run_id not in ("", name):
        meeting["id"] = first.run_id
    if first.address and first.address not in nodes[:1]:
        meeting["endpoint"] = first.address
    if first.nodes[1] != len(nodes):
        meeting["max_nodes"] = first.nodes[1]
    host, endpoint = variables.get(FIRST, Word("")), variables.get(ENDPOINT, Word(""))
    if host.text and not host.fills:
        meeting["endpoint"] = host.text.strip("[]")
    if (port := endpoint.text.rpartition(":")[2]).isdecimal():
        meeting["port"] = int(port)
    return meeting


def keep_own_setup(launches: Sequence[Launch]) -> None:
    """Give each node its own setup lines if they differ; otherwise they stay those of the source."""
    setups = [launch.fields["source"].get("setup", []) for launch in launches]
    if any(setup != setups[0] for setup in setups):
        for launch, setup in zip(launches, setups, strict=True):
            launch.fields["source"].pop("setup", None)
            launch.node |= {"setup": setup} if setup else {}
