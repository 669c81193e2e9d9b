"""The recipe: what it accepts, what it refuses before anything starts, and the words it does so with."""

import dataclasses
import re
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from accelerate.tracking import LOGGER_TYPE_TO_CLASS

from meshpar.config import ConfigError, ParallelConfig
from meshpar.recipe import Parallel, Recipe, load_recipe, parse_recipe, shipped_recipes
from meshpar.recipe_errors import RecipeError, recipe_keys

ROOT = Path(__file__).parent.parent

# The example of the documentation, as a user would write it.
EXAMPLE = """
model:      {path: HuggingFaceTB/SmolLM2-135M-Instruct, dtype: float32}
parallel:   {pp: 2, dp_replicate: 1, dp_shard: 1, tp: 3, sequence_parallel: true, schedule: 1F1B, virtual_stages: 1,
             activation_checkpoint: none, compute_dtype: bfloat16, reduce_dtype: float32}
data:       {path: train.jsonl, format: chat, seq_len: 1024, pack: true, eval_path: null}
batch:      {global_size: 64, micro_size: 1}
optim:      {lr: 2.0e-5, weight_decay: 0.1, betas: [0.9, 0.95], warmup_steps: 10, schedule: cosine, max_grad_norm: 1.0}
train:      {steps: 100, eval_every: 50, seed: 0, deterministic: false}
checkpoint: {every: 50, keep: 2, async: true, resume: auto}
log:        {every: 1, trackers: [jsonl]}
output_dir: out/smollm2
"""


