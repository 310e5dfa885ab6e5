"""A pipeline as a TrainJob of Kubeflow Trainer: one YAML file for kubectl apply."""

from __future__ import annotations

from ..plan import Plan
from ..spec import PipelineSpec
from .kubernetes import make_pods, write_documents
from .kubernetes_words import Options, check_word

__all__ = ["export"]

_NODE = "node"  # the name of the job, and of its container, in the runtimes for torch
_RANDOM = "-xxxxx"  # the random suffix of each pod's name
_LABEL, _PORT = "jobset.sigs.k8s.io/jobset-name", 29500  # of JobSet, which creates the pods, and of Trainer


def export(spec: PipelineSpec, plan: Plan, *, runtime: str = "torch-distributed", **options: str) -> str:
    """Return the documents of a job. Kubernetes chooses the nodes; the spec gives their number and what each has.

    ``runtime`` is a ClusterTrainingRuntime, which creates another Service. Raises: SpecError for a spec that Trainer
    cannot run.
    """
    check_word("runtime", runtime, rule="secret")
    longest = f"-{_NODE}-0-{len(plan.nodes) - 1}{_RANDOM}"
    by = "Kubeflow Trainer"
    pods = make_pods(spec, plan, Options(**options), by=by, longest=longest, label=_LABEL, port=_PORT)
    pod = {"containers": [{"name": _NODE, "volumeMounts": pods.mounts}], **pods.volumes}
    patched = {"name": _NODE, "template": {"spec": {"template": {"spec": pod}}}}
    job = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": pods.metadata,
        "spec": {
            "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "ClusterTrainingRuntime", "name": runtime},
            "trainer": {
                **pods.container,
                "numNodes": len(plan.nodes),
                "numProcPerNode": pods.ranks,
                **({"resourcesPerNode": pods.resources} if pods.resources else {}),
            },
            "runtimePatches": [
                {
                    "manager": "detrain-nb/export",
                    "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [patched]}}},
                }
            ],
        },
    }
    rank_0 = f"-l {_LABEL}={spec.name},batch.kubernetes.io/job-completion-index=0"
    find = f"{pods.kubectl} get pod {rank_0} -o jsonpath='{{.items[0].metadata.name}}'"
    return write_documents(
        pods,
        job,
        needs=f"Kubeflow Trainer, 2.2 or newer, with its runtime {runtime}",
        logs=f"logs -f {rank_0}",
        first=f'"$({find})"',
    )
