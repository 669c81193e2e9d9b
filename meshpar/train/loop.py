"""The training loop of a recipe: read `run` first, then `Job.train_step`."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.logging import RichHandler
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from .. import watch
from ..config import ConfigError, ParallelConfig, check_model
from ..load import skeleton_from_config
from ..loss import count_targets, shift_labels
from ..mesh import init_distributed, on_first_rank
from ..model import ParallelModel, parallelize_model
from ..nonfinite import find_nonfinite
from ..pretrained import read_config, read_tokenizer
from ..progress import mark
from ..recipe import Recipe
from ..recipe_errors import RecipeError
from ..rng import rng_state, seed_rank
from .checkpoints import Checkpoints, SaveFailed
from .data import GlobalBatches, Row, check_vocabulary, eval_batches, load_rows, pad_token_id
from .guard import StepFailed, StepGuard, Verdict
from .metrics import Metrics
from .optim import make_optimizer, make_schedule, set_rate
from .traces import TRACED, traced_step
from .trackers import check_trackers

log = logging.getLogger("meshpar")

Rows = Mapping[str, Tensor]


def run(recipe: Recipe, device: torch.device | str | None = None) -> None:
    """Train as ``recipe`` says, on all ranks of a torchrun job or in a world of one; every rank calls it.

    Resumes where the recipe says so. Leaves metrics.jsonl, recipe.yaml, checkpoints/ and, after the last step, model/
    in ``recipe.output_dir``.

    Raises RecipeError or ConfigError before weights are read for a recipe that this job cannot run.
    """
    _set_deterministic(recipe.train.deterministic)
    device = init_distributed(device, recipe.distributed.timeout_seconds)
    recipe.check(dist.get_world_size())
    check_trackers(recipe.log.trackers)
    console = Console()
    with _log_on_first_rank(console):
        job = Job.begin(recipe, device)
        watcher = watch.current()
        checkpoints = Checkpoints(recipe, watcher.started_at() if watcher else None)
        with _blaming("checkpoint.resume"):
            job.load_state(checkpoints.resume(job.model, job.optimizer))
        if watcher:
            watcher.set_started_at(job.step)
        metrics = Metrics(recipe, job.model, console, job.step, int(job.tokens.item()))
        try:
            stopped = train(job, checkpoints, metrics)
        except StepFailed:
            mark("save")
            with suppress(SaveFailed):  # it has warned, and the step is what the run ends with
                checkpoints.wait()  # what is being written is from before the step
            raise
        finally:
            metrics.close()
        if job.step == recipe.train.steps:
            mark("export")
            job.model.save_pretrained(Path(recipe.output_dir) / "model")
        checkpoints.finish()
        if stopped and dist.get_rank() == 0:
            print(f"meshpar: saved at step {job.step}", flush=True)


def train(job: Job, checkpoints: Checkpoints, metrics: Metrics) -> bool:
    """Step by step to the end of the recipe, to its `stop_at`, or until a signal asks a rank to stop: then True.

    Evaluations and checkpoints where they are due, and a checkpoint at the end.
    """
    steps, every = job.recipe.train, job.recipe.checkpoint.every
    last, stopped = steps.stop_at or steps.steps, False
    traced = min(job.step + TRACED, last) if job.recipe.log.trace else None
    if job.step >= last:
        log.info("step %d is done already; nothing is left to train", last)
    if job.eval_rows and steps.eval_at_start and job.step == 0:
        metrics.evaluation(0, job.evaluate())
    while job.step < last and not stopped:
        metrics.start_step()
        with traced_step(job.model._mesh, Path(job.recipe.output_dir), wanted=job.step + 1 == traced):
            loss, grad_norm, lr, verdict = job.train_step()
        if verdict.action == "rollback":
            _go_back(job, checkpoints, metrics, verdict)
            continue
        metrics.end_step(job.step, loss, grad_norm, lr, job.tokens)
        if verdict.reason:
            metrics.event(job.step, verdict.action, verdict.reason)
        stopped = verdict.stop and job.step < last
        if job.eval_rows and not stopped and (_is_due(job.step, steps.eval_every) or job.step == steps.steps):
            metrics.evaluation(job.step, job.evaluate())
        if _is_due(job.step, every) or job.step == last or stopped:
            mark("save")
            checkpoints.save(job.model, job.optimizer, job.state(), is_last=job.step == last or stopped)
        mark("save")
        checkpoints.poll()
    mark("save")
    checkpoints.wait()
    return stopped


def _go_back(job: Job, checkpoints: Checkpoints, metrics: Metrics, verdict: Verdict) -> None:
    mark("load")
    state = checkpoints.roll_back(job.model, job.optimizer)
    if state is None:
        raise StepFailed(f"{verdict.reason}; there is no checkpoint yet to go back to")
    job.go_back_to(state)
    metrics.go_back(job.step, int(job.tokens.item()))
    metrics.event(job.step, verdict.action, verdict.reason)


def _is_due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


@dataclass
class Job:
    """A model with what trains it; ``step`` counts finished steps, ``tokens`` those of all ranks (int64 scalar)."""

    recipe: Recipe
    model: ParallelModel
    optimizer: Optimizer
    schedule: LambdaLR
    batches: GlobalBatches
    eval_rows: list[Row]
    rows_per_call: int
    guard: StepGuard
    step: int
    tokens: Tensor

    @classmethod
    def begin(cls, recipe: Recipe, device: torch.device) -> Job:
        """Everything a recipe needs at step 0, its rows tokenised and its weights loaded."""
        config = recipe.parallel_config(dist.get_world_size())
        _check_model(recipe, config)
        on_first_rank(lambda: _write_recipe(recipe, config))
        mark("data")
        rows, eval_rows, pad_id = _load_data(recipe)
        mark("load")
        model = _load_model(recipe, config, device)
        with _blaming("data.path"):
            check_vocabulary([*rows, *eval_rows], model.config.get_text_config().vocab_size)
        optimizer = make_optimizer(model, recipe.optim)
        schedule = make_schedule(optimizer, recipe.optim, recipe.train.steps)
        batches = _make_batches(recipe, rows, pad_id)
        seed_rank(recipe.train.seed, 0, model._mesh)
        rows_per_call = (config.microbatches or 1) * recipe.batch.micro_size
        zero = torch.zeros((), dtype=torch.int64, device=device)
        guard = StepGuard(recipe.guard)
        return cls(recipe, model, optimizer, schedule, batches, eval_rows, rows_per_call, guard, 0, zero)

    def train_step(self) -> tuple[Tensor, Tensor, float, Verdict]:
        """One step on the next global batch: loss, gradient norm before clipping, learning rate, what the guard says.

        Where the guard has the step skipped or wants to go back, weights and optimizer are as they were.
        """
        mark("data", self.step + 1)
        random = rng_state(self.tokens.device)
        rows = self.batches.next(*self._dp())
        batch = self._cut(rows)
        mark("forward")
        loss = self.model.forward_backward(batch)
        mark("optimizer")
        max_norm = self.recipe.optim.max_grad_norm
        grad_norm = self.model.grad_norm() if max_norm is None else self.model.clip_grad_norm_(max_norm)
        lr = self.optimizer.param_groups[0]["lr"]
        find = partial(find_nonfinite, self.model, batch, random)
        watcher = watch.current()
        stop = watcher is not None and watcher.stop_requested
        verdict = self.guard.judge(self.step + 1, loss, grad_norm, find, stop)
        if verdict.updates:
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        self.step += 1
        self.tokens += self._over_dp(rows.get("attention_mask", torch.ones_like(rows["input_ids"])).sum())
        return loss, grad_norm, lr, verdict

    def evaluate(self) -> float:
        """The mean token loss over the evaluation rows, whatever the mesh: each counted token weighs the same."""
        size, seq_len = self.batches.global_size, self.batches.seq_len
        batches = eval_batches(self.eval_rows, size, *self._dp(), self.batches.pad_id, seq_len)
        total = counted = torch.zeros((), dtype=torch.float64, device=self.tokens.device)
        for rows in islice(batches, self.recipe.train.eval_batches):
            mark("evaluation")
            weight = self._over_dp(count_targets(shift_labels(rows["labels"])))
            total = total + weight * self.model.eval_loss(self._cut(rows))
            counted = counted + weight
        return (total / counted.clamp(min=1)).item()

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps beside the model, the optimizer and the random number generators."""
        return {
            "step": self.step,
            "tokens": int(self.tokens.item()),
            "seed": self.recipe.train.seed,
            "schedule": self.schedule.state_dict(),
            "data": self.batches.state_dict(),
            "guard": self.guard.state_dict(),
            "recipe": self.recipe.model_dump(mode="json", by_alias=True),
            "versions": {name: version(name) for name in ("meshpar", "torch", "transformers")},
        }

    def load_state(self, state: Mapping[str, Any] | None) -> None:
        """Continue where `state` was taken; None is the start."""
        if state is None:
            return
        _warn_of_changes(self.optimizer, self.recipe)
        self.step = state["step"]
        self.tokens.fill_(state["tokens"])
        self.schedule.load_state_dict(state["schedule"])
        set_rate(self.optimizer, self.schedule, self.recipe.optim, self.recipe.train.steps)
        self.batches.load_state_dict(state["data"])
        self.guard.load_state_dict(state.get("guard", {}))  # checkpoints of earlier versions have none

    def go_back_to(self, state: Mapping[str, Any]) -> None:
        """As `load_state`, but on the rows that come next now: the batch that went wrong is not met again."""
        place = self.batches.state_dict()
        self.load_state(state)
        self.batches.load_state_dict(place)

    def _dp(self) -> tuple[int, int]:
        return self.model._mesh.rank("dp"), self.model._mesh.size("dp")

    def _cut(self, rows: Rows) -> list[Rows]:
        """This rank's rows in the numbers that one call of the pipeline schedule takes."""
        count = len(rows["input_ids"])
        starts = range(0, count, self.rows_per_call)
        return [{k: v[start : start + self.rows_per_call] for k, v in rows.items()} for start in starts]

    def _over_dp(self, value: Tensor) -> Tensor:
        value = value.to(self.tokens.device)
        dist.all_reduce(value, group=self.model._mesh.group("dp"))
        return value


