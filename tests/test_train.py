"""The training loop: the same numbers on any mesh, resume to the bit, evaluation, what a run reports and leaves."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from accelerate import init_empty_weights
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer

from meshpar.cli import main
from meshpar.config import ConfigError
from meshpar.flops import flops_per_token
from meshpar.recipe import Optim, load_recipe, parse_recipe
from meshpar.train.data import GlobalBatches, eval_batches, load_rows, pad_token_id
from meshpar.train.optim import lr_factor, make_optimizer, make_schedule
from meshpar.train.trackers import check_trackers
from tests import jobs_train as jobs
from tests import models
from tests.workspace import recipe

ONE, DP2, PP2 = {"dp_shard": 1}, {"dp_shard": 2}, {"dp_shard": 1, "pp": 2}
DP2_TP2 = {"dp_shard": 2, "tp": 2}
PP2_TP2 = {"dp_shard": 1, "pp": 2, "tp": 2}
ZBV_TP2 = {"dp_shard": 1, "pp": 2, "tp": 2, "schedule": "ZBVZeroBubble", "virtual_stages": 2}
PP2_DP2 = {"dp_shard": 2, "pp": 2}
STEP_KEYS = {
    "step", "loss", "grad_norm", "lr", "tokens", "tokens_per_second", "step_seconds", "peak_memory_bytes", "mfu",
}  # fmt: skip


def train(pool, raw: dict) -> list[list[str]]:
    config = parse_recipe(raw)
    return pool.run(config.world_size(), jobs.train, raw)


def metrics(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def numbers(out: Path) -> list[dict]:
    """What must not depend on how a run was interrupted."""
    return [{key: row[key] for key in ("step", "loss", "grad_norm", "lr", "tokens")} for row in metrics(out)]


def checkpoints(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "checkpoints").iterdir())


def in_one_process(raw: dict) -> list[dict]:
    """The recipe's steps by hand, with the unmodified Hugging Face model."""
    settings = parse_recipe(raw)
    tokenizer = AutoTokenizer.from_pretrained(settings.model.path)
    model = AutoModelForCausalLM.from_pretrained(settings.model.path, attention_dropout=0.0)
    rows = load_rows(settings.data.path, "instruct", tokenizer, settings.data.seq_len, pack=True)
    batches = GlobalBatches(rows, 4, seed=0, pad_id=pad_token_id(tokenizer), seq_len=settings.data.seq_len)
    optimizer = make_optimizer(model, settings.optim)
    schedule = make_schedule(optimizer, settings.optim, settings.train.steps)
    done = []
    for _ in range(settings.train.steps):
        loss = models.reference_loss(model, batches.next())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.optim.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        done.append({"loss": loss.item(), "grad_norm": norm.item()})
    return done


@pytest.mark.parametrize("parallel", [ONE, PP2_DP2], ids=["1x1x1", "2x2x1"])
def test_batches_in_which_nothing_counts_have_zero_loss_and_change_no_weight(pool, no_dropout, tmp_path, parallel):
    """T32A: prompts that fill their rows, so that every response is cut off."""
    data = tmp_path / "long.jsonl"
    data.write_text((json.dumps({"prompt": "w1 " * 40, "response": "w2"}) + "\n") * 8)
    settings = {"data__path": str(data), "optim__weight_decay": 0.0, "train__steps": 2}
    train(pool, recipe(no_dropout, tmp_path / "run", parallel, **settings))
    assert [(row["loss"], row["grad_norm"]) for row in metrics(tmp_path / "run")] == [(0.0, 0.0)] * 2
    before, after = (
        AutoModelForCausalLM.from_pretrained(d) for d in (no_dropout / "model", tmp_path / "run" / "model")
    )
    for name, weight in before.state_dict().items():
        assert torch.equal(after.state_dict()[name], weight), name


