"""Code that the ranks of a test run: a small language model in any layout is trained, saved and loaded."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from detrain_nb import parallel as par
from detrain_nb import training
from detrain_nb.errors import DetrainError
from detrain_nb.parallel.tensor.apply import plan_of


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 30), nn.Linear(30, 16)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), self.dropout, self.training)


class LanguageModel(nn.Module):
    """A model whose head may be tied to its embedding; it has a buffer, and a norm that is never trained."""

    def __init__(self, *, is_tied: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(51, 16)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(4))
        self.head = nn.Linear(16, 51, bias=False)
        if is_tied:
            self.head.weight = self.embed.weight
        self.blocks[1].norm.requires_grad_(False)
        self.register_buffer("scale", torch.tensor(1.0))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.scale
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def tokens(seed: int) -> Tensor:
    return torch.randint(0, 51, (8, 6), generator=torch.Generator().manual_seed(seed))


class Run:
    """A model in a layout, with AdamW in two parameter groups and a schedule of the learning rate."""

    def __init__(self, layout: str, *, seed: int = 0, is_tied: bool = True, dropout: float = 0.0) -> None:
        torch.manual_seed(seed)
        self.layout = layout
        whole = LanguageModel(is_tied=is_tied, dropout=dropout)
        nn.init.normal_(whole.embed.weight, std=0.2)
        nn.init.constant_(whole.scale, 1 + seed)
        self.model: Any = self._laid_out(whole)
        parameters = [each for each in self.model.parameters() if each.requires_grad]
        groups = [
            {"params": [each for each in parameters if each.dim() > 1], "weight_decay": 0.1},
            {"params": [each for each in parameters if each.dim() < 2], "weight_decay": 0.0, "betas": (0.8, 0.99)},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, max_lr=5e-3, total_steps=50)
        self.step = 0

    def _laid_out(self, whole: nn.Module) -> Any:
        if self.layout == "one":
            return whole
        if self.layout in ("pp", "zbv", "pp x fsdp"):
            return self._stages(whole)
        if self.layout == "ddp":
            return nn.parallel.DistributedDataParallel(whole)
        plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
        if self.layout == "tp":
            return parallelize_module(whole, par.make_mesh(tp=-1, device_type="cpu"), plan)
        if self.layout == "tp x fsdp":
            both = par.make_mesh(dp_shard=2, tp=2, device_type="cpu")
            parallelize_module(whole, both["tp"], plan)
            self.data, mesh = both["dp_shard"], both["dp_shard"]
        else:
            assert self.layout == "fsdp"
            mesh = par.make_mesh(dp_shard=-1, device_type="cpu")
        for block in whole.blocks:
            fully_shard(block, mesh=mesh)
        return fully_shard(whole, mesh=mesh)

    def _stages(self, whole: nn.Module) -> par.PipelineStages:
        mesh, group = None, None
        if self.layout == "pp x fsdp":
            mesh = par.make_mesh(pp=2, dp_shard=-1, device_type="cpu")
            group = mesh["pp"].get_group()
            self.data = mesh["dp_shard"]
        found = par.split(
            whole, tokens(0)[:2], at=["blocks.1", "blocks.2", "head"] if self.layout == "zbv" else ["blocks.2"]
        )
        schedule = "ZBVZeroBubble" if self.layout == "zbv" else "1F1B"
        stages = par.PipelineStages(found, group, loss=loss_of, schedule=schedule, num_microbatches=4, device="cpu")
        with_ties(stages, found)
        for module in stages.modules if mesh is not None else ():
            fully_shard(module, mesh=mesh["dp_shard"])
        return stages

    def train(self, steps: int) -> list[float]:
        """Train for ``steps``; return the loss of each whole batch on every rank."""
        losses = []
        for _ in range(steps):
            x, y = tokens(2 * self.step), tokens(2 * self.step + 1)
            if self.layout in ("fsdp", "ddp"):
                x, y = (each.chunk(dist.get_world_size())[dist.get_rank()] for each in (x, y))
            if " x " in self.layout:
                x, y = (each.chunk(self.data.size())[self.data.get_local_rank()] for each in (x, y))
            losses.append(self._train_on(x, y))
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.step += 1
        return losses

    def _train_on(self, x: Tensor, y: Tensor) -> float:
        if isinstance(self.model, par.PipelineStages):
            loss = self.model.train_step(x, y)
        else:
            loss = loss_of(self.model(x), y)
            loss.backward()
        if not dist.is_initialized():
            assert loss is not None
            return loss.item()
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, None if loss is None else loss.item())
        known = [each for each in told if each is not None]
        return sum(known) / len(known)

    def save(self, url: str, **more: Any) -> training.Saving:
        return training.save(
            url, self.model, self.optimizer, self.scheduler, step=self.step, data_position={"batch": self.step}, **more
        )

    def load(self, url: str, **more: Any) -> training.Loaded:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "saved by . ranks")
            found = training.load(url, self.model, self.optimizer, self.scheduler, **more)
        self.step = found.data_position["batch"]
        return found


def train_and_save(layout: str, url: str, *, is_async: bool = False, **how: Any) -> list[float]:
    """Train three steps, save, and train three more during the save; return the losses of these three."""
    run = Run(layout, **how)
    run.train(3)
    saved = run.save(url, is_async=is_async)
    losses = run.train(3)
    saved.result(60)
    return losses


def load_and_train(layout: str, url: str, *, again: str = "", **how: Any) -> tuple[list[float], Any]:
    """Load a checkpoint into another model and train three steps; return the losses and the notes.

    The model is saved to ``again``, if given, right after it was loaded.
    """
    run = Run(layout, seed=7, **how)
    run.train(1)
    found = run.load(url)
    if again:
        run.save(again)
    return run.train(3), found.notes


def export(layout: str, url: str, folder: str, **more: Any) -> list[str]:
    run = Run(layout, seed=7)
    run.load(url)
    return training.export_safetensors(folder, run.model, **more)


def import_and_export(layout: str, source: str, target: str) -> list[str]:
    run = Run(layout, seed=7)
    unused = training.import_safetensors(source, run.model)
    training.export_safetensors(target, run.model)
    return unused


def llama(seed: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=51, tie_word_embeddings=True, **sizes))


def llama_through_stages(source: str, target: str) -> tuple[float, list[str]]:
    """Import a transformers folder into two stages, predict, and export it; return the sum of logits and the names."""
    model = llama(7)
    batch = {"input_ids": tokens(1), "use_cache": False}
    found = par.split(model, batch, at=["model.layers.1"])
    stages = with_ties(par.PipelineStages(found, num_microbatches=2, device="cpu"), found)
    training.import_safetensors(source, stages)
    output = stages.predict(batch)
    names = training.export_safetensors(target, stages)
    return 0.0 if output is None else float(output["logits"].double().sum()), names


# ---- models laid out by parallelize


def gpt2(seed: int) -> Any:
    """Return a GPT-2: its queries, keys and values are one layer, and its head is tied to its embedding."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    sizes = {"vocab_size": 51, "n_positions": 8, "n_embd": 16, "n_layer": 2, "n_head": 4}
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, **ends, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))


