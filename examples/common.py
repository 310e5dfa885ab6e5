"""What the examples share: DeTrain's arguments, the process group, FashionMNIST, a training that saves one file."""

from __future__ import annotations

import argparse
import contextlib
import gzip
import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, TensorDataset

from detrain_nb import parallel as par
from detrain_nb import training
from detrain_nb.errors import DetrainError

FOLDER = Path("/usr/share/datasets/fashion-mnist")  # Debian's dataset-fashion-mnist


# ---- arguments


class Parser(argparse.ArgumentParser):
    """Arguments of every example, as in DeTrain; ``get_args`` checks them against the number of processes."""

    def __init__(self, description: str | None) -> None:
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        self.add_argument("--epochs", type=_count, default=3)
        self.add_argument("--batch_size", type=_count, default=10, help="on each replica of the model")
        self.add_argument("--split_size", type=_count, default=2, help="microbatches that a pipeline cuts a batch into")
        # torchrun takes --log for an abbreviation of its own option, unless `--` precedes main.py.
        self.add_argument("--report", "--log", type=_count, default=100, metavar="STEPS", help="when the loss is shown")
        self.add_argument("--lr", type=float, default=1e-3)
        self.add_argument("--gpu", help="0_1_1: the first process, the master, on the CPU, and two on GPUs")
        self.add_argument("--model_name", default="trained_model", help="of the file, without .safetensors")
        self.add_argument("--samples", type=_count, help="take so many to train and to test, at most")

    def get_args(self, *, has_master: bool = False) -> argparse.Namespace:
        """Return the arguments, with ``rank``, ``device`` and, for a pipeline of 3 processes or more, the master."""
        args = self.parse_args()
        args.rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        if world_size < 2:
            self.error("this needs at least two processes: torchrun --nproc_per_node=2 main.py")
        args.has_master = has_master and world_size > 2
        args.is_master = args.has_master and args.rank == 0
        args.device = torch.device(self._device_type(args, world_size))
        if args.device.type == "cuda":
            torch.cuda.set_device(args.device)
        return args

    def _device_type(self, args: argparse.Namespace, world_size: int) -> str:
        entries = args.gpu.split("_") if args.gpu else ["0"] * world_size
        if len(entries) == world_size + 1 and not args.has_master:
            entries = entries[1:]  # DeTrain's commands name a master even for examples without one
        if len(entries) != world_size or not set(entries) <= {"0", "1"}:
            self.error(
                f"--gpu={args.gpu}: give 0 or 1 for each of {world_size} processes, as {'_'.join('0' * world_size)}"
            )
        if len(set(entries[args.has_master :])) > 1:
            self.error(f"--gpu={args.gpu}: those that train are all on GPUs, or all on CPUs")
        local_rank = int(os.environ["LOCAL_RANK"])
        first = args.rank - local_rank
        here = entries[first : first + int(os.environ["LOCAL_WORLD_SIZE"])]
        if here.count("1") > torch.cuda.device_count():
            self.error(
                f"--gpu={args.gpu}: {here.count('1')} GPUs are asked for here, and {torch.cuda.device_count()} found"
            )
        return f"cuda:{here[:local_rank].count('1')}" if entries[args.rank] == "1" else "cpu"

    def error(self, message: str) -> NoReturn:
        """Print the error once per machine. The other processes exit with 0, since torchrun kills all if one fails."""
        sys.exit(f"error: {message}" if os.environ.get("LOCAL_RANK", "0") == "0" else 0)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number, 1 or more")
    return int(text)


# ---- processes


@contextlib.contextmanager
def process_group(args: argparse.Namespace) -> Iterator[None]:
    """Create the group of all processes. The master waits in it while the others train."""
    backend = "cpu:gloo,cuda:nccl" if args.device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(days=7))
    try:
        yield
        dist.barrier()  # a gloo thread that releases a tensor while Python exits would abort it
    except DetrainError as exc:
        sys.exit(f"error: rank {args.rank}: {exc}")
    finally:
        dist.destroy_process_group()


def pipeline_mesh(args: argparse.Namespace) -> DeviceMesh:
    """Make every process a stage except the master, which has the whole model, alone on a mesh of its own."""
    stages = list(range(int(args.has_master), dist.get_world_size()))
    is_on_gpus = args.gpu and args.gpu.endswith("1") and not args.is_master  # the master may have no GPU
    device_type = "cuda" if is_on_gpus else "cpu"
    pipeline = DeviceMesh(device_type, stages, mesh_dim_names=("pp",))
    if not args.has_master:
        return pipeline
    alone = DeviceMesh("cpu", [0], mesh_dim_names=("pp",))
    return alone if args.is_master else pipeline


