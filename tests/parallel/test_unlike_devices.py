"""A pipeline whose stages are on different device types: tensors between them pass through the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from detrain_nb.errors import SpecError
from detrain_nb.node.agent.agent import count_gpus
from detrain_nb.parallel import PipelineStages

SCRIPT = """
import os, sys
import torch, torch.distributed as dist, torch.nn.functional as F
from torch import nn
from detrain_nb import parallel as par, training

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.inner, self.head = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x):
        return self.head(torch.tanh(self.inner(self.tokens(x))))

def loss(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())

device = sys.argv[1] if os.environ["RANK"] == "1" else "cpu"
dist.init_process_group("gloo")
torch.manual_seed(0)
whole, model = Tied(), Tied()
model.load_state_dict(whole.state_dict())
x, y = torch.randint(0, 11, (8, 5)), torch.randint(0, 11, (8, 5))
mesh = par.make_mesh(pp=2, device_type="cpu")
pipeline = par.parallelize(
    model, mesh, example_inputs=x[:2], loss=loss, pp=["inner"], num_microbatches=4, device=device, schedule=sys.argv[2]
)
assert all(parameter.device.type == device for parameter in pipeline.parameters())
assert pipeline.link_device.type == "cpu"
data = torch.utils.data.DataLoader(list(zip(x, y)), batch_size=8)
trainer = training.Trainer(
    pipeline, train=data, evaluate=data, steps=2, clip=0.1, optimizer="sgd", optimizer_options={"lr": 1.0}
)
result = trainer.fit()
for _ in range(2):
    loss(whole(x), y).backward()
    nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter -= parameter.grad
            parameter.grad = None
references = dict(whole.named_parameters(remove_duplicate=False))
for name, parameter in pipeline.named_parameters():
    assert torch.allclose(parameter.detach().cpu(), references[name], atol=1e-5), name
assert abs(result.evaluations[-1]["loss"] - float(loss(whole(x), y))) < 1e-5
predicted = pipeline.predict(x)
assert predicted is None or torch.allclose(predicted.cpu(), whole(x), atol=1e-5)
print("equal", flush=True)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1F1B", pytest.param("GPipe", marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(count_gpus() == 0, reason="no GPU on this machine")]
        ),
    ],
)
def test_stage_on_the_cpu_beside_one_on(device: str, schedule: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    ran = subprocess.run(
        [*torchrun, str(tmp_path / "script.py"), device, schedule],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0 and ran.stdout.count("equal") == 2, ran.stderr[-3000:]


def test_autocast_on_unlike_devices_is_refused() -> None:
    """Under autocast a LayerNorm returns float32 on a GPU, but bfloat16 on the CPU."""
    half = SimpleNamespace(autocast=torch.bfloat16)
    stages = SimpleNamespace(device=torch.device("cpu"), arrangement=half, gather=lambda kind, **_: [kind, "cuda"])
    with pytest.raises(SpecError, match="bf16 is not supported with stages on cpu and cuda"):
        PipelineStages._find_link(stages)  # type: ignore[arg-type]