def phi3(seed: int) -> Any:
    """Return a Phi-3, a Llama whose gate and up projections are one layer; its head is not tied."""
    from transformers import Phi3Config, Phi3ForCausalLM

    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    lengths = {"max_position_embeddings": 32, "original_max_position_embeddings": 32}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return Phi3ForCausalLM(Phi3Config(vocab_size=51, **sizes, **lengths, **ends))


FAMILIES = {"GPT-2": gpt2, "Phi-3": phi3}


def call(rows: Tensor) -> dict[str, Any]:
    return {"input_ids": rows, "use_cache": False}


def loss_of_output(output: Any, targets: Tensor) -> Tensor:
    return loss_of(output.logits, targets)


class FamilyRun:
    """A transformers model with AdamW: plain, or laid out by parallelize over ``axes`` with the model's own plan."""

    def __init__(self, family: str, axes: dict[str, int] | None, *, seed: int = 0) -> None:
        self.model: Any = FAMILIES[family](seed)
        self.replicas, self.replica = 1, 0
        if axes is not None:
            mesh = par.make_mesh(**axes, device_type="cpu")
            self.model = par.parallelize(
                self.model,
                mesh,
                example_inputs=call(tokens(0)[:2]),
                loss=loss_of_output,
                num_microbatches=2,
                device="cpu",
            )
            self.replicas, self.replica = self.model.num_replicas, self.model.replica
        self.optimizer = torch.optim.AdamW(list(self.model.parameters()), lr=1e-2, eps=1e-3)
        self.step = 0

    @property
    def packed(self) -> list[str]:
        """Parameters of fused layers whose rows are in another order on this rank than in the whole model."""
        plans = [plan for module in getattr(self.model, "modules", ()) if (plan := plan_of(module)) is not None]
        return sorted(name for plan in plans[:1] for name in plan.packed)

    def train(self, steps: int) -> list[float]:
        """Train for ``steps``; return the losses of whole batches. Of stages, only the rank of the last one has any."""
        losses = []
        for _ in range(steps):
            x, y = (each.chunk(self.replicas)[self.replica] for each in (tokens(self.step), tokens(self.step + 100)))
            if isinstance(self.model, nn.Module):
                loss = loss_of_output(self.model(**call(x)), y)
                loss.backward()
            else:
                loss = self.model.train_step(call(x), y)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1
            losses += [] if loss is None else [float(loss.detach())]
        return losses

    def save(self, url: str) -> None:
        training.save(url, self.model, self.optimizer, step=self.step)

    def load(self, url: str) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "saved by . ranks")
            self.step = training.load(url, self.model, self.optimizer).step

    def everything(self) -> dict[str, Tensor]:
        """Return the values and AdamW's state of a plain model, by parameter name."""
        found = {name: value.clone() for name, value in self.model.state_dict().items()}
        for (name, _), state in zip(self.model.named_parameters(), self.optimizer.state_dict()["state"].values()):
            found |= {f"{key} of {name}": value.clone() for key, value in state.items()}
        return found


