"""The recipe of a job: its schema, reading it from YAML with `key=value` overrides, and messages for what is wrong."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from . import recipe_yaml
from .config import ConfigError, ParallelConfig, check_torch_version, divisors, nearest
from .recipe_errors import RecipeError, problem_lines
from .schedules import accepts_microbatches, microbatches_around, why_refused

Dtype = Literal["float32", "bfloat16"]
PathText = Annotated[str, AfterValidator(os.path.expanduser)]  # ~ would else be a directory of that name
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]
# The names accelerate.tracking knows, written out so that checking a recipe does not import it, and "jsonl", our own.
Tracker = Literal[
    "jsonl", "tensorboard", "wandb", "aim", "comet_ml", "mlflow", "clearml", "dvclive", "swanlab", "trackio"
]
Betas = Annotated[tuple[Beta, Beta], BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)]


class Section(BaseModel):
    """A part of the recipe: unknown keys and values of another type are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, populate_by_name=True)


class Model(Section):
    """The checkpoint to start from; `dtype` is what parameters are stored and updated in.

    `trust_remote_code`: run Python code that comes with it.
    """

    path: PathText
    dtype: Dtype = "float32"
    init: Literal["pretrained", "random"] = "pretrained"
    trust_remote_code: bool = False


class Parallel(Section):
    """The fields of `ParallelConfig`, except param_dtype, which is `model.dtype`."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = -1
    tp: int = 1
    sequence_parallel: bool = True
    schedule: str = "1F1B"
    virtual_stages: int = 1
    microbatches: int | None = None
    stage_layers: list[int] | None = None
    activation_checkpoint: str = "none"
    reshard_after_forward: bool | None = None
    compile: bool = False
    async_tp: bool = False
    compute_dtype: str = "bfloat16"
    reduce_dtype: str = "float32"

    @model_validator(mode="after")
    def _is_a_parallel_config(self) -> Self:
        ParallelConfig(**self.model_dump())
        return self


class Data(Section):
    """The training rows, and the evaluation rows where there are any. `seq_len` is in tokens.

    `split` and `eval_split` are for `datasets` names; `eval_split` None is `split`.
    """

    path: PathText
    format: Literal["text", "instruct", "chat"]
    seq_len: Count = 1024
    pack: bool = True
    eval_path: PathText | None = None
    split: str = "train"
    eval_split: str | None = None
    shuffle: bool = True


class Batch(Section):
    """Rows of one optimizer step over all data-parallel ranks, and rows of one microbatch on one of them."""

    global_size: Count
    micro_size: Count = 1


class Optim(Section):
    """AdamW and its learning-rate schedule; `min_lr_ratio` is the part of `lr` that the schedule ends at."""

    lr: Annotated[float, Field(gt=0)]
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    betas: Betas = (0.9, 0.95)
    eps: Annotated[float, Field(gt=0)] = 1e-8
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    min_lr_ratio: Fraction = 0.0
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0


class Train(Section):
    """How long to train, when to evaluate (`eval_batches` None: every row), and what makes a run repeatable."""

    steps: Count
    eval_at_start: bool = False
    eval_every: Count | None = None
    eval_batches: Count | None = None
    seed: Annotated[int, Field(ge=0)] = 0
    deterministic: bool = False
    stop_at: Count | None = None


class Checkpoint(Section):
    """Training state on disk. `every` None: only after the last step. `resume`: auto, never, or a checkpoint's path.

    `on_error`: what follows a save that failed, the last one of a run excepted.
    """

    every: Count | None = None
    keep: Count = 2
    async_: bool = Field(True, alias="async")
    resume: PathText = "auto"
    on_error: Literal["stop", "continue"] = "stop"


class Guard(Section):
    """What happens to a step whose loss or gradient norm is not finite, or whose loss is a spike.

    A spike is a loss above `spike_factor` (None: no loss is one) x the median of the last `spike_window` good losses.
    `max_recoveries`: skips and rollbacks of the whole run.
    """

    on_nonfinite: Literal["stop", "skip", "rollback"] = "stop"
    spike_factor: Annotated[float, Field(gt=1)] | None = None
    spike_window: Count = 50
    on_spike: Literal["warn", "stop", "skip", "rollback"] = "warn"
    max_recoveries: Count = 10


class Log(Section):
    """Steps between logged rows, where the rows go, and whether one step's actions are timed."""

    every: Count = 1
    trackers: list[Tracker] = ["jsonl"]
    trace: bool = False


class Distributed(Section):
    """Seconds a collective may wait for a peer before the run ends."""

    timeout_seconds: Annotated[float, Field(gt=0)] = 600.0


