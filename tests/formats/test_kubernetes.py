"""The YAML for Kubeflow's operators: schemas and webhooks accept it, its two nodes meet, bad exports are refused."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from detrain_nb.errors import SpecError
from detrain_nb.formats import EXPORTERS, export_spec
from detrain_nb.plan.targets import TARGETS, as_typed
from detrain_nb.spec import PipelineSpec

from ..testbed.machine import free_ports
from .kubernetes_check import Fields, find_faults, read_documents
from .on_nodes import WAYS
from .test_torchrun import ONCE

KINDS = ("pytorchjob", "trainjob")
kinds = pytest.mark.parametrize("kind", KINDS)


def _spec(*nodes: dict[str, Any], **fields: Any) -> PipelineSpec:
    source = {"script_text": "print('hello')\n", **fields.pop("source", {})}
    data = {"name": "train", "image": "ghcr.io/you/train:1", "source": source, "nodes": nodes, **fields}
    return PipelineSpec.from_dict(data)


def _export(kind: str, spec: PipelineSpec, **options: str) -> list[Fields]:
    documents = read_documents(export_spec(spec, kind, options=options))
    assert find_faults(documents) == []
    return documents


def _pod(document: Fields) -> Fields:
    """Return the pod spec, with all that the job sets in its container."""
    spec = document["spec"]
    if document["kind"] == "PyTorchJob":
        return spec["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
    (patch,) = spec["runtimePatches"]
    (job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]["spec"]
    trainer = {**spec["trainer"], "resources": spec["trainer"].get("resourcesPerNode")}
    return {**pod, "containers": [{**trainer, **pod["containers"][0]}]}


GOOD: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("namespace", "pvc", "storage_class", "secret"), ("a", "b-9", "0a")),
    **dict.fromkeys(("pvc_size", "shm", "memory"), ("16Gi", "1Ti", "999999999G")),
    "cpus": ("8", "500m"),
}
ODD = ["", "a.b", "a..b", "-a", "A", "é", "a" * 64, "5", "5GB", "0Gi", "-1Gi", "1e3", "٣Gi", "0.5", "0", "\n", "'"]
URLS = ["/ckpt", "/ckpt/../../x", "ckpt", "~/ckpt", "/", "//", "s3://bucket/a", "file:///c", "/a:b", "/dev/shm"]
NAMES = st.from_regex(r"[a-z]([a-z0-9-]{0,50}[a-z0-9])?", fullmatch=True)
FIELDS = {
    "env": st.dictionaries(st.sampled_from("AB"), st.text("a$\n\t\x01é'"), max_size=2),
    "secrets": st.just(["HF_TOKEN", "B_TOKEN"]),
    "checkpoint": st.sampled_from(URLS).map(lambda url: {"url": url}),
    "rendezvous": st.integers(0, 2).map(lambda count: {"max_restarts": count}),
    "description": st.text("a#\n-", max_size=10),
}
ODD_FIELDS: list[dict[str, Any]] = [
    *({"name": name} for name in ("a-", "9", "A", "a.b", "a" * 63)),
    *({"image": image} for image in ("\uffff", "a\u2060b", "a'b", "x" * 600)),
    {"description": "\ufffe"},
]


@kinds
@settings(max_examples=60, deadline=None)
@given(
    name=NAMES,
    num_nodes=st.integers(1, 12),
    devices=st.sampled_from(["cpu", [0], list(range(16)), list(range(17))]),
    memory=st.none() | st.floats(1e-9, 1e12),
    fields=st.fixed_dictionaries({}, optional=FIELDS),
    odd_fields=st.just({}) | st.sampled_from(ODD_FIELDS),
    options=st.fixed_dictionaries({}, optional={name: st.sampled_from(good) for name, good in GOOD.items()}),
    odd_options=st.just({}) | st.dictionaries(st.sampled_from([*GOOD]), st.sampled_from(ODD), max_size=1),
)
def test_what_is_written_is_taken(
    kind: str,
    name: str,
    num_nodes: int,
    devices: Any,
    memory: float | None,
    fields: dict[str, Any],
    odd_fields: dict[str, Any],
    options: dict[str, str],
    odd_options: dict[str, str],
) -> None:
    nodes = [{"host": f"n{index}", "devices": devices, "memory_gb": memory} for index in range(num_nodes)]
    try:
        spec = _spec(*nodes, **{"name": name, **fields, **odd_fields})
    except SpecError:
        return
    try:
        text = export_spec(spec, kind, options={**options, **odd_options})
    except SpecError as exc:
        assert "\n" not in str(exc)
        return
    assert find_faults(read_documents(text)) == []
    assert f"  name: {spec.name}\n" in text or f'  name: "{spec.name}"\n' in text


Change = Callable[[Fields, Fields], None]  # called with the first document, a ConfigMap, and the last one, the job


def _replica(job: Fields) -> Fields:
    return job["spec"]["pytorchReplicaSpecs"]["Master"]


def _rename(fields: Fields, name: str, to: str) -> None:
    fields[to] = fields.pop(name)


BAD: dict[str, tuple[str, Change]] = {
    "a field of a ConfigMap that there is not": ("pytorchjob", lambda config, job: _rename(config, "data", "date")),
    "a number for a text": ("pytorchjob", lambda config, job: job["spec"].update(nprocPerNode=1)),
    "a text for a number": ("pytorchjob", lambda config, job: _replica(job).update(replicas="one")),
    "a misspelt field": ("pytorchjob", lambda config, job: _rename(job["spec"], "pytorchReplicaSpecs", "replicaSpecs")),
    "a misspelt field below": ("pytorchjob", lambda config, job: _rename(_replica(job), "restartPolicy", "restart")),
    "another version": ("pytorchjob", lambda config, job: job.update(apiVersion="kubeflow.org/v2")),
    "two masters": ("pytorchjob", lambda config, job: _replica(job).update(replicas=2)),
    "a container of another name": (
        "pytorchjob",
        lambda config, job: _replica(job)["template"]["spec"]["containers"][0].update(name="node"),
    ),
    "a volume that there is not": (
        "pytorchjob",
        lambda config, job: _replica(job)["template"]["spec"]["volumes"].pop(),
    ),
    "a name with capitals": ("trainjob", lambda config, job: job["metadata"].update(name="Train_1")),
    "a name that is too long": ("trainjob", lambda config, job: job["metadata"].update(name="a" * 60)),
    "no runtime": ("trainjob", lambda config, job: job["spec"].pop("runtimeRef")),
    "a word for a number": ("trainjob", lambda config, job: job["spec"]["trainer"].update(numNodes="two")),
    "a field of another kind": ("trainjob", lambda config, job: job["spec"]["trainer"].update(nodes=2)),
    "a variable of the operator": (
        "trainjob",
        lambda config, job: job["spec"]["trainer"].update(env=[{"name": "PET_NNODES", "value": "2"}]),
    ),
    "variables in a patch": (
        "trainjob",
        lambda config, job: _pod_of_patch(job)["containers"][0].update(env=[{"name": "A", "value": "2"}]),
    ),
    "a volume that is mounted twice": (
        "trainjob",
        lambda config, job: _pod_of_patch(job)["containers"][0]["volumeMounts"].append(
            {"name": "work", "mountPath": "/elsewhere"}
        ),
    ),
    "a script of more than 1 MiB": ("trainjob", lambda config, job: config["data"].update(a="x" * (1 << 20))),
}


def _pod_of_patch(job: Fields) -> Fields:
    (patch,) = job["spec"]["runtimePatches"]
    pod: Fields = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    return pod["spec"]


@pytest.mark.parametrize("case", BAD)
def test_what_no_server_takes_is_found(case: str) -> None:
    kind, change = BAD[case]
    documents = copy.deepcopy(_export(kind, _spec({"host": "a"}, {"host": "b"})))
    change(documents[0], documents[-1])
    assert find_faults(documents)


BESIDE: dict[str, tuple[str, Callable[[Fields], None]]] = {
    "a misspelt field": ("PersistentVolumeClaim", lambda claim: _rename(claim["spec"], "accessModes", "accessMode")),
    "another version": ("PersistentVolumeClaim", lambda claim: claim.update(apiVersion="v2")),
    "a text for a list": ("PersistentVolumeClaim", lambda claim: claim["spec"].update(accessModes="ReadWriteOnce")),
    "a mode that there is not": (
        "PersistentVolumeClaim",
        lambda claim: claim["spec"].update(accessModes=["ReadWrite"]),
    ),
    "no size": ("PersistentVolumeClaim", lambda claim: claim["spec"]["resources"].pop("requests")),
    "another kind": ("PersistentVolumeClaim", lambda claim: claim.update(kind="VolumeClaim")),
    "a misspelt field of a Service": ("Service", lambda service: _rename(service["spec"], "clusterIP", "clusterIp")),
    "another version of a Service": ("Service", lambda service: service.update(apiVersion="v2")),
    "a text for a port": ("Service", lambda service: service["spec"]["ports"][0].update(port="29500")),
    "two ports that are one": ("Service", lambda service: service["spec"].update(ports=[{"port": 1}, {"port": 1}])),
    "the name of the operator's own": ("Service", lambda service: service["metadata"].update(name="train")),
    "the label of another operator": (
        "Service",
        lambda service: service["spec"].update(selector={"training.kubeflow.org/job-name": "train"}),
    ),
    "an address of a Service": ("Service", lambda service: service["spec"].pop("clusterIP")),
}


@pytest.mark.parametrize("case", BESIDE)
def test_claim_or_service_that_no_server_takes_is_found(case: str) -> None:
    kind, change = BESIDE[case]
    documents = copy.deepcopy(_export("trainjob", _spec(), pvc_size="1Gi"))
    change(next(document for document in documents if document["kind"] == kind))
    assert find_faults(documents)


MEET = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1])
dist.all_reduce(total)
said = ["rank", dist.get_rank(), "of", dist.get_world_size(), int(total), sys.argv[1:], os.environ["WORD"]]
os.write(1, (" ".join(map(str, said)) + "\\n").encode())
dist.destroy_process_group()
"""