@pytest.fixture
def recipe_file(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(EXAMPLE)
    return path


def problems(path, *overrides):
    with pytest.raises(RecipeError) as refused:
        load_recipe(path, overrides)
    assert refused.value.problems == str(refused.value).splitlines()
    return refused.value.problems


def mesh_problems(path, world_size, *overrides):
    recipe = load_recipe(path, overrides)
    with pytest.raises(RecipeError) as refused:
        recipe.check(world_size)
    return refused.value.problems


def test_example_of_the_documentation(recipe_file):
    recipe = load_recipe(recipe_file)
    recipe.check(6)
    assert (recipe.optim.lr, recipe.checkpoint.async_, recipe.optim.betas) == (2e-5, True, (0.9, 0.95))
    assert (recipe.model.init, recipe.data.split, recipe.distributed.timeout_seconds) == ("pretrained", "train", 600.0)


def test_paths_may_start_at_the_home_directory(recipe_file, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    overrides = [
        f"{key}=~/x" for key in ("model.path", "data.path", "data.eval_path", "checkpoint.resume", "output_dir")
    ]
    recipe = load_recipe(recipe_file, overrides)
    paths = (recipe.model.path, recipe.data.path, recipe.data.eval_path, recipe.checkpoint.resume, recipe.output_dir)
    assert paths == ("/home/me/x",) * 5


def test_only_what_has_no_default_is_needed():
    recipe = parse_recipe(
        {
            "model": {"path": "m"},
            "data": {"path": "d", "format": "text"},
            "batch": {"global_size": 8},
            "optim": {"lr": 1e-3},
            "train": {"steps": 5},
            "output_dir": "o",
        }
    )
    assert recipe.parallel_config() == ParallelConfig()


def test_overrides_are_yaml_and_reach_sections_that_are_not_there(recipe_file):
    recipe = load_recipe(
        recipe_file,
        ["optim.lr=1e-4", "distributed.timeout_seconds=20", "train.eval_every=null", "log.trackers=[wandb]"],
    )
    assert (recipe.optim.lr, recipe.distributed.timeout_seconds) == (1e-4, 20.0)
    assert (recipe.train.eval_every, recipe.log.trackers) == (None, ["wandb"])


@pytest.mark.parametrize("text", ["2e-5", "2E-5", "2.0e-5", "0.00002"])
def test_numbers_with_an_exponent_are_numbers(recipe_file, text):
    assert load_recipe(recipe_file, [f"optim.lr={text}"]).optim.lr == 2e-5


@pytest.mark.parametrize("text", ["2e-5", "1e3"])
def test_dumped_recipe_reads_back_equal(tmp_path, recipe_file, text):
    recipe = load_recipe(recipe_file, [f"optim.lr={text}", f"output_dir='{text}'", "parallel.stage_layers=[14, 16]"])
    saved = tmp_path / "saved.yaml"
    saved.write_text(recipe.dump_yaml())
    assert load_recipe(saved) == recipe


@pytest.mark.parametrize(
    ("override", "key", "near"),
    [
        ("optim.learning_rat=0.1", "optim.learning_rat=0.1", "optim.lr"),
        ("lr=0.1", "lr=0.1", "optim.lr"),
        ("num-epochs=3", "num-epochs=3", "train.steps"),
        ("parallel.tpp=2", "parallel.tpp=2", "parallel.tp?"),
        ("tpp=2", "tpp=2", "parallel.tp?"),
        ("path=x", 'path="x"', "model.path or data.path"),
        ("optimizer={lr: 1}", 'optimizer={"lr": 1}', "optim?"),
        ("data.seq_length=8", "data.seq_length=8", "data.seq_len?"),
        ("train.micro_size=8", "train.micro_size=8", "batch.micro_size"),
    ],
)
def test_unknown_key_is_named_with_the_nearest_right_one(recipe_file, override, key, near):
    """T36A."""
    (line,) = problems(recipe_file, override)
    assert line.startswith(f"{key} is not a key; did you mean ")
    assert near in line


def test_unknown_key_with_nothing_near_lists_the_section(recipe_file):
    (line,) = problems(recipe_file, "batch.zzz=1")
    assert line == "batch.zzz=1 is not a key; the keys of batch are global_size, micro_size."


def test_expert_parallelism_is_refused_by_name(recipe_file):
    (line,) = problems(recipe_file, "parallel.ep=2")
    assert line.startswith("parallel.ep=2 is not a key; experts are not spread over ranks (expert parallelism)")


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("train.steps=ten", 'train.steps="ten" must be a whole number.'),
        ("train.steps=true", "train.steps=true must be a whole number."),
        ("train.steps=1.5", "train.steps=1.5 must be a whole number."),
        ("train.steps=0", "train.steps=0 must be at least 1."),
        ("train.deterministic=1", "train.deterministic=1 must be true or false."),
        ("optim.lr='1e-3'", 'optim.lr="1e-3" must be a number.'),
        ("optim.lr=.nan", "optim.lr=NaN must be a finite number."),
        ("optim.lr=0", "optim.lr=0 must be more than 0.0."),
        ("optim.betas=[0.9, 1.0]", "optim.betas.1=1.0 must be less than 1.0."),
        ("optim.min_lr_ratio=2", "optim.min_lr_ratio=2 must be at most 1.0."),
        ("optim=3", "optim=3 must be a section, with keys of its own."),
        ("model.path=3", "model.path=3 must be text."),
        ("data.format=cht", 'data.format="cht" must be one of text, instruct or chat.'),
        ("log.trackers=jsonl", 'log.trackers="jsonl" must be a list.'),
        ("model.dtype=float16", 'model.dtype="float16" must be one of float32 or bfloat16.'),
        ("optim.warmup_steps=101", "optim.warmup_steps=101 is more than train.steps=100."),
        ("train.stop_at=101", "train.stop_at=101 is more than train.steps=100."),
        ("guard.spike_factor=1", "guard.spike_factor=1 must be more than 1.0."),
        ("output_dir.x=1", "output_dir.x=1 does not fit: output_dir is a value, not a section."),
        ("steps", "steps is not of the form key.path=value."),
    ],
)
def test_wrong_value_is_named_with_what_is_legal(recipe_file, override, line):
    assert problems(recipe_file, override) == [line]


def test_a_rollback_without_checkpoints_is_refused(recipe_file):
    (line,) = problems(recipe_file, "guard.on_nonfinite=rollback", "checkpoint.every=null")
    assert line == "guard.on_nonfinite=rollback needs checkpoints to go back to; set checkpoint.every."