@pytest.mark.parametrize("parallel", [ONE, DP2_TP2, ZBV_TP2, PP2_DP2], ids=["1x1x1", "1x2x2", "2x1x2-ZBV", "2x2x1"])
def test_losses_and_norms_are_those_of_one_process(pool, no_dropout, tmp_path, parallel):
    raw = recipe(no_dropout, tmp_path, parallel, train__steps=5)
    train(pool, raw)
    for row, reference in zip(metrics(tmp_path), in_one_process(raw), strict=True):
        assert row["loss"] == pytest.approx(reference["loss"], abs=1e-5)
        assert row["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-5)


def test_several_schedule_steps_a_batch_give_the_same_losses(pool, no_dropout, tmp_path):
    for name, changes in (("one", {}), ("several", {"parallel__microbatches": 2})):
        raw = recipe(no_dropout, tmp_path / name, PP2, train__steps=2, batch__global_size=8, **changes)
        train(pool, raw)
    for one, several in zip(numbers(tmp_path / "one"), numbers(tmp_path / "several"), strict=True):
        assert one == pytest.approx(several, rel=1e-5)


@pytest.mark.parametrize("parallel", [DP2_TP2, PP2_TP2], ids=["1x2x2", "2x1x2"])
def test_what_a_rank_is_fed_depends_on_its_dp_coordinate_alone(pool, no_dropout, tmp_path, parallel):
    """T33A: a loader that splits by world rank gives tp peers and stages different batches."""
    raw, dp = recipe(no_dropout, tmp_path, parallel, train__steps=4), parallel["dp_shard"]
    results = pool.run(4, jobs.ids_fed, raw)
    for step in zip(*results, strict=True):
        fed = dict(step)
        assert sorted(fed) == list(range(dp))
        assert all(fed[coordinate] == rows for coordinate, rows in step)
        assert len({row for rows in fed.values() for row in rows}) == raw["batch"]["global_size"]
    assert len({tuple(rows) for fed in results for _, rows in fed}) == 4 * dp


# Resume


@pytest.mark.parametrize(
    ("parallel", "background"),
    [(PP2, False), (DP2, True), (ZBV_TP2, True)],
    ids=["2x1x1", "1x2x1-async", "2x1x2-ZBV-async"],
)
def test_an_interrupted_run_ends_bit_equal_to_an_undisturbed_one(pool, workspace, tmp_path, parallel, background):
    settings = {"train__deterministic": True, "checkpoint__async": background, "checkpoint__every": 2}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(pool, recipe(workspace, whole, parallel, **settings))
    train(pool, recipe(workspace, parts, parallel, **settings, train__stop_at=3))
    assert checkpoints(parts) == ["step-2", "step-3"]
    assert not (parts / "model").exists()
    train(pool, recipe(workspace, parts, parallel, **settings))
    assert numbers(parts) == numbers(whole)
    assert checkpoints(parts) == checkpoints(whole) == ["step-4", "step-6"]
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (parts / "model" / name).read_bytes() == (whole / "model" / name).read_bytes()


@pytest.fixture(scope="module")
def stopped(pool, no_dropout, tmp_path_factory):
    """Three of six steps on (1, 2, 1), and the whole run on the same mesh."""
    where = tmp_path_factory.mktemp("stopped")
    train(pool, recipe(no_dropout, where / "whole", DP2))
    train(pool, recipe(no_dropout, where / "part", DP2, train__stop_at=3))
    return where


def rows_fed(pool, raw: dict) -> list[list[str]]:
    """Training by a recipe: the rows of each step, in the order of the global batch."""
    steps = zip(*pool.run(parse_recipe(raw).world_size(), jobs.ids_fed, raw), strict=True)
    return [[row for _, rows in sorted(dict(step).items()) for row in rows] for step in steps]


INTERLEAVED = {"dp_shard": 1, "pp": 2, "schedule": "Interleaved1F1B", "virtual_stages": 2}
TP3 = {"dp_shard": 1, "tp": 3}  # 4 heads on 2 kv heads and 96 rows of the vocabulary: padded
MOVES = [
    (DP2, PP2, "1x2x1 to 2x1x1"),
    (DP2, {"dp_replicate": 2, "dp_shard": 2}, "1x2x1 to 1x2+2x1"),
    (PP2, INTERLEAVED, "2x1x1 to 2x1x1-interleaved"),
    (ZBV_TP2, ONE, "2x1x2-ZBV to 1x1x1"),
    (ONE, ZBV_TP2, "1x1x1 to 2x1x2-ZBV"),
    (DP2_TP2, TP3, "1x2x2 to 1x1x3"),
    (TP3, PP2_DP2, "1x1x3 to 2x2x1"),
]


@pytest.mark.parametrize(("there", "here"), [move[:2] for move in MOVES], ids=[name for *_, name in MOVES])
def test_a_run_goes_on_on_another_mesh(pool, no_dropout, tmp_path, there, here):
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    rows = rows_fed(pool, recipe(no_dropout, whole, there, checkpoint__every=3))
    shutil.copytree(whole / "checkpoints" / "step-3", moved / "checkpoints" / "step-3")
    assert rows_fed(pool, recipe(no_dropout, moved, here)) == rows[3:]
    for one, other in zip(numbers(moved), numbers(whole)[3:], strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=0, abs=1e-6)
        assert one == pytest.approx(other, rel=2e-6, abs=1e-6)


def test_resume_takes_the_last_complete_checkpoint_and_drops_what_came_after(pool, no_dropout, stopped, tmp_path):
    run = tmp_path / "run"  # T34A: step 6 was being written
    shutil.copytree(stopped / "part", run)
    shutil.copytree(run / "checkpoints" / "step-3", run / "checkpoints" / "step-6")
    (run / "checkpoints" / "step-6" / "meshpar.json").unlink()
    (run / "checkpoints" / "step-6.tmp").mkdir()
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "loss": 1.0}\n{"step": 5, "lo')
    warnings = train(pool, recipe(no_dropout, run, DP2))
    assert [message.rpartition("; ")[2] for message in warnings[0]] == ["skipped", "skipped"]
    assert warnings[1] == []
    assert numbers(run) == numbers(stopped / "whole")
    assert checkpoints(run) == ["step-3", "step-6"]


def test_a_run_that_starts_anew_sets_checkpoints_ahead_of_it_aside(pool, no_dropout, stopped, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(stopped / "whole", run)
    train(pool, recipe(no_dropout, run, DP2, checkpoint__resume="never", train__stop_at=3))
    assert checkpoints(run) == ["step-3", "step-6.superseded"]
    assert numbers(run) == numbers(stopped / "whole")[:3]


def test_resume_from_a_path(pool, no_dropout, stopped, tmp_path):
    source = str(stopped / "part" / "checkpoints" / "step-3")
    warnings = train(pool, recipe(no_dropout, tmp_path, DP2, checkpoint__resume=source, optim__weight_decay=0.5))
    assert numbers(tmp_path) == numbers(stopped / "whole")[3:]
    assert warnings[0] == ["optim.weight_decay stays 0.1, as the checkpoint has it; the recipe says 0.5"]


def test_settings_that_stay_are_those_that_are_used(pool, no_dropout, stopped, tmp_path):
    """The recipe of a checkpoint may have asked for others, which its run did not take either."""
    run = tmp_path / "run"
    shutil.copytree(stopped / "part", run)
    changed = train(pool, recipe(no_dropout, run, DP2, optim__lr=0.5, train__stop_at=4))
    assert changed[0] == ["optim.lr stays 0.01, as the checkpoint has it; the recipe says 0.5"]
    assert train(pool, recipe(no_dropout, run, DP2)) == [[], []]
    assert numbers(run) == numbers(stopped / "whole")


def test_another_schedule_is_followed_from_the_first_step_after_a_resume(pool, no_dropout, stopped, tmp_path):
    source = str(stopped / "part" / "checkpoints" / "step-3")
    train(pool, recipe(no_dropout, tmp_path, DP2, checkpoint__resume=source, optim__schedule="constant"))
    assert [row["lr"] for row in numbers(tmp_path)] == [0.01] * 3


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("data__path", "no.jsonl", r"data\.path: no\.jsonl: no such file"),
        ("data__eval_path", "no.jsonl", r"data\.eval_path: no\.jsonl: no such file"),
        ("model__path", "/no/model", r"model\.path: the config of /no/model cannot be used"),
        ("train__seed", 1, r"checkpoint\.resume: the checkpoint's place is in other data \(seed 0 there, 1 here\)"),
        ("model__dtype", "bfloat16", r"checkpoint\.resume: .* stored in float32 there, bfloat16 here"),
    ],
)
def test_what_a_recipe_names_and_cannot_be_used_is_a_recipe_that_cannot_run(
    pool, no_dropout, stopped, tmp_path, key, value, message
):
    shutil.copytree(stopped / "part", tmp_path / "run")
    with pytest.raises(AssertionError, match=rf"RecipeError: {message}"):
        train(pool, recipe(no_dropout, tmp_path / "run", ONE, **{key: value}))