def _run_both(kind: str, spec: PipelineSpec, folder: Path) -> list[list[str]]:
    """Run the container of each node, with the ConfigMap's files in place; return the lines that each one prints."""
    around = {**os.environ, "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(free_ports(1)[0])}
    processes = []
    try:
        for node_rank in (1, 0):
            script = folder / str(node_rank) / "train.yaml"
            script.parent.mkdir()
            script.write_text(export_spec(spec, kind))
            start = WAYS[kind].start("sh", script, node_rank)
            env = {**start.env, **around}
            processes.append(
                subprocess.Popen(start.argv, cwd=script.parent, env=env, stdout=subprocess.PIPE, text=True)
            )
        said = [process.communicate(timeout=100)[0].splitlines() for process in processes]
    finally:
        for process in processes:
            with process:  # leaving the block waits until it has exited
                process.kill()
    assert [process.returncode for process in processes] == [0, 0], said
    return said


@pytest.mark.slow
def test_two_nodes_of_an_export_meet(tmp_path: Path) -> None:
    node = {"ranks": 1, "python": sys.executable}
    spec = _spec(
        {"host": "a", **node},
        {"host": "b", **node},
        source={"script_text": MEET, "arguments": ["a b", "$x ${y}"]},
        env={"WORD": "it's", "GLOO_SOCKET_IFNAME": "lo"},
    )
    said = sorted(line for lines in _run_both("pytorchjob", spec, tmp_path) for line in lines)
    assert said == [f"rank {rank} of 2 3 ['a b', '$x ${{y}}'] it's" for rank in range(2)]


@pytest.mark.slow
def test_ranks_of_an_export_begin_anew(tmp_path: Path) -> None:
    node = {"ranks": 1, "python": sys.executable}
    spec = _spec(
        {"host": "a", **node},
        {"host": "b", **node},
        source={"script_text": ONCE},
        env={"MARK": str(tmp_path / "mark"), "GLOO_SOCKET_IFNAME": "lo"},
        rendezvous={"max_restarts": 1},
    )
    first, second = _run_both("trainjob", spec, tmp_path)
    assert first == second and len(set(first)) == 2


@kinds
def test_pods_are_given_what_the_plan_and_the_options_say(kind: str) -> None:
    spec = _spec(
        *({"host": host, "devices": [0, 1, 2, 3]} for host in "abc"),
        secrets=["HF_TOKEN"],
        source={
            "git": {"url": "https://example.org/a.git", "token": "GIT_TOKEN"},
            "entry": "a.py",
            "script_text": None,
        },
    )
    options = {"namespace": "ml", "cpus": "8", "memory": "32Gi", "shm": "4Gi", "secret": "mine"}
    config, service, job = _export(kind, spec, **options)
    pod = _pod(job)
    container = pod["containers"][0]
    assert {document["metadata"]["namespace"] for document in (config, service, job)} == {"ml"}
    assert (service["kind"], service["metadata"]["name"]) == ("Service", "train-pods")
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 4, "cpu": "8", "memory": "32Gi"}
    assert container["resources"]["requests"] == container["resources"]["limits"]
    keys = [(each["name"], each["valueFrom"]["secretKeyRef"]) for each in container["env"]]
    assert keys == [(name, {"name": "mine", "key": name}) for name in ("HF_TOKEN", "GIT_TOKEN")]
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "4Gi"}} in pod["volumes"]
    if kind == "pytorchjob":
        assert job["spec"]["nprocPerNode"] == "4"
        assert {name: each["replicas"] for name, each in job["spec"]["pytorchReplicaSpecs"].items()} == {
            "Master": 1,
            "Worker": 2,
        }
    else:
        assert [container[name] for name in ("numNodes", "numProcPerNode")] == [3, 4]
        assert job["spec"]["runtimeRef"]["name"] == "torch-distributed"
        assert _export(kind, spec, runtime="mine")[-1]["spec"]["runtimeRef"]["name"] == "mine"