def test_parallel_settings_are_refused_under_their_path(recipe_file):
    (line,) = problems(recipe_file, "parallel.microbatches=1")
    assert line.startswith("parallel.microbatches=1 is fewer than the 2 stages")
    (line,) = problems(recipe_file, "parallel.pp=0")
    assert line.startswith("parallel.pp=0 must be a whole number of at least 1")


def test_every_problem_gets_its_line(recipe_file):
    lines = problems(recipe_file, "parallel.tp=0", "train.steps=-1", "optim.lrr=1", "model.path=null")
    assert [line.split("=")[0] for line in lines] == ["model.path", "parallel.tp", "optim.lrr", "train.steps"]


def test_missing_keys_are_named(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("model: {}\nbatch: {global_size: 8}\noptim: {lr: 1}\ntrain: {steps: 1}\noutput_dir: o\n")
    assert problems(path) == ["model.path is missing.", "data is missing; it needs path, format."]


def test_key_given_twice_is_refused(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(EXAMPLE + "train: {steps: 5}\n")
    assert problems(path) == [f"{path}, line 12: train is given twice"]


@pytest.mark.parametrize("text", ["a: [1", "just words", "- 1"])
def test_file_that_is_no_recipe_is_named(tmp_path, text):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    (line,) = problems(path)
    assert line.startswith(str(path))


BOMB = "a: &a [x, x]\n" + "\n".join(f"{k}: &{k} [*{j}, *{j}]" for j, k in pairwise("abcdefghijklmnopqrstuvwxyz"))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("model: {path: \xff}", "{path} is not text in UTF-8: invalid start byte at byte 15."),
        ("train:\n  steps: 2001-13-01", "{path}, line 2: this is no timestamp"),
        ("train:\n  steps: " + "9" * 5000, "{path}, line 2: this is no int"),
        ("train:\n  steps: 0x" + "f" * 5000, "{path}, line 2: this number is too large"),
        ("train: !!python/object/apply:os.system [ls]", "could not determine a constructor for the tag"),
        ("a: " + "[" * 20_000, "{path}: sections are nested too deeply"),
        ("model: &m {path: *m}", 'model.path={{"path": {{"path": '),
        ('"a\\nb": 1', '"a\\nb"=1 is not a key'),
        (BOMB, "z=[[[[[[[["),
        ("batch: {global_size: 999999999999}", "batch.global_size=999999999999 must be at most 2147483647."),
    ],
    ids=["latin-1", "date", "digits", "hex", "code", "deep", "endless", "newline", "bomb", "large"],
)
def test_text_that_yaml_stumbles_over_is_one_line(tmp_path, text, line):
    path = tmp_path / "recipe.yaml"
    path.write_bytes(text.encode("latin-1"))
    found = problems(path)
    assert any(line.format(path=path) in problem for problem in found), found
    assert all(problem.isprintable() and len(problem) < 300 for problem in found)


def test_nearest_sizes_of_a_very_large_batch_are_found_at_once(recipe_file):
    (line,) = mesh_problems(recipe_file, 6, "batch.global_size=2147483646", "batch.micro_size=4")
    assert line.endswith("nearest that work: 3 or 6.")


def test_recipe_that_is_nowhere_lists_the_shipped_ones():
    (line,) = problems("lama")
    assert "lama is neither a file nor a shipped recipe" in line
    assert "llama-3.1-8b" in line


def test_mesh_that_does_not_fill_the_world_is_refused(recipe_file):
    (line,) = mesh_problems(recipe_file, 8)
    assert line.startswith("parallel.pp=2 x dp_replicate=1 x dp_shard=1 x tp=3 makes 6 processes, but world_size=8")


