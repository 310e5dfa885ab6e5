"""Checks of a YAML by all schemas and the webhooks' rules, as an API server with Kubeflow's operators makes them."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import yaml

SCHEMAS = Path(__file__).parent / "kubernetes"
MOST_BYTES = 1 << 20  # limit for the data of a ConfigMap
VERSIONS = {
    "ConfigMap": "v1",
    "PersistentVolumeClaim": "v1",
    "Service": "v1",
    "PyTorchJob": "kubeflow.org/v1",
    "TrainJob": "trainer.kubeflow.org/v1alpha1",
}
OF_TORCHRUN = {"PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"}
LABEL = re.compile("[a-z]([-a-z0-9]{0,61}[a-z0-9])?")  # a DNS label, RFC 1035

Fields = dict[str, Any]


def read_documents(text: str) -> list[Fields]:
    return list(yaml.load_all(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))


def find_faults(documents: list[Fields]) -> list[str]:
    """Return the faults of the documents, each beginning with its path; an empty list means none."""
    faults = [fault for document in documents for fault in _check_schema(document)]
    return faults or [
        f"{where}: webhook" for document in documents for where in _check_as_webhooks(document, documents)
    ]


def _check_schema(document: Fields) -> Iterator[str]:
    kind = str(document.get("kind"))
    if kind not in VERSIONS:
        yield f"{kind}: is none of {', '.join(VERSIONS)}"
        return
    checked = _schema(kind)
    for error in jsonschema.Draft202012Validator(checked).iter_errors(document):
        yield f"{kind}: {error.json_path}: {error.message}"
    yield from _find_twins(document, checked, kind)


@cache
def _schema(kind: str) -> Fields:
    schema: Fields = _make_strict(json.loads(gzip.decompress((SCHEMAS / f"{kind.lower()}.json.gz").read_bytes())))
    fields = schema["properties"]
    schema["required"] = ["apiVersion", "kind", "metadata", *(["spec"] if "spec" in fields else [])]
    fields["apiVersion"] = {"const": VERSIONS[kind]}
    texts = {"type": "object", "additionalProperties": {"type": "string"}}
    known = {"name": {"type": "string"}, "namespace": {"type": "string"}, "labels": texts, "annotations": texts}
    fields["metadata"] = {"required": ["name"], "properties": known, "additionalProperties": False}
    return schema


def _make_strict(schema: Any) -> Any:
    """Return a schema as strict as ``kubectl apply --validate=strict``: unknown fields and nulls are faults."""
    if isinstance(schema, list):
        return [_make_strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {
        key: {name: _make_strict(each) for name, each in value.items()} if key == "properties" else _make_strict(value)
        for key, value in schema.items()
    }
    if made.get("x-kubernetes-int-or-string"):
        made.setdefault("anyOf", [{"type": "integer"}, {"type": "string"}])
    if "properties" in made and not made.get("x-kubernetes-preserve-unknown-fields"):
        made.setdefault("additionalProperties", False)
    return made


def _find_twins(value: Any, schema: Any, where: str) -> Iterator[str]:
    """Yield lists in which two items have the same keys although the schema requires them to be unique."""
    if isinstance(value, dict):
        for name, each in value.items():
            below = schema.get("properties", {}).get(name, schema.get("additionalProperties") or {})
            yield from _find_twins(each, below, f"{where}.{name}")
    elif isinstance(value, list):
        keys = schema.get("x-kubernetes-list-map-keys", [])
        found = [tuple(item.get(key) for key in keys) for item in value] if keys else []
        if len(set(found)) < len(found):
            yield f"{where}: two have the same {', '.join(keys)}"
        for index, item in enumerate(value):
            yield from _find_twins(item, schema.get("items", {}), f"{where}[{index}]")


def _check_as_webhooks(document: Fields, documents: list[Fields]) -> Iterator[str]:
    """Yield faults that no schema finds: rules of the operators, and of Kubernetes for pods and ConfigMaps."""
    name, spec = document["metadata"]["name"], document.get("spec", {})
    if not LABEL.fullmatch(name):
        yield "metadata.name"
    if document["kind"] == "ConfigMap":
        if sum(len(text.encode()) for text in document["data"].values()) > MOST_BYTES:
            yield "data"
        if not all(re.fullmatch("[-._a-zA-Z0-9]{1,253}", key) for key in document["data"]):
            yield "data: a key"
    elif document["kind"] == "PersistentVolumeClaim":
        if not set(spec.get("accessModes", [""])) <= {"ReadWriteOnce", "ReadWriteMany"}:
            yield "spec.accessModes"
        if "storage" not in spec.get("resources", {}).get("requests", {}):
            yield "spec.resources.requests"
    elif document["kind"] == "Service":
        yield from _check_service(name, spec, documents[-1])
    elif document["kind"] == "PyTorchJob":
        yield from _check_pytorchjob(name, spec, documents)
    elif document["kind"] == "TrainJob":
        yield from _check_trainjob(name, spec, documents)


def _check_service(name: str, spec: Fields, job: Fields) -> Iterator[str]:
    """Yield faults of a service, which must select the job's pods and not have a name that the operator uses."""
    of_job = job["metadata"]["name"]
    label, own, port = {
        "PyTorchJob": ("training.kubeflow.org/job-name", f"{of_job}-(master|worker)-[0-9]+", 23456),
        "TrainJob": ("jobset.sigs.k8s.io/jobset-name", of_job, 29500),
    }[job["kind"]]
    if re.fullmatch(own, name):
        yield "metadata.name: the operator's own"
    if spec.get("clusterIP") != "None" or not spec.get("publishNotReadyAddresses"):
        yield "spec: the pods have no addresses until all are ready"
    if spec.get("selector") != {label: of_job}:
        yield "spec.selector"
    if [each["port"] for each in spec.get("ports", [])] != [port] or not LABEL.fullmatch(spec["ports"][0]["name"]):
        yield "spec.ports"