def _warn_of_changes(optimizer: Optimizer, recipe: Recipe) -> None:
    """The optimizer continues with the settings it was saved with: say so where the recipe has others by now."""
    decayed = optimizer.param_groups[0]
    now = recipe.optim.model_dump()
    for key, setting in (("lr", "initial_lr"), ("weight_decay",) * 2, ("betas",) * 2, ("eps",) * 2):
        kept = decayed[setting]
        if (tuple(kept) if key == "betas" else kept) != now[key]:
            log.warning("optim.%s stays %s, as the checkpoint has it; the recipe says %s", key, kept, now[key])


def _check_model(recipe: Recipe, config: ParallelConfig) -> None:
    """Refuse a mesh that the model's sizes do not allow, before its data is read."""
    with _blaming("model.path"):
        hf_config = read_config(recipe.model.path, recipe.model.trust_remote_code)
    try:
        check_model(config, hf_config)
    except ConfigError as error:
        raise RecipeError([f"parallel.{error}"]) from None


def _load_data(recipe: Recipe) -> tuple[list[Row], list[Row], int]:
    data = recipe.data
    with _blaming("model.path"):
        tokenizer = read_tokenizer(recipe.model.path, recipe.model.trust_remote_code)

    def load(key: str, path: str, split: str) -> list[Row]:
        with _blaming(f"data.{key}"):
            return load_rows(path, data.format, tokenizer, data.seq_len, data.pack, split)

    eval_rows = load("eval_path", data.eval_path, data.eval_split or data.split) if data.eval_path else []
    return load("path", data.path, data.split), eval_rows, pad_token_id(tokenizer)