def test_an_output_dir_that_cannot_be_made_is_a_recipe_that_cannot_run(pool, no_dropout, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(AssertionError, match=r"RecipeError: output_dir=.*file cannot be written: .*File exists"):
        train(pool, recipe(no_dropout, tmp_path / "file", ONE))


def test_resume_from_no_checkpoint_is_refused(pool, no_dropout, tmp_path):
    with pytest.raises(AssertionError, match=r"checkpoint\.resume=.* cannot be used: .* it has no meshpar\.json"):
        train(pool, recipe(no_dropout, tmp_path, ONE, checkpoint__resume=str(tmp_path)))


# Evaluation


@pytest.mark.parametrize("parallel", [DP2, PP2_DP2], ids=["1x2x1", "2x2x1"])
def test_evaluation_is_the_mean_over_all_rows(pool, no_dropout, tmp_path, parallel):  # T29A: 5 rows in batches of 4
    changes = {"data__eval_path": str(no_dropout / "eval.jsonl"), "train__eval_every": 2, "data__pack": False}
    train(pool, recipe(no_dropout, tmp_path, parallel, train__steps=3, train__eval_at_start=True, **changes))
    rows = metrics(tmp_path)
    assert [row["step"] for row in rows if "eval_loss" in row] == [0, 2, 3]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    held_out = load_rows(changes["data__eval_path"], "instruct", tokenizer, 32, pack=False)
    (batch,) = eval_batches(held_out, len(held_out), 0, 1, pad_token_id(tokenizer), 32)
    with torch.no_grad():
        assert rows[-1]["eval_loss"] == pytest.approx(models.reference_loss(model, batch).item(), abs=1e-5)


# What a run reports and leaves


def test_a_run_leaves_metrics_recipe_checkpoints_trackers_and_a_model(pool, workspace, tmp_path):
    changes = {"log__trackers": ["jsonl", "tensorboard"], "checkpoint__every": 1, "log__every": 2}
    parallel = {"dp_shard": -1, "tp": 2}
    raw = recipe(workspace, tmp_path, parallel, train__steps=4, model__init="random", **changes)
    train(pool, raw)
    rows = metrics(tmp_path)
    assert [row["step"] for row in rows] == [2, 4]
    assert all(set(row) == STEP_KEYS for row in rows)
    assert [row["tokens"] for row in rows] == [2 * 4 * 32, 4 * 4 * 32]
    assert all(row["mfu"] is None and row["peak_memory_bytes"] > 1e8 and row["step_seconds"] > 0 for row in rows)
    assert checkpoints(tmp_path) == ["step-3", "step-4"]
    resolved = load_recipe(tmp_path / "recipe.yaml")
    assert (resolved.parallel.dp_shard, resolved.parallel.tp, resolved.optim.weight_decay) == (1, 2, 0.1)
    events = EventAccumulator(str(tmp_path / "trackers" / tmp_path.name)).Reload()
    assert [event.value for event in events.Scalars("loss")] == pytest.approx([row["loss"] for row in rows])
    assert [event.step for event in events.Scalars("loss")] == [2, 4]
    AutoTokenizer.from_pretrained(tmp_path / "model")
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert trained.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2).shape == (1, 5)