def go_on_laid_out(
    family: str, axes: dict[str, int], source: str | None, again: str, target: str, *, steps: int
) -> tuple[list[float], list[str]]:
    """Train a model and save it to ``target``; return the losses and the names of packed parameters.

    If ``source`` is given, it is loaded first, and saved to ``again`` unchanged.
    """
    run = FamilyRun(family, axes, seed=0 if source is None else 7)
    if source is not None:
        run.train(1)
        run.load(source)
        run.save(again)
    losses = run.train(steps)
    run.save(target)
    return losses, run.packed


def with_ties(stages: par.PipelineStages, found: par.Split) -> par.PipelineStages:
    """Return stages that know, for the whole model, which names are tied to one parameter."""
    if not hasattr(stages, "tied_names"):
        stages.tied_names = [tuple(found.aliases(name)) for name in found.shared]
    return stages


# ---- damaged checkpoints


def save_twice(layout: str, url: str) -> None:
    """Save steps 1 and 2."""
    run = Run(layout)
    for _ in range(2):
        run.train(1)
        run.save(url)


def load_damaged(layout: str, url: str, step: int, run: Run | None = None) -> tuple[str, bool]:
    """Return the error of loading one step, and whether all that was given to the load is bit for bit unchanged."""
    if run is None:
        run = Run(layout, seed=7)
        run.train(1)
    before = everything(run)
    said = _error(lambda: run.load(url, step=step))
    return said, everything(run) == before


