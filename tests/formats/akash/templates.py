"""The templates in sdl/ and the specs they are exports of. `python -m tests.formats.akash.templates` rewrites them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from detrain_nb.formats import export_spec
from detrain_nb.spec import PipelineSpec

FOLDER = Path(__file__).resolve().parents[3] / "sdl"
COMMAND = "python -m tests.formats.akash.templates"
IMAGE = "ghcr.io/you/train:1"  # built from sdl/container


@dataclass(frozen=True)
class Template:
    """A spec and the options of its export; a node that is not "cpu" has ``gpus`` GPUs."""

    spec: PipelineSpec
    options: dict[str, str] = field(default_factory=dict)
    gpus: int = 0


def _spec(name: str, *devices: str, script: str, **parallelism: int) -> PipelineSpec:
    nodes = [{"host": f"node-{index}", "devices": device} for index, device in enumerate(devices)]
    fields: dict[str, Any] = {"name": name, "image": IMAGE, "source": {"script": str(FOLDER / script)}, "nodes": nodes}
    return PipelineSpec.from_dict({**fields, "parallelism": parallelism})


_SESSION = {"start": "session"}
_MIXED = _spec("session", "cpu", "auto", "auto", script="pipeline.py", pp=3)
_CPUS = ("cpu", "cpu")
_GPUS = ("auto", "auto")
TEMPLATES = {
    "pipeline-cpu.yaml": Template(_spec("pipeline", *_CPUS, script="pipeline.py", pp=2)),
    "pipeline-gpu.yaml": Template(_spec("pipeline", *_GPUS, script="pipeline.py", pp=2), gpus=1),
    # the GPUs that DeTrain's own templates request
    "pipeline-a100.yaml": Template(
        _spec("pipeline", *_GPUS, script="pipeline.py", pp=2), {"gpu_model": "a100:40Gi"}, gpus=1
    ),
    "pipeline-p100.yaml": Template(
        _spec("pipeline", *_GPUS, script="pipeline.py", pp=2), {"gpu_model": "p100:16Gi"}, gpus=1
    ),
    "tensor-cpu.yaml": Template(_spec("tensor", *_CPUS, script="tensor.py", tp=2)),
    "tensor-gpu.yaml": Template(_spec("tensor", *_GPUS, script="tensor.py", tp=2), gpus=1),
    "tensor-a100-h100.yaml": Template(
        _spec("tensor", *_GPUS, script="tensor.py", tp=2), {"gpu_model": "a100:80Gi,h100"}, gpus=1
    ),
    "session-cpu.yaml": Template(_spec("session", *_CPUS, script="pipeline.py", pp=2), _SESSION),
    "session-gpu.yaml": Template(_spec("session", *_GPUS, script="tensor.py", tp=2), _SESSION, gpus=1),
    "session-all-nodes.yaml": Template(_MIXED, _SESSION, gpus=1),
    "session-first-node.yaml": Template(_MIXED, {**_SESSION, "part": "first"}, gpus=1),
    "session-other-nodes.yaml": Template(_MIXED, {**_SESSION, "part": "others"}, gpus=1),
}


def write(name: str) -> str:
    """Return the text of a template: the export of its spec."""
    template = TEMPLATES[name]
    return export_spec(template.spec, "akash", gpus=template.gpus, options=template.options)


if __name__ == "__main__":
    for name in TEMPLATES:
        (FOLDER / name).write_text(write(name), encoding="utf-8")
