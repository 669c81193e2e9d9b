"""What the workers run for the tests of checkpoints and of the training loop."""

from __future__ import annotations

import errno
import hashlib
import io
import logging
import os
import resource
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from meshpar import ParallelConfig, checkpoint, parallelize_model
from meshpar.grads import local
from meshpar.model import ParallelModel
from meshpar.parity import run_recipe
from meshpar.recipe import parse_recipe
from meshpar.train import checkpoints, loop
from meshpar.train.data import GlobalBatches, Row
from meshpar.train.metrics import MetricsFile
from tests import models
from tests.jobs import make, rows_of_rank

MAX_NORM = 1.0


def optimizer_of(model, lr: float = 1e-2):
    """AdamW with two groups, as the training loop has it."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    return torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=lr, eps=1e-5)


def steps(model, optimizer, first: int, count: int) -> list[tuple[float, float]]:
    """Loss and gradient norm of ``count`` steps, step i on batch i."""
    numbers = []
    for step in range(first, first + count):
        batch = models.make_batch(8, seed=step, kind="ragged", vocab=90)
        loss = model.forward_backward(rows_of_rank(batch, model.mesh))
        norm = model.clip_grad_norm_(MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        numbers.append((loss.item(), norm.item()))
    return numbers


def whole_state(model, optimizer) -> dict[str, dict]:
    """Every parameter and moment in Hugging Face's shapes on rank 0, and each rank's step counts."""
    state = {"param": dict(model.full_tensors("param"))}
    with torch.no_grad():
        own = {name: local(p).clone() for name, p in model.named_parameters()}
        for key in ("exp_avg", "exp_avg_sq"):
            for p in model.parameters():
                local(p).copy_(local(optimizer.state[p][key]))
            state[key] = dict(model.full_tensors("param"))
        for name, p in model.named_parameters():
            local(p).copy_(own[name])
    state["step"] = {name: optimizer.state[p]["step"].item() for name, p in model.named_parameters()}
    return state


def save_and_go_on(config: dict, changes: dict, directory: str, background: bool = False) -> dict:
    """Three steps, a checkpoint, three more steps; ``background`` has an earlier save, too."""
    model = make(config, source=models.tiny_model(**changes))
    optimizer = optimizer_of(model)
    saver = checkpoint.BackgroundSaver() if background else checkpoint
    steps(model, optimizer, 0, 2)
    if background:
        saver.save(directory + "-earlier", model, optimizer, {"step": 2})
    steps(model, optimizer, 2, 1)
    state = whole_state(model, optimizer)
    saver.save(directory, model, optimizer, {"step": 3, "seed": 7})
    after = steps(model, optimizer, 3, 3)
    if background:
        saver.wait()
    return {"state": state, "after": after, "end": dict(model.full_tensors("param"))}


def load_and_go_on(config: dict, changes: dict, directory: str) -> dict:
    """A model of other weights, used once before it loads the checkpoint; three steps."""
    model = make(config, source=models.tiny_model(seed=99, **changes))
    optimizer = optimizer_of(model, lr=5.0)
    model.eval_loss(rows_of_rank(models.make_batch(8, vocab=90), model.mesh))
    extra = checkpoint.load(directory, model, optimizer)
    state = whole_state(model, optimizer)
    after = steps(model, optimizer, extra["step"], 3)
    return {"state": state, "after": after, "end": dict(model.full_tensors("param")), "extra": extra}


def learning_rates(config: dict, directory: str, resume: bool) -> list[float]:
    """The rates of three steps of lr 0.01 / (1 + s), from the start or from the checkpoint, which is then written."""
    model = make(config)
    optimizer = optimizer_of(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 1 / (1 + s))
    first = 0
    if resume:
        extra = checkpoint.load(directory, model, optimizer)
        schedule.load_state_dict(extra["schedule"])
        first = extra["step"]
    used = []
    for step in range(first, first + 3):
        used.append(optimizer.param_groups[0]["lr"])
        steps(model, optimizer, step, 1)
        schedule.step()
    checkpoint.save(directory, model, optimizer, {"step": first + 3, "schedule": schedule.state_dict()})
    return used


def dropout_steps(config: dict, directory: str, resume: bool, count: int) -> dict:
    """Steps of a model whose attention has dropout, from a seed of the rank's own or from the checkpoint."""
    model = make(config, model_changes={"attention_dropout": 0.5})
    optimizer = optimizer_of(model)
    torch.manual_seed(17 * dist.get_rank())
    first = checkpoint.load(directory, model, optimizer)["step"] if resume else 0
    numbers = steps(model, optimizer, first, count)
    if not resume and count == 3:
        checkpoint.save(directory, model, optimizer, {"step": 3})
        torch.rand(100)
    return {"steps": numbers, "own": [local(p).detach().clone() for p in model.parameters()]}