def load_whole(layout: str, url: str) -> tuple[int, tuple[str, ...], bool]:
    """Return the step that a load has found, its notes, and whether a load of that step by number gives the same."""
    run, other = Run(layout, seed=7), Run(layout, seed=8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = run.load(url)
        other.load(url, step=found.step)
    return found.step, found.notes, everything(run) == everything(other)


def everything(run: Run) -> list[bytes | str]:
    """Return this rank's values, optimizer state, schedule and random number generators."""
    found: list[Any] = [torch.get_rng_state(), repr(random.getstate()), repr(run.scheduler.state_dict())]
    found.append(repr([{**group, "params": ()} for group in run.optimizer.param_groups]))
    for module in getattr(run.model, "modules", [run.model]) if run.layout in ("pp", "zbv") else [run.model]:
        found += module.state_dict().values()
    for state in run.optimizer.state.values():
        found += state.values()
    local = [each.to_local() if hasattr(each, "to_local") else each for each in found]
    return [each.detach().numpy().tobytes() if isinstance(each, Tensor) else str(each) for each in local]


def disagree(rank: int, url: str) -> str:
    return _error(lambda: training.save(url, nn.Linear(2, 2), step=rank))


def ask_for_others(rank: int, url: str) -> list[str]:
    """Return the errors when the ranks give different arguments, or one an invalid URL; the last load has no error."""
    model = nn.Linear(2, 2)
    training.save(url, model, step=1)
    training.save(f"{url}/other", model, step=1)
    return [
        _error(lambda: training.load(url, model, step=rank or None)),
        _error(lambda: training.load(url, model, is_random_state_wanted=not rank)),
        _error(lambda: training.load(f"{url}/other" if rank else url, model)),
        _error(lambda: training.load("ssh://h/x" if rank else url, model)),
        _error(lambda: training.export_safetensors("ssh://h/x" if rank else f"{url}/out", model)),
        _error(lambda: training.load(url, model)),
    ]


def fail_on_one(rank: int, url: str) -> list[str]:
    """Return the errors that all ranks get from rank 1's, and the name of a checkpoint that all of them then load."""
    model = nn.Linear(2, 2)
    first = _error(lambda: training.save(url, model, step=1, extra=object() if rank else None))
    wide = nn.Linear(2, 3) if rank else model
    training.save(url, model, step=1)
    second = _error(lambda: training.load(url, wide))
    return [first, second, training.load(url, model).name.rpartition("/")[2]]


def save_unshared(rank: int, url: str) -> str:
    """Return the error of a save to a path at which each rank has its own folder, as on hosts without a shared disk."""
    os.makedirs(f"{url}/{rank}")
    with contextlib.chdir(f"{url}/{rank}"):
        return _error(lambda: training.save("/proc/self/cwd/checkpoints", nn.Linear(2, 2), step=1))


def _error(do: Callable[[], Any]) -> str:
    try:
        do()
    except DetrainError as exc:
        return f"{type(exc).__name__}: {exc}"
    return "none"


class _Counted:
    """A file that counts the bytes that are read from it."""

    def __init__(self, file: Any, read: list[int]) -> None:
        self._file, self._read = file, read

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def readinto(self, memory: Any) -> int:
        self._read.append(self._file.readinto(memory))
        return self._read[-1]

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exc: Any) -> None:
        self._file.close()


class _CountingFiles(LocalFileSystem):
    cachable = False

    def open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        file = super().open(path, mode, **kwargs)
        return _Counted(file, self.counts) if path.endswith(".safetensors") and "r" in mode else file


def count_read(url: str) -> tuple[int, int]:
    """Return how many bytes of a sharded 8 MiB tensor a rank reads, and the size of the rank's shard."""
    files = _CountingFiles()
    files.counts = []
    model = fully_shard(nn.Linear(1024, 2048, bias=False), mesh=par.make_mesh(dp_shard=-1, device_type="cpu"))
    training.load(url, model, files=files, is_random_state_wanted=False)
    return sum(files.counts), sum(each.to_local().nbytes for each in model.state_dict().values())


# ---- killed processes