class Recipe(Section):
    """One training job, as its YAML file states it."""

    model: Model
    parallel: Parallel = Parallel()
    data: Data
    batch: Batch
    optim: Optim
    train: Train
    checkpoint: Checkpoint = Checkpoint()
    guard: Guard = Guard()
    log: Log = Log()
    distributed: Distributed = Distributed()
    output_dir: PathText

    @model_validator(mode="after")
    def _steps_agree(self) -> Self:
        steps = self.train.steps
        late = [("optim.warmup_steps", self.optim.warmup_steps), ("train.stop_at", self.train.stop_at or 0)]
        problems = [f"{key}={value} is more than train.steps={steps}." for key, value in late if value > steps]
        for key in ("on_nonfinite", "on_spike") if self.checkpoint.every is None else ():
            if getattr(self.guard, key) == "rollback":
                problems.append(f"guard.{key}=rollback needs checkpoints to go back to; set checkpoint.every.")
        if problems:
            raise RecipeError(problems)
        return self

    def parallel_config(self, world_size: int | None = None) -> ParallelConfig:
        """The `ParallelConfig` of the recipe.

        Given the world size it is resolved, and its microbatches are those of one schedule step:
        `parallel.microbatches`, else all that the batch holds.
        """
        settings = self.parallel.model_dump() | {"param_dtype": self.model.dtype}
        if world_size is None:
            return ParallelConfig(**settings)
        dp = ParallelConfig(**settings).resolve(world_size).dp
        settings["microbatches"] = settings["microbatches"] or self.microbatches_per_step(dp)
        return ParallelConfig(**settings).resolve(world_size)

    def world_size(self) -> int:
        """Processes the mesh needs, a size of -1 counted as 1: what the job is launched with outside torchrun."""
        config = self.parallel_config()
        return max(1, config.pp) * max(1, config.dp_replicate) * max(1, config.dp_shard) * max(1, config.tp)

    def microbatches_per_step(self, dp: int) -> int:
        """Microbatches of one optimizer step on one of `dp` data-parallel ranks."""
        return self.batch.global_size // dp // self.batch.micro_size

    def check(self, world_size: int) -> None:
        """Refuse a mesh and a batch that do not fit a job of `world_size` processes.

        Raises:
            RecipeError: with one line a problem.
        """
        try:
            config = self.parallel_config().resolve(world_size)
            check_torch_version(config)
        except ConfigError as error:
            raise RecipeError([f"parallel.{error}"]) from None
        problems = list(_batch_problems(self, config))
        if problems:
            raise RecipeError(problems)

    def dump_yaml(self) -> str:
        """The whole recipe, defaults included, as YAML that `load_recipe` reads back to an equal recipe."""
        return recipe_yaml.dump(self.model_dump(mode="json", by_alias=True))


def load_recipe(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe and lay `key.path=value` overrides over it; values are YAML.

    Args:
        path: a YAML file, or the name of a shipped recipe.

    Raises:
        RecipeError: with one line a problem.
    """
    try:
        raw = recipe_yaml.parse(find_recipe(path).read_bytes(), source=os.fspath(path))
        for override in overrides:
            recipe_yaml.override(raw, override)
    except recipe_yaml.YamlProblem as problem:
        raise RecipeError([str(problem)]) from None
    return parse_recipe(raw)


def parse_recipe(raw: Mapping[str, Any]) -> Recipe:
    """A recipe from plain dicts and lists.

    Raises:
        RecipeError: with one line a problem.
    """
    try:
        return Recipe.model_validate(raw)
    except ValidationError as error:
        raise RecipeError(problem_lines(error, Recipe)) from None


def shipped_recipes() -> dict[str, Traversable]:
    """The recipes that come with the package, by name."""
    files = resources.files("meshpar.recipes").iterdir()
    return {file.name.removesuffix(".yaml"): file for file in sorted(files, key=str) if file.name.endswith(".yaml")}


def find_recipe(path: str | os.PathLike[str]) -> Traversable:
    """The file at `path`, or the shipped recipe of that name."""
    if Path(path).is_file():
        return Path(path)
    shipped = shipped_recipes()
    name = os.fspath(path).removesuffix(".yaml")
    if name in shipped:
        return shipped[name]
    raise RecipeError([f"{os.fspath(path)} is neither a file nor a shipped recipe; shipped are: {', '.join(shipped)}."])


def _batch_problems(recipe: Recipe, config: ParallelConfig) -> Iterator[str]:
    total, micro, dp = recipe.batch.global_size, recipe.batch.micro_size, config.dp
    rows = total // dp
    if total % dp:
        around = nearest(total, [dp * rows, dp * (rows + 1)] if rows else [dp])
        yield (
            f"batch.global_size={total} does not divide over dp={dp} (dp_replicate={config.dp_replicate} x "
            f"dp_shard={config.dp_shard}); nearest that work: {around}."
        )
    elif rows % micro:
        yield (
            f"batch.micro_size={micro} does not divide the {rows} rows a step of a data-parallel rank "
            f"(global_size={total} over dp={dp}); nearest that work: {nearest(micro, divisors(rows))}."
        )
    else:
        yield from _microbatch_problems(recipe, config)


def _microbatch_problems(recipe: Recipe, config: ParallelConfig) -> Iterator[str]:
    held = recipe.microbatches_per_step(config.dp)
    if config.microbatches is not None:
        if held % config.microbatches:
            working = [m for m in divisors(held) if accepts_microbatches(config, m)]
            yield (
                f"parallel.microbatches={config.microbatches} does not divide the {held} microbatches of a step; "
                f"nearest that work: {nearest(config.microbatches, working) or 'none'}."
            )
    elif not accepts_microbatches(config, held):
        total, rows = recipe.batch.global_size, config.dp * recipe.batch.micro_size
        sizes = [m * rows for m in microbatches_around(config, held)]
        yield (
            f"batch.global_size={total} makes {held} microbatches a step, and {held} {why_refused(config, held)}; "
            f"nearest that work: {nearest(total, sizes)}."
        )