# ---- data


def fashion_mnist(samples: int | None = None) -> tuple[TensorDataset, TensorDataset]:
    """Return images (N x 1 x 28 x 28, 0 to 1) and classes (N), to train and to test; without FashionMNIST, digits."""
    if FOLDER.exists():
        train, test = _read("train"), _read("t10k")
    else:
        from sklearn.datasets import load_digits

        images, labels = (torch.as_tensor(array) for array in load_digits(return_X_y=True))
        images = nn.functional.interpolate(images.reshape(-1, 1, 8, 8).float() / 16, size=28)
        train, test = (images[:1400], labels[:1400]), (images[1400:], labels[1400:])
        if int(os.environ["RANK"]) == 0:
            print("dataset-fashion-mnist is not installed: these are the digits of scikit-learn instead")
    return TensorDataset(*(each[:samples] for each in train)), TensorDataset(*(each[:samples] for each in test))


def _read(part: str) -> tuple[Tensor, Tensor]:
    files = (FOLDER / f"{part}-{kind}-ubyte.gz" for kind in ("images-idx3", "labels-idx1"))
    images, labels = (bytearray(gzip.decompress(file.read_bytes())) for file in files)
    pixels = torch.frombuffer(images, dtype=torch.uint8, offset=16).reshape(-1, 1, 28, 28) / 255
    return pixels, torch.frombuffer(labels, dtype=torch.uint8, offset=8).long()


# ---- training


class TokenLoss(nn.CrossEntropyLoss):
    """Cross entropy over every token of a batch whose target is not -100."""

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return super().forward(logits.flatten(0, 1), target.flatten())


class Report(training.Callback):
    """Report of the loss every ``steps`` steps, and of each evaluation; both are of all samples on all ranks."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_step(self, trainer: training.Trainer, record: dict[str, float]) -> None:
        if trainer.model.is_main and (trainer.step - 1) % self.steps == 0:
            print(f"step {trainer.step:>5} of {trainer.steps}: loss {record['loss']:.6f}", flush=True)

    def on_evaluation(self, trainer: training.Trainer, record: dict[str, float]) -> None:
        if trainer.model.is_main:
            print(f"step {trainer.step:>5} of {trainer.steps}: test {_tell(record)}", flush=True)


def train(model: par.ParallelModel, data: tuple[TensorDataset, TensorDataset], args: argparse.Namespace) -> None:
    """Train for ``args.epochs``, evaluate after each, and save. Collective: all processes, including the master."""
    scores: dict[str, float] = {}
    if not args.is_master:
        trainer = training.Trainer(
            model,
            train=DataLoader(data[0], args.batch_size, shuffle=True),
            evaluate=DataLoader(data[1], batch_size=200),
            epochs=args.epochs,
            optimizer="adamw",
            optimizer_options={"lr": args.lr},
            callbacks=[Report(args.report)],
            show_progress=False,
        )
        scores = trainer.fit().evaluations[-1]
    if args.has_master:
        scores = _bring_to_master(model, scores, args)
    save(model, scores, args)


def save(model: par.ParallelModel, scores: dict[str, float], args: argparse.Namespace) -> None:
    """Write the whole model to one file for a plain ``load_state_dict``. Collective: all processes."""
    [file] = training.export_safetensors(f"{args.model_name}.safetensors", model)
    if args.rank == 0:
        print(f"saved {file}: test {_tell(scores)}", flush=True)


def _bring_to_master(model: par.ParallelModel, scores: dict[str, float], args: argparse.Namespace) -> dict[str, float]:
    """Copy the trained stages into the master's whole model. Collective: all processes."""
    own = {name: each.cpu() for module in model.modules for name, each in module.state_dict().items()}
    told: list[Any] | None = [None] * dist.get_world_size() if args.is_master else None
    dist.gather_object((own, scores), told)
    if told is None:
        return scores
    for stage, _ in told[1:]:
        model.modules[0].load_state_dict(stage, strict=False)
    return told[-1][1]


def _tell(scores: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.6f}" for name, value in scores.items() if name != "step")