class _Deadly(LocalFileSystem):
    """A file system that kills the process in the middle of writing a file of tensors."""

    cachable = False

    def open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        if "w" in mode and path.endswith(".safetensors"):
            with super().open(path, mode) as file:
                file.write(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
        return super().open(path, mode, **kwargs)


def die_in_save(rank: int, url: str, *, is_async: bool) -> None:
    run = Run("fsdp")
    run.train(5)
    run.save(url, is_async=is_async, **({"files": _Deadly()} if rank else {})).result(30)


def go_on_after_a_death(url: str) -> tuple[int, list[int]]:
    run = Run("fsdp", seed=4)
    try:
        found = run.load(url)
    except DetrainError:  # raised by the first call after a background save has failed
        found = run.load(url)
    run.train(1)
    run.save(url)
    return found.step, [each.step for each in training.checkpoints(url)]


def save_in_two_groups(url: str) -> dict[str, list[Any]]:
    """In one process, create a group, save, and destroy it, twice; return whether each is left, and the saved steps."""
    left = []
    for step in (1, 2):
        dist.init_process_group("gloo", init_method=f"file://{url}/meeting-{step}", rank=0, world_size=1)
        training.save(f"{url}/saved", nn.Linear(2, 2), step=step)
        group = weakref.ref(dist.group.WORLD)
        dist.destroy_process_group()
        gc.collect()
        left.append(group() is not None)
    return {"left": left, "steps": [each.step for each in training.checkpoints(f"{url}/saved")]}


def kill_at_random(url: str, times: int, seed: int) -> dict[str, int]:
    """Kill a process that saves, at random moments; check that a load is whole and has at least the last reported save.

    A moment is one of the file operations of a few saves, plus up to 2 ms. A random time would not tell where in a save
    the process is.
    """
    torch.set_num_threads(1)  # a forked process has no OpenMP threads, and would wait for them forever
    chosen = random.Random(seed)
    operations = _Operations(url)
    for step in range(3):
        training.save(f"{url}/measured", _filled(step), step=step)
    last_operation = operations.count
    halves = last = 0
    for _ in range(times):
        moment, more_s = chosen.randint(1, last_operation), chosen.uniform(0, 0.002)
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            operations.kill_at(moment, after_s=more_s)
            _save_on_and_on(url, last, writing)
        os.close(writing)
        with os.fdopen(reading, "rb") as told:
            done = [int(line) for line in told.read().split()]
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGKILL
        there = training.checkpoints(url)
        halves += any(not each.is_complete for each in there)
        last = _check_whole(url, at_least=max([last, *done]))
    return {"halves": halves, "last": last}


class _Operations:
    """Counts the file operations of this process under ``url``, such as opens, renames and removals."""

    def __init__(self, url: str) -> None:
        self.count = 0
        self._url = url
        self._deadly = 0
        self._after_s = 0.0
        sys.addaudithook(self._note)

    def kill_at(self, count: int, *, after_s: float) -> None:
        """Kill this process ``after_s`` after operation ``count`` from now has begun."""
        self._deadly, self._after_s = self.count + count, after_s

    def _note(self, event: str, args: tuple[object, ...]) -> None:
        if event in _OPERATIONS and str(args[0]).startswith(self._url):
            self.count += 1
            if self.count == self._deadly:
                threading.Timer(self._after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()


_OPERATIONS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir"}


def _save_on_and_on(url: str, last: int, writing: int) -> None:
    try:
        for step in range(last + 1, last + 1000):
            training.save(url, _filled(step), step=step, keep=2, is_async=step % 2 == 0).result()
            os.write(writing, b"%d\n" % step)
    finally:
        os._exit(1)


def _filled(step: int) -> nn.Module:
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
    for parameter in model.parameters():
        nn.init.constant_(parameter, step)
    return model


def _check_whole(url: str, *, at_least: int) -> int:
    model = _filled(-1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the checkpoints that are skipped
        try:
            found = training.load(url, model)
        except ValueError:
            assert at_least == 0
            return 0
    assert found.step >= at_least, (found.step, at_least)
    assert all(bool((parameter == found.step).all()) for parameter in model.parameters()), found.step
    return found.step