@kinds
def test_memory_of_nodes_without_gpus_is_that_of_the_spec(kind: str) -> None:
    def limits(**node: Any) -> Any:
        return _pod(_export(kind, _spec({"host": "a", **node}))[-1])["containers"][0].get("resources")

    assert limits(memory_gb=64.0)["limits"] == {"memory": "64G"}
    assert limits(memory_gb=1.5)["limits"] == {"memory": "1500M"}
    assert limits(memory_gb=80.0, devices=[0])["limits"] == {"nvidia.com/gpu": 1}, "it is that of a GPU"
    assert not limits()


@kinds
def test_claim_keeps_artifacts_and_checkpoints(kind: str) -> None:
    def claim(num_nodes: int = 1, **options: str) -> tuple[list[Fields], dict[str, Any], dict[str, Any]]:
        nodes = ({"host": f"n{index}"} for index in range(num_nodes))
        documents = _export(kind, _spec(*nodes, checkpoint=checkpoint), **options)
        pod = _pod(documents[-1])
        volumes = {each["name"]: each.get("persistentVolumeClaim") for each in pod["volumes"]}
        mounts = {each["mountPath"]: each for each in pod["containers"][0]["volumeMounts"]}
        return documents[2:-1], volumes, mounts

    checkpoint: dict[str, Any] | None = {"url": "file:///ckpt/../checkpoints"}
    (made,), volumes, mounts = claim(2, pvc_size="50Gi", storage_class="fast")
    assert made["spec"] == {
        "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": "50Gi"}},
        "storageClassName": "fast",
    }
    assert volumes["work"] == volumes["checkpoints"] == {"claimName": "train"}
    assert mounts["/checkpoints"] == {
        "name": "checkpoints",
        "mountPath": "/checkpoints",
        "subPath": "train.checkpoints",
    }
    assert claim()[0][0]["spec"]["accessModes"] == ["ReadWriteOnce"]
    none, volumes, _ = claim(pvc="shared")
    assert (none, volumes["work"]) == ([], {"claimName": "shared"})
    checkpoint = {"url": "s3://bucket/a"}
    assert claim()[:2] == ([], {"files": None, "work": None, "shm": None})
    assert claim(pvc_size="1Gi")[1]["work"] == {"claimName": "train"}


