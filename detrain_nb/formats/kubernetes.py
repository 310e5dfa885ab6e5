"""What the exports for both Kubeflow operators share: a ConfigMap of a job's files, a claim for its output, its pods.

Every pod runs one node: its container runs a script of the ConfigMap, which execs torchrun. The operator passes the
first node's address and the node rank in torchrun's own variables. A Service gives all pods one DNS name.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from ..documents import format_document
from ..errors import SpecError
from ..launch import NodeLaunch, launch_in_operator
from ..plan import Plan
from ..plan.choices import TIMEOUT_S
from ..spec import Node, PipelineSpec
from .alike import check_alike, fill_in_host, launch_alike, list_chosen_there, list_meeting
from .job_script import (
    FOLDER,
    JOB_SPEC,
    NODE,
    JobProgram,
    Put,
    describe,
    find_checkpoint_folder,
    list_needed,
    read_program,
    write_begin,
    write_left_out,
    write_preparation,
    write_setup,
)
from .kubernetes_words import (
    Options,
    check_image,
    check_name,
    check_needs,
    find_resources,
)
from .shell import quote, quote_command

FILES_AT = "/etc/detrain-nb"  # in a container: the ConfigMap
WORK_AT = "/detrain-nb"  # in a container: the parent of the job's folder
POD_IP = "DETRAIN_NB_POD_IP"
_FILES = "DETRAIN_NB_JOB_FILES"  # in the script: where the ConfigMap is
_SHM = "2Gi"
_CLAIM = "10Gi"
_NO_CLAIM = "# Its output is lost when its pods exit: --pvc-size creates a claim to keep it, --pvc names one."
_USERS = {"fsGroup": 1000, "fsGroupChangePolicy": "OnRootMismatch"}  # so any user of an image may write to the claim


@dataclass(frozen=True)
class Pods:
    """The pods of a job: what their containers share, and the documents that precede the job's own."""

    metadata: dict[str, Any]
    ranks: int
    container: dict[str, Any]  # image, command and env
    resources: dict[str, Any]
    mounts: list[dict[str, Any]]
    volumes: dict[str, Any]  # and their security context: fields of the pod
    documents: list[dict[str, Any]]
    head: list[str]
    secret: str  # the words for kubectl that create it; empty if none is read
    claim: str  # where its output is kept; empty: nowhere

    @property
    def kubectl(self) -> str:
        namespace = self.metadata.get("namespace")
        return f"kubectl -n {namespace}" if namespace else "kubectl"


def make_pods(
    spec: PipelineSpec, plan: Plan, options: Options, *, by: str, longest: str, label: str, port: int
) -> Pods:
    """Return the pods that run the spec; ``longest`` is the suffix of the longest pod name.

    The operator gives each pod the ``label`` with the job's name; nodes meet at the ``port`` of the first.
    Raises: SpecError for a spec that ``by``, or Kubernetes, cannot run.
    """
    image = check_image(spec, by=by)
    check_name(spec.name, longest=longest)
    check_needs(spec)
    ranks, node = check_alike(spec, plan, by=by)
    checkpoints = find_checkpoint_folder(spec, by=by, taken=(WORK_AT,))
    claim = options.claim(spec.name, is_needed=bool(checkpoints))
    files = _Files()
    program = read_program(spec, plan, put=files.put)
    files.data["run.sh"] = "\n".join(_write_script(spec, plan, program, node, ranks, files.put)) + "\n"
    metadata = {"name": spec.name, **({"namespace": options.namespace} if options.namespace else {})}
    needed, secret = list_needed(spec), options.secret or spec.name
    env = [{"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": name}}} for name in needed]
    if spec.rendezvous.max_restarts:
        env.append({"name": POD_IP, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}})
    values = " ".join(f'--from-literal={name}="${name}"' for name in needed)
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": files.data}
    made = [_claim(metadata, options, nodes=len(plan.nodes))] if claim and not options.pvc else []
    return Pods(
        metadata=metadata,
        ranks=ranks,
        container={
            "image": image,
            "command": ["/bin/sh", f"{FILES_AT}/run.sh", WORK_AT],
            **({"env": env} if env else {}),
        },
        resources=find_resources(spec, options, ranks=ranks, device=plan.device),
        mounts=_mount(spec.name, checkpoints),
        volumes=_list_volumes(spec.name, options, claim=claim, checkpoints=checkpoints),
        documents=[config, _serve(metadata, label=label, port=port), *made],
        head=[f"# {describe(spec, plan)}.", *write_left_out(spec, *_list_left_out(spec))],
        secret=f"create secret generic {secret} {values}" if needed else "",
        claim=claim,
    )


@dataclass
class _Files:
    """The texts in the ConfigMap, and the lines by which the script copies them from there."""

    data: dict[str, str] = field(default_factory=dict)

    def put(self, text: str, *, to: str) -> str:
        key = "job_spec.json" if to == JOB_SPEC else "script.py"
        self.data[key] = text
        return f'cp "${_FILES}/{key}" {to}'


def _write_script(
    spec: PipelineSpec, plan: Plan, program: JobProgram, node: Node | None, ranks: int, put: Put
) -> list[str]:
    launch = _launch(spec, program, nodes=len(plan.nodes), ranks=ranks)
    filled = {
        "--rdzv-endpoint": '"$PET_MASTER_ADDR:$PET_MASTER_PORT"',
        "--local-addr": f'"${POD_IP}"',  # a pod's host name does not resolve on the others
        **fill_in_host(spec),
    }
    return [
        "#!/bin/sh",
        *write_begin(spec.name),
        "",
        f'{_FILES}="${{0%/*}}"',
        'cd "$1"',
        f"{NODE}=$PET_NODE_RANK",
        f'{FOLDER}="$PWD"/{quote(spec.name)}.job/${NODE}',
        *write_preparation(spec, plan, program, env=launch.env, put=put),
        "",
        *write_setup(spec, node),
        f"exec {quote_command(launch.argv, options=filled, below=program.below)}",
    ]