@pytest.mark.parametrize(
    ("overrides", "world_size", "line"),
    [
        (
            ["parallel.dp_shard=5"],
            30,
            "batch.global_size=64 does not divide over dp=5 (dp_replicate=1 x dp_shard=5); "
            "nearest that work: 60 or 65.",
        ),
        (
            ["batch.micro_size=5"],
            6,
            "batch.micro_size=5 does not divide the 64 rows a step of a data-parallel rank "
            "(global_size=64 over dp=1); nearest that work: 4 or 8.",
        ),
        (
            ["batch.global_size=2", "batch.micro_size=2"],
            6,
            "batch.global_size=2 makes 1 microbatches a step, and 1 is fewer than the 2 stages, which schedule=1F1B "
            "cannot run; nearest that work: 4.",
        ),
        (
            ["parallel.microbatches=3"],
            6,
            "parallel.microbatches=3 does not divide the 64 microbatches of a step; nearest that work: 2 or 4.",
        ),
    ],
)
def test_batch_that_does_not_fit_the_mesh_is_refused(recipe_file, overrides, world_size, line):
    assert mesh_problems(recipe_file, world_size, *overrides) == [line]


def test_rest_of_the_world_goes_to_dp(recipe_file):
    recipe = load_recipe(recipe_file, ["parallel.dp_shard=-1"])
    assert recipe.world_size() == 6
    recipe.check(12)
    config = recipe.parallel_config(12)
    assert (config.dp_shard, config.microbatches) == (2, 32)
    assert recipe.microbatches_per_step(config.dp) == 32


def test_microbatches_of_a_schedule_step_are_the_recipes_where_given(recipe_file):
    recipe = load_recipe(recipe_file, ["parallel.microbatches=8", "batch.micro_size=2"])
    recipe.check(6)
    assert recipe.parallel_config(6).microbatches == 8
    assert recipe.microbatches_per_step(1) == 32


def test_parallel_section_has_the_fields_and_defaults_of_parallel_config():
    fields = {field.name: field.default for field in dataclasses.fields(ParallelConfig)}
    del fields["param_dtype"]
    assert {name: field.default for name, field in Parallel.model_fields.items()} == fields


def test_trackers_are_those_of_accelerate(recipe_file):
    for name in ["jsonl", *LOGGER_TYPE_TO_CLASS]:
        load_recipe(recipe_file, [f"log.trackers=[{name}]"])


def test_recipe_errors_are_value_errors():
    assert issubclass(RecipeError, ConfigError)
    assert issubclass(ConfigError, ValueError)


@pytest.mark.parametrize(
    ("name", "world_size", "mesh"),
    [
        ("smollm2-135m-demo", 6, (2, 1, 3)),
        ("llama-3.2-1b", 8, (1, 8, 1)),
        ("llama-3.1-8b", 8, (1, 4, 2)),
        ("llama-3.1-70b", 64, (4, 2, 8)),
    ],
)
def test_shipped_recipe_runs_on_its_mesh(name, world_size, mesh):
    recipe = load_recipe(name)
    recipe.check(world_size)
    config = recipe.parallel_config(world_size)
    assert (config.pp, config.dp, config.tp) == mesh


@pytest.mark.parametrize("name", list(shipped_recipes()))
def test_shipped_recipe_explains_itself(name):
    text = shipped_recipes()[name].read_text()
    header = text.split("\nmodel:")[0]
    assert "torchrun" in header
    assert f"-m meshpar train {name}" in header
    if "--nnodes" in header:
        assert "--rdzv-backend c10d --rdzv-endpoint" in header
    uncommented = [line for line in text.splitlines() if re.match(r"(  \w+|output_dir):", line) and "  #" not in line]
    assert uncommented == []


@pytest.mark.parametrize("name", list(shipped_recipes()))
def test_shipped_recipe_states_every_key(name):
    raw = yaml.safe_load(shipped_recipes()[name].read_text())
    keys = recipe_keys(Recipe)
    assert list(raw) == keys[""]
    assert {section: list(raw[section]) for section in keys if section} == {s: keys[s] for s in keys if s}


def test_every_package_is_shipped():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {".".join(file.parent.relative_to(ROOT).parts) for file in (ROOT / "meshpar").rglob("__init__.py")}
    assert set(listed) == found | {"meshpar.recipes"}