@kinds
def test_head_says_what_to_do(kind: str) -> None:
    spec = _spec({"host": "a", "address": "10.0.0.1"}, secrets=["HF_TOKEN"], rendezvous={"port": 1, "timeout_s": 9})
    head = [line for line in export_spec(spec, kind, options={"namespace": "ml"}).splitlines() if line.startswith("#")]
    left_out = "nodes.address, rendezvous.port, rendezvous.timeout_s"
    assert head[:2] == ["# train: 1 rank on 1 node, cpu.", f"# Left out, because nothing here uses it: {left_out}."]
    commands = [line.removeprefix("#   kubectl -n ml ") for line in head[3:] if line.startswith("#   ")]
    assert commands[:2] == [
        'create secret generic train --from-literal=HF_TOKEN="$HF_TOKEN"',
        "apply --server-side -f train.yaml",
    ]
    assert commands[-1] == f"delete {kind}/train configmap/train service/train-pods"
    for command in commands:
        done = subprocess.run(["sh", "-n"], input=command, text=True, capture_output=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")
    assert any("is lost when its pods exit" in line for line in head)
    head = [line for line in export_spec(spec, kind, options={"pvc": "shared"}).splitlines() if line.startswith("#")]
    assert any("--overrides=" in line and '"claimName": "shared"' in line for line in head)


REFUSED: dict[str, tuple[dict[str, Any], dict[str, str], str]] = {
    "a name with capitals": (
        {"name": "My_Job"},
        {},
        r"^name My_Job: is invalid in Kubernetes: give a-z, 0-9 and -, at most \d\d here",
    ),
    "a name that is too long": (
        {"name": "a" * 55},
        {},
        r"^name aaa.*: is invalid in Kube.* at most [45]\d here",
    ),
    "99 GPUs on a node": (
        {"nodes": [{"host": "a", "devices": list(range(99))}]},
        {},
        r"^99 GPUs on a node: a node has at most 16: spread them over more nodes$",
    ),
    "more variables than a TrainJob has": (
        {"secrets": [f"TOKEN_{index}" for index in range(129)]},
        {},
        r"^secrets: a container reads at most 120 keys of a Secret, .*: give fewer, or shorter names$",
    ),
    "a variable that no Secret can have": ({"secrets": ["T" * 255]}, {}, r"^secrets: .* of at most 253 characters: "),
    "an image that is none": ({"image": "a'b"}, {}, r"^image \"a'b\": give the name of an image, such as "),
    "a key file": (
        {"source": {"script_text": None, "git": {"url": "git@a.org:b", "ssh_key": "~/k"}, "entry": "a.py"}},
        {},
        r"^source\.git\.ssh_key: containers have no key file: give source\.git\.token",
    ),
    "a folder for checkpoints that is nowhere": (
        {"checkpoint": {"url": "checkpoints"}},
        {},
        r"^checkpoint\.url checkpoints: .* give the absolute path .*, or a storage URL, such as .*$",
    ),
    "a folder of the system": ({"checkpoint": {"url": "/a/../etc"}}, {}, r"^checkpoint\.url /a/\.\./etc: .* path"),
    "a script of 1 MB": (
        {"source": {"script_text": "#" * 1_000_000}},
        {},
        r"^source: the script is too large for a ConfigMap, which holds 1 MB: give source\.git, or ",
    ),
    "a size of no kind": ({}, {"memory": "32GB"}, r"^--memory '32GB': give a Kubernetes size, such as 16Gi$"),
    "a claim that is there and its size": (
        {},
        {"pvc": "a", "pvc_size": "1Gi"},
        r"^--pvc a is an existing claim: leave out --pvc-size$",
    ),
    "fewer nodes": (
        {"nodes": [{"host": "a"}, {"host": "b"}], "rendezvous": {"min_nodes": 1}},
        {},
        r"^rendezvous\.min_nodes and max_nodes: .* leave them out$",
    ),
}


@kinds
@pytest.mark.parametrize("case", REFUSED)
def test_what_kubernetes_cannot_do_is_refused(kind: str, case: str) -> None:
    fields, options, message = REFUSED[case]
    with pytest.raises(SpecError, match=message):
        export_spec(_spec(**fields), kind, options=options)


def test_targets_have_the_options_of_their_exporters() -> None:
    for kind in KINDS:
        spec = _spec()
        for option in TARGETS[kind].options:
            with pytest.raises(SpecError, match=f"^{as_typed(option)} "):
                EXPORTERS[kind](spec, spec.plan(), **{option: "\n"})
