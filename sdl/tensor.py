"""Layers that are cut over all ranks learn which of four numbers is the largest. It needs torch alone.

The first rank saves the whole model in the artifacts of the job, or where it runs.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

STEPS, BATCH, WIDTH, KINDS = 200, 64, 128, 4


def main() -> None:
    use_gpu = torch.cuda.is_available()
    if use_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if use_gpu else "gloo")
    device = "cuda" if use_gpu else "cpu"
    torch.manual_seed(0)  # all ranks begin with the same weights, and draw the same data
    model = nn.Sequential(nn.Linear(KINDS, WIDTH), nn.ReLU(), nn.Linear(WIDTH, KINDS)).to(device)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        inputs = torch.randn(BATCH, KINDS).to(device)
        loss = nn.functional.cross_entropy(model(inputs), inputs.argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    whole = {
        name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in model.state_dict().items()
    }
    if dist.get_rank() == 0:
        torch.save(whole, os.path.join(os.environ.get("DETRAIN_NB_ARTIFACTS", "."), "model.pt"))
    dist.destroy_process_group()
    if not use_gpu:
        os._exit(0)  # all is saved, and a thread of gloo that is still awake would abort a Python that ends


if __name__ == "__main__":
    main()
