"""FashionMNIST in stages of a pipeline: what the ranks of the job `fashion.toml` run. The settings are in that file.

detrain-nb run fashion.toml
"""

from __future__ import annotations

import gzip
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from detrain_nb import job_spec, training
from detrain_nb import parallel as par


def make_model() -> nn.Sequential:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(28 * 28, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    )


def read_images(url: str, part: str) -> TensorDataset:
    """Return images (N x 1 x 28 x 28, 0 to 1) and classes (N): ``train`` or ``t10k``; digits if ``url`` is missing."""
    folder = Path(url)
    if not folder.exists():
        return read_digits(part)
    files = (folder / f"{part}-{kind}-ubyte.gz" for kind in ("images-idx3", "labels-idx1"))
    images, labels = (bytearray(gzip.decompress(file.read_bytes())) for file in files)
    pixels = torch.frombuffer(images, dtype=torch.uint8, offset=16).reshape(-1, 1, 28, 28) / 255
    return TensorDataset(pixels, torch.frombuffer(labels, dtype=torch.uint8, offset=8).long())


def read_digits(part: str) -> TensorDataset:
    from sklearn.datasets import load_digits

    images, labels = (torch.as_tensor(array) for array in load_digits(return_X_y=True))
    images = nn.functional.interpolate(images.reshape(-1, 1, 8, 8).float() / 16, size=28)
    rows = slice(1400) if part == "train" else slice(1400, None)
    return TensorDataset(images[rows], labels[rows])


class Report(training.Callback):
    """Report of the loss at intervals, and of each evaluation; the Trainer logs the curves as metrics."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_step(self, trainer: training.Trainer, record: training.Record) -> None:
        if trainer.model.is_main and trainer.step % self.steps == 0:
            print(f"step {trainer.step} of {trainer.steps}: loss {record['loss']:.3f}")

    def on_evaluation(self, trainer: training.Trainer, record: training.Record) -> None:
        if trainer.model.is_main:
            print(f"step {trainer.step} of {trainer.steps}: test accuracy {record['accuracy']:.3f}")


def main() -> None:
    job = job_spec()
    assert job.data is not None and job.batch is not None, "give data.url and training.batch_size"
    axes, how = job.parallelism, job.training
    dist.init_process_group()
    training.set_seed(how.seed)
    model = par.parallelize(
        make_model(),
        par.make_mesh(pp=axes.pp, dp_replicate=axes.dp_replicate, dp_shard=axes.dp_shard, tp=axes.tp),
        example_inputs=torch.zeros(job.batch.micro_size, 1, 28, 28),
        loss=nn.functional.cross_entropy,
        schedule=axes.schedule,
        num_microbatches=axes.microbatches,
        precision=axes.precision,
    )
    names = [name for name, _ in model.named_parameters()]
    print(f"has {names[0]} to {names[-1]}")
    trainer = training.Trainer(
        model,
        train=DataLoader(read_images(job.data.url, "train"), job.batch.replica_size, shuffle=True),
        evaluate=DataLoader(read_images(job.data.url, "t10k"), 250),
        evaluate_every=how.evaluate_every,
        epochs=how.epochs,
        steps=how.steps,
        optimizer=how.optimizer,
        optimizer_options={"lr": how.learning_rate},
        scheduler=how.scheduler,
        scheduler_options={"warmup_steps": how.warmup_steps} if how.scheduler else None,
        clip=how.clip,
        checkpoint=job.checkpoint.url if job.checkpoint else None,
        save_every=job.checkpoint.interval if job.checkpoint else None,
        keep=job.checkpoint.keep if job.checkpoint else None,
        resume=job.checkpoint is not None and job.checkpoint.resume,
        seed=how.seed,
        callbacks=[Report(how.log_every)],
        show_progress=False,
    )
    trainer.fit()
    [file] = training.export_safetensors("model.safetensors", model)  # an artifact of the job
    if dist.get_rank() == 0:
        print(f"saved {file}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
