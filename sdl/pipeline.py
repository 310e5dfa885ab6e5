"""A pipeline with a stage on each rank learns which of four numbers is the largest. It needs torch alone.

Each rank saves its stage in the artifacts of the job, or where it runs.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

STEPS, BATCH, MICROBATCHES, WIDTH, KINDS = 200, 64, 4, 128, 4


def make_stage(rank: int, size: int) -> nn.Module:
    layers: list[nn.Module] = [nn.Linear(KINDS if rank == 0 else WIDTH, WIDTH), nn.ReLU()]
    if rank == size - 1:
        layers.append(nn.Linear(WIDTH, KINDS))
    return nn.Sequential(*layers)


def main() -> None:
    use_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_gpu else torch.device("cpu")
    if use_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if use_gpu else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    model = make_stage(rank, size).to(device)
    schedule = Schedule1F1B(PipelineStage(model, rank, size, device), MICROBATCHES, nn.functional.cross_entropy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(0)  # all ranks draw the same
    for step in range(STEPS):
        inputs = torch.randn(BATCH, KINDS, generator=data)
        losses: list[torch.Tensor] = []
        optimizer.zero_grad()
        schedule.step(
            *([inputs.to(device)] if rank == 0 else []),
            **({"target": inputs.argmax(1).to(device), "losses": losses} if rank == size - 1 else {}),
        )
        optimizer.step()
        if losses and step % 20 == 0:
            print(f"step {step}: loss {torch.stack(losses).mean().item():.3f}", flush=True)
    torch.save(model.state_dict(), os.path.join(os.environ.get("DETRAIN_NB_ARTIFACTS", "."), f"stage-{rank}.pt"))
    dist.destroy_process_group()
    if not use_gpu:
        os._exit(0)  # all is saved, and a thread of gloo that is still awake would abort a Python that ends


if __name__ == "__main__":
    main()