def _launch(spec: PipelineSpec, program: JobProgram, *, nodes: int, ranks: int) -> NodeLaunch:
    """Return the launch; with restarts, nodes meet by c10d: the operator's variables serve only one rendezvous."""
    if not spec.rendezvous.max_restarts:
        return launch_in_operator(program.program, python=spec.python_of(0))
    return launch_alike(spec, program, nodes=nodes, ranks=ranks, is_told_address=True)


def _list_left_out(spec: PipelineSpec) -> list[str]:
    settings = spec.rendezvous
    return [
        *list_chosen_there(spec),
        *list_meeting(spec),
        *(["rendezvous.timeout_s"] if settings.timeout_s != TIMEOUT_S and not settings.max_restarts else []),
    ]


def _mount(name: str, checkpoints: str) -> list[dict[str, Any]]:
    kept = {"name": "checkpoints", "mountPath": checkpoints, "subPath": f"{name}.checkpoints"}
    return [
        {"name": "files", "mountPath": FILES_AT, "readOnly": True},
        {"name": "work", "mountPath": WORK_AT},
        {"name": "shm", "mountPath": "/dev/shm"},
        *([kept] if checkpoints else []),
    ]


def _list_volumes(name: str, options: Options, *, claim: str, checkpoints: str) -> dict[str, Any]:
    work = {"persistentVolumeClaim": {"claimName": claim}} if claim else {"emptyDir": {}}
    volumes = [
        {"name": "files", "configMap": {"name": name}},
        {"name": "work", **work},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": options.shm or _SHM}},
        # the same claim again, as a TrainJob mounts a volume at only one path
        *([{"name": "checkpoints", **work}] if checkpoints else []),
    ]
    return {**({"securityContext": _USERS} if claim else {}), "volumes": volumes}


def _name_service(job: str) -> str:
    """Return a name that no operator uses: their Services are named as the job, or as a pod."""
    return f"{job}-pods"


def _serve(metadata: dict[str, Any], *, label: str, port: int) -> dict[str, Any]:
    """Return a Service: one DNS name for all pods of the job, even before they are ready."""
    name = metadata["name"]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {**metadata, "name": _name_service(name)},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {label: name},
            "ports": [{"name": "rendezvous", "port": port}],
        },
    }


def _claim(metadata: dict[str, Any], options: Options, *, nodes: int) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": metadata,
        "spec": {
            "accessModes": ["ReadWriteOnce" if nodes == 1 else "ReadWriteMany"],
            "resources": {"requests": {"storage": options.pvc_size or _CLAIM}},
            **({"storageClassName": options.storage_class} if options.storage_class else {}),
        },
    }


def write_documents(pods: Pods, job: dict[str, Any], *, needs: str, logs: str, first: str) -> str:
    """Return all documents, after comments on how to use them; ``first`` is the first pod as a shell word.

    Raises: SpecError when the script is larger than a ConfigMap, whose limit is that of our own documents.
    """
    try:
        texts = [format_document(document, ".yaml") for document in [*pods.documents, job]]
    except SpecError:
        raise SpecError(
            "source: the script is too large for a ConfigMap, which holds 1 MB: give source.git, or put the script "
            "into the image and give source.module"
        ) from None
    told = _tell(pods, kind=job["kind"].lower(), needs=needs, logs=logs, first=first)
    return "\n".join([*pods.head, *told]) + "\n" + "---\n".join(texts)


def _tell(pods: Pods, *, kind: str, needs: str, logs: str, first: str) -> list[str]:
    name, kubectl = pods.metadata["name"], f"#   {pods.kubectl}"
    made = f"{WORK_AT}/{name}.job/0/artifacts"
    return [
        f"# Needs {needs}.",
        *([f"{kubectl} {pods.secret}"] if pods.secret else []),
        f"{kubectl} apply --server-side -f {name}.yaml",
        f"{kubectl} {logs}",
        f"{kubectl} cp {first}:{made} artifacts   # while it runs",
        *(_tell_claim(pods, kubectl=kubectl, made=made) if pods.claim else [_NO_CLAIM]),
        f"{kubectl} delete {kind}/{name} configmap/{name} service/{_name_service(name)}",
    ]


def _tell_claim(pods: Pods, *, kubectl: str, made: str) -> list[str]:
    """Return comments on how to copy files from a claim when no pod of the job is running."""
    reader, image = f"{pods.metadata['name']}-files", pods.container["image"]
    mount = {"name": "work", "mountPath": WORK_AT}
    container = {"name": reader, "image": image, "command": ["sleep", "3600"], "volumeMounts": [mount]}
    volume = {"name": "work", "persistentVolumeClaim": {"claimName": pods.claim}}
    overrides = json.dumps({"spec": {"containers": [container], "volumes": [volume]}})
    return [
        f"# The claim {pods.claim} keeps {made}: after the job's end, copy it with another pod:",
        f"{kubectl} run {reader} --image={image} --restart=Never --overrides={quote(overrides)}",
        f"{kubectl} cp {reader}:{made} artifacts",
        f"{kubectl} delete pod {reader}",
    ]