def draws_after_load(config: dict, directory: str) -> float:
    """A random number drawn right after a checkpoint of some other mesh was loaded."""
    model = make(config)
    checkpoint.load(directory, model, optimizer_of(model))
    return torch.rand(()).item()


def refused(config: dict, directory: str, changes: dict | None = None, one_group: bool = False) -> str:
    """What `checkpoint.load` says on this rank; the model must be as before."""
    model = make(config, model_changes=changes or {})
    before = [local(p).clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters()) if one_group else optimizer_of(model)
    try:
        checkpoint.load(directory, model, optimizer)
    except ValueError as error:
        unchanged = all(torch.equal(a, local(b)) for a, b in zip(before, model.parameters(), strict=True))
        return str(error) if unchanged else "the model was changed"
    return "loaded"


def failing_saves(config: dict, directory: str) -> list[str]:
    """What this rank hears of a save and of a background save while rank 1 may write no more than 20 kB a file."""
    model = make(config)
    optimizer, saver, heard = optimizer_of(model), checkpoint.BackgroundSaver(), []
    with disk_full_on(1):
        saver.save(directory, model, optimizer, {})
        for attempt in (saver.wait, lambda: checkpoint.save(directory, model, optimizer, {})):
            try:
                attempt()
            except OSError as error:
                heard.append(str(error))
    return heard


@contextmanager
def disk_full_on(rank: int) -> Iterator[None]:
    """On this rank no file grows beyond 20 kB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def unsavable_on_one_rank(config: dict, directory: str) -> str:
    """What this rank hears of a save when rank 1's optimizer has a state that no checkpoint can hold."""
    model = make(config)
    optimizer = optimizer_of(model)
    steps(model, optimizer, 0, 1)
    if dist.get_rank() == 1:
        optimizer.state[next(model.parameters())]["odd"] = torch.zeros(5, 7)
    try:
        checkpoint.save(directory, model, optimizer, {})
    except ValueError as error:
        return str(error)
    return "saved"


def save_random(sizes: dict, directory: str) -> None:
    """A checkpoint of a model with random weights, without an optimizer's state."""
    model = parallelize_model(models.tiny_config(**sizes), ParallelConfig(compute_dtype="float32"))
    checkpoint.save(directory, model, torch.optim.AdamW(model.parameters()), {"step": 0})


def save_and_export(config: dict, changes: dict, directory: str, exported: str) -> None:
    """A checkpoint, and beside it what `save_pretrained` writes."""
    model = make(config, source=models.tiny_model(**changes))
    optimizer = optimizer_of(model)
    steps(model, optimizer, 0, 1)
    checkpoint.save(directory, model, optimizer, {"step": 1})
    model.save_pretrained(exported)


def from_bfloat16(config: dict) -> tuple[set[torch.dtype], float]:
    """Dtypes of the moments, and the part of a matrix that five small steps change, of a model given in bfloat16."""
    model = make(config, source=models.tiny_model().bfloat16())
    optimizer = optimizer_of(model, lr=1e-4)
    name = "model.layers.0.mlp.up_proj.weight"
    before = dict(model.full_tensors("param"))[name]
    steps(model, optimizer, 0, 5)
    after = dict(model.full_tensors("param"))[name]
    changed = 1.0 if before is None else (before != after).float().mean().item()
    return {state["exp_avg"].dtype for state in optimizer.state.values()}, changed


def train(raw: dict) -> list[str]:
    """The training loop on a recipe; the warnings this rank logged."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    handler.setLevel(logging.WARNING)
    logging.getLogger("meshpar").addHandler(handler)
    try:
        loop.run(parse_recipe(raw))
    finally:
        logging.getLogger("meshpar").removeHandler(handler)
        torch.use_deterministic_algorithms(False)
    return messages


def verify_with_code(raw: dict, modules: str, ran: str) -> str:
    """What verifying a recipe prints; code of the model's directory goes to ``modules`` and leaves ``ran``."""
    printed = io.StringIO()
    with (
        mock.patch("transformers.dynamic_module_utils.HF_MODULES_CACHE", modules),
        mock.patch.dict("os.environ", RAN=ran),
        redirect_stdout(printed),
    ):
        run_recipe(parse_recipe(raw))
    return printed.getvalue()