@contextmanager
def _blaming(key: str) -> Iterator[None]:
    """What the recipe names and cannot be used is a recipe that cannot run."""
    try:
        yield
    except ConfigError:
        raise
    except ValueError as error:
        raise RecipeError([f"{key}: {error}"]) from error


def _make_batches(recipe: Recipe, rows: list[Row], pad_id: int) -> GlobalBatches:
    data, size = recipe.data, recipe.batch.global_size
    return GlobalBatches(rows, size, recipe.train.seed, data.shuffle, pad_id=pad_id, seq_len=data.seq_len)


def first_batch(recipe: Recipe) -> Rows:
    """The whole first global batch that training by ``recipe`` sees, [global_size, seq] each."""
    rows, _, pad_id = _load_data(recipe)
    return _make_batches(recipe, rows, pad_id).next(0, 1)


def _load_model(recipe: Recipe, config: ParallelConfig, device: torch.device) -> ParallelModel:
    source, trusted = recipe.model.path, recipe.model.trust_remote_code
    if recipe.model.init == "random":
        source = skeleton_from_config(read_config(source, trusted), trusted)
    return parallelize_model(source, config, device=device, seed=recipe.train.seed, trust_remote_code=trusted)


def _write_recipe(recipe: Recipe, config: ParallelConfig) -> None:
    """The recipe as it runs, the sizes of the mesh included."""
    sizes = {name: getattr(config, name) for name in ("pp", "dp_replicate", "dp_shard", "tp")}
    resolved = recipe.model_copy(update={"parallel": recipe.parallel.model_copy(update=sizes)})
    out = Path(recipe.output_dir)
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "recipe.yaml").write_text(resolved.dump_yaml(), encoding="utf-8")
    except OSError as error:
        raise RecipeError([f"output_dir={recipe.output_dir} cannot be written: {error}."]) from error


def _set_deterministic(wanted: bool) -> None:
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


@contextmanager
def _log_on_first_rank(console: Console) -> Iterator[None]:
    """Rank 0's log on the terminal, beside the progress bar; nothing but errors from the others."""
    logger = logging.getLogger("meshpar")
    level, handler = logger.level, logging.NullHandler()
    if dist.get_rank() > 0:
        logger.setLevel(logging.ERROR)
    elif not logger.hasHandlers():
        logger.setLevel(logging.INFO)
        plain = logging.StreamHandler(sys.stdout)
        handler = RichHandler(console=console, show_time=False, show_path=False) if console.is_terminal else plain
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