def _check_pytorchjob(name: str, spec: Fields, documents: list[Fields]) -> Iterator[str]:
    replicas = spec["pytorchReplicaSpecs"]
    if not set(replicas) <= {"Master", "Worker"} or replicas.get("Master", {}).get("replicas") != 1:
        yield "pytorchReplicaSpecs"
    if not re.fullmatch("auto|cpu|gpu|[0-9]+", spec["nprocPerNode"]):
        yield "nprocPerNode"
    for kind, each in replicas.items():
        pod = each["template"]["spec"]
        trained = [container for container in pod["containers"] if container["name"] == "pytorch"]
        if len(trained) != 1 or not all(container.get("image", "").strip() for container in pod["containers"]):
            yield f"{kind}: containers"
        if each["replicas"] < 1 or not LABEL.fullmatch(f"{name}-{kind.lower()}-{each['replicas'] - 1}"):
            yield f"{kind}: replicas"
        for container in pod["containers"]:
            yield from _check_mounts(container, pod, documents)


def _check_trainjob(name: str, spec: Fields, documents: list[Fields]) -> Iterator[str]:
    trainer = spec["trainer"]
    if OF_TORCHRUN & {each["name"] for each in trainer.get("env", [])}:
        yield "trainer.env"
    if not LABEL.fullmatch(f"{name}-node-0-{trainer['numNodes'] - 1}-abcde"):
        yield "metadata.name: of its last pod"
    for patch in spec.get("runtimePatches", []):
        if not re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9/_.~!$&'()*+,;=:-]+", patch["manager"]):
            yield "runtimePatches.manager"
        for job in patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]:
            pod = job["template"]["spec"]["template"]["spec"]
            if job["name"] != "node" or [each["name"] for each in pod["containers"]] != ["node"]:
                yield "runtimePatches: a job or container that the runtime does not have"
            for container in pod["containers"]:
                if container.get("env"):
                    yield "runtimePatches: env"
                yield from _check_mounts(container, pod, documents)


def _check_mounts(container: Fields, pod: Fields, documents: list[Fields]) -> Iterator[str]:
    """Yield faults of volumes and mounts, such as a path used twice or a ConfigMap missing from the documents."""
    volumes, mounts = pod["volumes"], container["volumeMounts"]
    made = {(document["kind"], document["metadata"]["name"]) for document in documents}
    if {each["name"] for each in mounts} - {each["name"] for each in volumes}:
        yield "volumeMounts: no such volume"
    places = [each["mountPath"] for each in mounts]
    if len(set(places)) < len(places) or not all(re.fullmatch("/[^:]+", place) for place in places):
        yield "volumeMounts: mountPath"
    for volume in volumes:
        sources = set(volume) - {"name"}
        if len(sources) != 1 or ("configMap" in volume and ("ConfigMap", volume["configMap"]["name"]) not in made):
            yield "volumes"