def test_a_missing_tracker_is_refused_with_the_command_that_helps():
    packages = {"comet_ml": "comet-ml", "clearml": "clearml", "dvclive": "dvclive", "swanlab": "swanlab", "aim": "aim"}
    missing = next(name for name in packages if importlib.util.find_spec(name) is None)
    with pytest.raises(ConfigError, match=rf"log\.trackers=.*{missing}.* run `pip install {packages[missing]}`"):
        check_trackers(["jsonl", "tensorboard", missing])


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.775, 0.55, 0.325]),
        ("cosine", [0.5, 1.0, 1.0, 0.868198, 0.55, 0.231802]),
    ],
)
def test_learning_rate_warms_up_then_follows_the_schedule(schedule, factors):
    optim = Optim(lr=1.0, warmup_steps=2, schedule=schedule, min_lr_ratio=0.1)
    assert [lr_factor(step, optim, 6) for step in range(6)] == pytest.approx(factors, abs=1e-6)


@pytest.mark.parametrize(
    ("sizes", "gigaflops"),
    [((4096, 14336, 32, 32), 51.47), ((8192, 28672, 80, 64), 449.22)],
    ids=["Llama-3-8B", "Llama-3-70B"],
)
def test_flops_per_token_are_the_published_ones(sizes, gigaflops):
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    config = models.tiny_config(vocab_size=128256, num_key_value_heads=8, **dict(zip(keys, sizes, strict=True)))
    with init_empty_weights():
        shapes = {name: p.shape for name, p in AutoModelForCausalLM.from_config(config).named_parameters()}
    assert flops_per_token(shapes, config, 8192) / 1e9 == pytest.approx(gigaflops, rel=1e-3)


# The command


def test_train_and_export_commands(workspace, tmp_path, capfd):
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe(workspace, tmp_path / "run", PP2)))
    assert main(["train", str(file), "train.steps=2", "checkpoint.async=true"]) == 0
    assert "step 2/2  loss " in capfd.readouterr().out
    step = tmp_path / "run" / "checkpoints" / "step-2"
    assert main(["export", str(step), str(tmp_path / "exported")]) == 0
    weights = [
        (directory / "model.safetensors").read_bytes()
        for directory in (tmp_path / "exported", tmp_path / "run" / "model")
    ]
    assert weights[0] == weights[1]


def test_verify_command(workspace, tmp_path, capfd):
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe(workspace, tmp_path / "run", PP2)))
    assert main(["verify", str(file), "parallel.compute_dtype=bfloat16"]) == 0
    assert "equal to one process: LlamaForCausalLM on pp=2 x dp=1 x tp=1, 1F1B" in capfd.readouterr().out
