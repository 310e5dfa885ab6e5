"""A pipeline as a PyTorchJob of Kubeflow's training operator: one YAML file for kubectl apply."""

from __future__ import annotations

from typing import Any

from ..plan import Plan
from ..spec import PipelineSpec
from .kubernetes import make_pods, write_documents
from .kubernetes_words import Options

__all__ = ["export"]

_LABEL, _PORT = "training.kubeflow.org/job-name", 23456  # the operator's own


def export(spec: PipelineSpec, plan: Plan, **options: str) -> str:
    """Return the documents of a job. Kubernetes chooses the nodes; the spec gives their number and what each has.

    The operator creates another Service for each pod. Raises: SpecError for a spec that it cannot run.
    """
    workers = len(plan.nodes) - 1
    longest = f"-worker-{workers - 1}" if workers else "-master-0"
    by = "the training operator"
    pods = make_pods(spec, plan, Options(**options), by=by, longest=longest, label=_LABEL, port=_PORT)
    container = {
        "name": "pytorch",  # the operator looks for this name
        **pods.container,
        **({"resources": pods.resources} if pods.resources else {}),
        "volumeMounts": pods.mounts,
    }

    def replicas(count: int) -> dict[str, Any]:
        # torchrun restarts the ranks; restarts of pods would multiply that
        pod = {"spec": {"containers": [container], **pods.volumes}}
        return {"replicas": count, "restartPolicy": "Never", "template": pod}

    job = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": pods.metadata,
        "spec": {
            "nprocPerNode": str(pods.ranks),
            "runPolicy": {"cleanPodPolicy": "None", "backoffLimit": 0},
            "pytorchReplicaSpecs": {"Master": replicas(1), **({"Worker": replicas(workers)} if workers else {})},
        },
    }
    return write_documents(
        pods,
        job,
        needs="Kubeflow's training operator, 1.9",
        logs=f"logs -f {spec.name}-master-0",
        first=f"{spec.name}-master-0",
    )