def rows_seen(directory: str, first: int, count: int, config: dict) -> list[int]:
    """First tokens of this dp rank's rows in ``count`` batches of 4 out of 16 rows, row i being all 3 + i.

    Starts at batch ``first``: 0 is a new run, which saves at the end; else it resumes.
    """
    model = make(config)
    optimizer = optimizer_of(model)
    tokens = [torch.full((8,), 3 + i, dtype=torch.int32).numpy() for i in range(16)]
    batches = GlobalBatches([Row(t, t) for t in tokens], 4, seed=0, shuffle=True, pad_id=0, seq_len=8)
    if first:
        batches.load_state_dict(checkpoint.load(directory, model, optimizer)["data"])
    dp = model.mesh["dp"]
    seen = []
    for _ in range(count):
        seen += batches.next(dp.get_local_rank(), dp.size())["input_ids"][:, 0].tolist()
    if not first:
        checkpoint.save(directory, model, optimizer, {"step": count, "data": batches.state_dict()})
    return seen


def ids_fed(raw: dict) -> list[tuple[int, list[str]]]:
    """Training by a recipe: this rank's dp coordinate, and a hash of each row that each step gives the model."""
    fed, forward_backward = [], ParallelModel.forward_backward

    def recorded(model, batch):
        ids = torch.cat([piece["input_ids"] for piece in batch])
        rows = [hashlib.sha256(row.numpy().tobytes()).hexdigest() for row in ids]
        fed.append((model.mesh["dp"].get_local_rank(), rows))
        return forward_backward(model, batch)

    ParallelModel.forward_backward = recorded
    try:
        loop.run(parse_recipe(raw))
    finally:
        ParallelModel.forward_backward = forward_backward
    return fed


def train_with_fault(raw: dict, fault: str, step: int) -> tuple[list[str], str | None]:
    """Training while the disk fails the save of ``step``: this rank's warnings, and what it raised."""
    write, publish, name = checkpoint.write_pieces, checkpoint.publish, f"step-{step}"

    def write_with_fault(directory, *args):
        if not (Path(directory).stem == name and fault == "full"):
            return write(directory, *args)
        with disk_full_on(1):
            return write(directory, *args)

    def publish_with_fault(aside, directory, *args):
        if directory.name == name and fault == "read-only":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(directory))
        if directory.name == name and fault == "vanished":
            shutil.rmtree(directory.parent)
        if directory.name == name and fault == "lost":
            (aside / "__1_0.distcp").unlink()
        publish(aside, directory, *args)

    def configs_with_fault(model):
        saves.append(1)
        if len(saves) == step and fault == "no snapshot" and dist.get_rank() == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return configs(model)

    configs, saves = checkpoint._configs, []
    checkpoint.write_pieces, checkpoint.publish = write_with_fault, publish_with_fault
    checkpoint._configs = configs_with_fault
    try:
        return train(raw), None
    except OSError as error:
        return [], str(error)
    finally:
        checkpoint.write_pieces, checkpoint.publish, checkpoint._configs = write, publish, configs


def roll_back_and_save(raw: dict, later: str) -> tuple[int, int]:
    """A run that finds the checkpoints of ``later`` when it goes back; the steps it began at and went back to."""
    one = parse_recipe(raw)
    job, saved = loop.Job.begin(one, torch.device("cpu")), checkpoints.Checkpoints(one)
    begun = saved.resume(job.model, job.optimizer)
    job.load_state(begun)
    if dist.get_rank() == 0:
        shutil.copytree(later, saved.directory, dirs_exist_ok=True)
    dist.barrier()
    back = saved.roll_back(job.model, job.optimizer)
    job.go_back_to(back)
    job.train_step()
    saved.save(job.model, job.optimizer, job.state(), is_last=False)
    return begun["step"], back["step"]


def threads_of_removals(raw: dict) -> list[str]:
    """The names of the threads of this rank that removed checkpoints in a run."""
    remove, threads = checkpoints.remove, []

    def noting(path):
        threads.append(threading.current_thread().name)
        remove(path)

    checkpoints.remove = noting
    try:
        train(raw)
    finally:
        checkpoints.remove = remove
    return threads


def train_with_full_metrics(raw: dict, first: int, last: int) -> list[str]:
    """Training while nothing can be added to metrics.jsonl from one row to another; this rank's warnings."""
    write, full = MetricsFile.write, resource.getrlimit(resource.RLIMIT_FSIZE)

    def write_with_fault(file, row):
        limit = Path(file.name).stat().st_size if first <= row["step"] <= last else full[0]
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, full[1]))
        try:
            write(file, row)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, full)

    MetricsFile.write = write_with_fault
    try:
        return train(raw)
    finally:
        MetricsFile.write = write
