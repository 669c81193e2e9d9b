"""`meshpar plan` and `meshpar.plan()`: what they print, find and write, without weights or a process group."""

from __future__ import annotations

import json
import shlex

import pytest
import torch.distributed as dist
from transformers import GPT2Config, LlamaConfig

import meshpar
from meshpar.cli import main
from meshpar.config import ConfigError, ParallelConfig
from meshpar.planner.chrome import write_trace
from meshpar.planner.communication import Microbatches
from meshpar.planner.forecast import room
from meshpar.planner.job import open_job
from meshpar.planner.search import HEADS, LAYERS, MEMORY, STATE, search
from meshpar.planner.simulate import Timeline
from meshpar.planner.skeleton import open_skeleton
from meshpar.planner.study import Study
from meshpar.recipe import load_recipe
from tests import models
from tests.workspace import recipe as make_recipe

COMPONENTS = ("parameters", "gradients", "optimizer", "activations", "loss", "transient")
LLAMA = {"8b": (4096, 14336, 32, 32), "70b": (8192, 28672, 80, 64), "405b": (16384, 53248, 126, 128)}


def llama(name: str, layers: int | None = None) -> LlamaConfig:
    hidden, ffn, all_layers, heads = LLAMA[name]
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers or all_layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        vocab_size=128256,
        tie_word_embeddings=False,
    )


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    where = tmp_path_factory.mktemp("model")
    models.tiny_config().save_pretrained(where)
    return str(where)


def command(capsys, *arguments: str) -> dict:
    assert main(["plan", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_has_the_published_shape_and_adds_up(tiny, capsys):
    mesh = [
        "--pp",
        "2",
        "--dp-replicate",
        "2",
        "--tp",
        "2",
        "--seq-len",
        "64",
        "--micro-size",
        "2",
        "--schedule",
        "1f1b",
    ]
    found = command(capsys, tiny, "--world-size", "16", "--device", "H100-80GB", *mesh)
    parameters = found["model"]["parameters"]
    assert found["mesh"] == {"pp": 2, "dp_replicate": 2, "dp_shard": 2, "tp": 2}
    assert found["bytes_per_parameter"] == {"parameters": 4, "gradients": 4, "optimizer": 8}
    assert sum(rank["count"] for rank in found["ranks"]) == 16
    for rank in found["ranks"]:
        assert set(rank) == {"pp", "dp", "tp", "count", "memory"}
        assert rank["memory"]["total"] == sum(rank["memory"][name] for name in COMPONENTS)
    held = sum(rank["count"] * rank["memory"]["parameters"] for rank in found["ranks"])
    assert 4 * 2 * parameters <= held < 4.2 * 2 * parameters  # two replicas; norms are on both tp ranks
    assert {one["dim"] for one in found["communication"]} == {"pp", "dp", "dp_shard", "dp_replicate", "tp"}
    assert all(set(one) == {"kind", "dim", "bytes"} for one in found["communication"])
    tokens = found["settings"]["global_size"] * 64
    assert found["settings"] | {"microbatches": 8, "micro_size": 2, "schedule": "1F1B"} == found["settings"]
    assert found["tokens_per_second"] == pytest.approx(tokens / found["step_seconds"])
    assert found["mfu"] == pytest.approx(found["model"]["flops_per_token"] * found["tokens_per_second"] / (16 * 989e12))
    assert found["bubble"] > 0
    assert not dist.is_initialized()


def test_from_python_and_as_text(tiny, capsys):
    config = meshpar.ParallelConfig(pp=2, dp_shard=-1, tp=4)
    found = meshpar.plan(tiny, config, world_size=32, device="h100-80gb", gpus_per_node=2, seq_len=64)
    assert (found.config.dp_shard, found.fits, found.heaviest.pp) == (4, True, found.heaviest.pp)
    assert main(["plan", tiny, *["--world-size", "32", "--device", "h100-80gb", "--gpus-per-node", "2"],
                 *["--pp", "2", "--tp", "4", "--seq-len", "64"]]) == 0  # fmt: skip
    text = capsys.readouterr().out
    assert f"total         {found.heaviest.total / 2**30:.2f} GiB" in text
    assert "Warning: groups of tp=4 span 2 nodes: " in text
    assert "recomputation is not counted" in text
    assert "torchrun --nnodes 16" in text


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_frozen_parameters_are_planned_and_a_frozen_model_is_refused(schedule):
    config = ParallelConfig(pp=2, schedule=schedule, virtual_stages=2 if schedule != "1F1B" else 1)
    model, sizes = open_skeleton(models.tiny_config()), dict(world_size=2, device="h100-80gb", seq_len=64)
    whole = meshpar.plan(model, config, **sizes).heaviest
    model.get_input_embeddings().requires_grad_(False)
    assert meshpar.plan(model, config, **sizes).heaviest.optimizer < whole.optimizer
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter of LlamaForCausalLM trains, so there is no training step"):
        meshpar.plan(model, config, **sizes)


def test_more_positions_than_the_model_has_are_refused():
    model = GPT2Config(n_embd=64, n_layer=2, n_head=4, n_positions=128, vocab_size=256)
    assert meshpar.plan(model, world_size=2, device="h100-80gb", seq_len=128).fits
    with pytest.raises(ValueError, match="an embedding of 128 positions, and a row asks for number 128"):
        meshpar.plan(model, world_size=2, device="h100-80gb", seq_len=129)
    job = open_job(model, {"data.seq_len": 129}, 2, "h100-80gb", search=True)
    with pytest.raises(ConfigError, match=r"none of .* refused first: .* an embedding of 128 positions"):
        search(job)


@pytest.fixture(scope="module")
def large():
    """An 8B model on 64 devices."""
    job = open_job(llama("8b"), {"batch.global_size": 256, "data.seq_len": 4096}, 64, "h100-80gb", search=True)
    return search(job, keep=5)


def test_the_fewest_model_parallel_ranks_that_fit_come_out(large):
    best = large.best[0]
    assert (best.config.pp, best.config.tp) == (1, 1)
    assert all(one.fits and one.heaviest.total <= room(one.device) for one in large.best)
    assert [one.time.step_seconds for one in large.best] == sorted(one.time.step_seconds for one in large.best)
    assert {MEMORY, STATE, LAYERS, HEADS} <= set(large.pruned)
    assert sum(large.pruned.values()) + len(large.best) == large.considered


@pytest.mark.parametrize(
    ("across", "world", "rows", "pipelined"), [("infiniband-ndr", 256, 1024, False), ("ethernet-100g", 64, 1024, True)]
)
def test_what_experts_advise_comes_out_for_a_large_model(across, world, rows, pipelined):
    """Tensor parallelism stays inside a node; a pipeline is for a slow network, and has at least 4 pp microbatches."""
    sizes = {"batch.global_size": rows, "data.seq_len": 4096}
    job = open_job(llama("70b"), sizes, world, "h100-80gb", across=across, search=True)
    best = search(job, {"schedule": "1F1B", "dp_replicate": 1, "micro_size": 1}, keep=1).best[0]
    assert 1 < best.config.tp <= 8
    assert not best.spans
    assert (best.config.pp > 1) == pipelined
    assert not pipelined or best.batch.count >= 4 * best.config.pp


def test_what_meshes_share_does_not_depend_on_who_came_first():
    """Layouts, arithmetic and activations are found once for all meshes that are alike."""
    config, batch = models.tiny_config(num_hidden_layers=4), Microbatches(2, 32, 4)
    shapes = [
        (1, 1, "1F1B", 1),
        (2, 1, "1F1B", 1),
        (2, 2, "ZBVZeroBubble", 2),
        (1, 2, "1F1B", 1),
        (2, 2, "GPipe", 1),
        (2, 1, "InterleavedZeroBubble", 2),
    ]
    meshes = [
        ParallelConfig(pp=pp, dp_shard=8 // pp // tp, tp=tp, schedule=schedule, virtual_stages=virtual, **more)
        for pp, tp, schedule, virtual in shapes
        for more in ({}, {"activation_checkpoint": "full", "sequence_parallel": False}, {"compute_dtype": "float32"})
    ]
    shared = Study(open_skeleton(config), 32)
    for mesh in meshes:
        alone = Study(open_skeleton(config), 32)
        assert list(shared.memory(mesh, batch)) == list(alone.memory(mesh, batch)), mesh
        assert shared.work(mesh) == alone.work(mesh), mesh
        assert shared.traffic(mesh, batch, 0) == alone.traffic(mesh, batch, 0), mesh


def test_search_ranks_and_writes_a_recipe_that_loads(tiny, tmp_path, capsys):
    written = tmp_path / "best.yaml"
    options = ["--world-size", "8", "--device", "cpu", "--search", "--seq-len", "64", "--global-size", "32"]
    found = command(capsys, tiny, *options, "--pp", "2", "--write", str(written))
    ranking = found["search"]["ranking"]
    assert [row["step_seconds"] for row in ranking] == sorted(row["step_seconds"] for row in ranking)
    assert all(row["mesh"]["pp"] == 2 for row in ranking)
    assert ranking[0]["mesh"] == found["mesh"]
    assert sum(found["search"]["pruned"].values()) + len(ranking) == found["search"]["considered"]
    recipe = load_recipe(written)
    recipe.check(8)
    assert recipe.parallel_config(8).tp == found["mesh"]["tp"]
    again = command(capsys, str(written), "--world-size", "8", "--device", "cpu")
    assert {name: again[name] for name in ("mesh", "ranks", "step_seconds")} == {
        name: found[name] for name in ("mesh", "ranks", "step_seconds")
    }
    assert main(["plan", tiny, *options, "--write", str(written)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main(["plan", tiny, *options, "--write", str(written / "deeper")]) == 2
    assert "give a file in a directory that is there" in capsys.readouterr().err


def test_overrides_may_stand_behind_options(capsys):
    options = ["--world-size", "6", "--device", "cpu"]
    assert main(["plan", "smollm2-135m-demo", *options, "model.path=missing"]) == 2
    assert "missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "fixed"),
    [
        (["--pp", "2", "--schedule", "interleaved1f1b"], {"pp": 2, "schedule": "Interleaved1F1B"}),
        (["--pp", "4", "--virtual-stages", "1"], {"pp": 4, "virtual_stages": 1}),
        (["parallel.tp=2", "batch.micro_size=4"], {"tp": 2, "micro_size": 4}),
        (["--schedule", "1F1B", "parallel.pp=2"], {"pp": 2, "schedule": "1F1B"}),
        (["--dp-shard", "-1"], {}),
    ],
)
def test_search_keeps_what_is_given_and_no_mesh_of_the_recipe(tiny, given, fixed, tmp_path, capsys):
    mesh = {"pp": 2, "tp": 1, "schedule": "ZBVZeroBubble", "virtual_stages": 2, "stage_layers": [1, 1, 1, 1]}
    raw = make_recipe(tmp_path, tmp_path / "out", mesh, batch__global_size=32, model__path=tiny)
    (tmp_path / "recipe.yaml").write_text(json.dumps(raw))
    options = ["--world-size", "8", "--device", "cpu", "--search"]
    assignments, flags = [x for x in given if "=" in x], [x for x in given if "=" not in x]
    found = command(capsys, str(tmp_path / "recipe.yaml"), *assignments, *options, *flags)
    for row in found["search"]["ranking"]:
        settings = row["mesh"] | row["settings"]
        assert settings | fixed == settings
    assert len(found["search"]["ranking"]) > 1


@pytest.mark.parametrize("assignment", ["parallel.microbatches=2", "parallel.stage_layers=[1,3]"])
def test_search_refuses_what_it_would_not_keep(tiny, assignment, capsys):
    assert main(["plan", tiny, assignment, "--world-size", "2", "--device", "cpu", "--search"]) == 2
    assert "cannot be given to --search" in capsys.readouterr().err


def test_recipe_with_overrides_is_planned_written_and_drawn(tiny, tmp_path, capsys):
    raw = make_recipe(tmp_path, tmp_path / "out", {"pp": 2, "tp": 2}, batch__global_size=8, model__path=tiny)
    (tmp_path / "recipe.yaml").write_text(json.dumps(raw))
    page, picture, written = tmp_path / "plan.html", tmp_path / "plan.png", tmp_path / "new.yaml"
    common = [str(tmp_path / "recipe.yaml"), "data.pack=false", "--world-size", "8", "--device", "a100-80gb"]
    found = command(capsys, *common, "--plot", str(page), "--write", str(written), "--micro-size", "2")
    assert found["settings"]["microbatches"] == 2
    assert "Memory of each rank" in page.read_text()
    recipe = load_recipe(written)
    assert (recipe.batch.micro_size, recipe.data.pack, recipe.parallel.dp_shard) == (2, False, 2)
    command(capsys, *common, "--plot", str(picture))
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "h100"], "device='h100' is not known; did you mean h100-80gb?"),
        ([], "--device is missing; known are: a100-40gb"),
        (["--device", "cpu", "--across", "infiniband"], "link='infiniband' is not known; did you mean infiniband-"),
        (["--device", "cpu", "--pp", "3"], "pp=3 x dp_replicate=1 x tp=1 makes 3 processes"),
        (["--device", "cpu", "--pp", "2", "--schedule", "1F2B"], "parallel.schedule='1F2B' must be one of GPipe, 1F1B"),
        (
            ["--device", "cpu", "--tp", "8", "--global-size", "7", "--micro-size", "2"],
            "batch.micro_size=2 does not divide",
        ),
        (["--device", "cpu", "--plot", "plan.svg"], "plot='plan.svg' must end in .html or .png"),
        (
            ["--device", "cpu", "--search", "--tp", "8", "--pp", "8"],
            "none of the settings for world_size=8 has pp=8, tp=8",
        ),
        (["--device", "cpu", "--search", "--schedule", "GPipe", "--pp", "2", "--virtual-stages", "2"], "none of"),
        (["--device", "cpu", "--search", "--pp", "0"], "pp=0 must be a whole number of at least 1"),
    ],
)
def test_bad_usage_is_one_sentence(tiny, arguments, words, capsys):
    assert main(["plan", tiny, "--world-size", "8", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.startswith("meshpar: ")


@pytest.mark.parametrize(
    ("options", "laid_over"),
    [
        ([], []),
        (["--tp", "2", "--global-size", "32"], ["parallel.tp=2", "batch.global_size=32"]),
        (["--search", "--pp", "2", "--schedule", "GPipe"], ["parallel.pp=2", "parallel.schedule=GPipe"]),
    ],
)
def test_launch_line_starts_what_was_planned(tiny, options, laid_over, tmp_path, capsys):
    raw = make_recipe(tmp_path, tmp_path / "out", {}, batch__global_size=16, model__path=tiny)
    (tmp_path / "recipe.yaml").write_text(json.dumps(raw))
    common = ["--world-size", "8", "--device", "cpu", *options]
    found = command(capsys, str(tmp_path / "recipe.yaml"), *common)
    assert main(["plan", str(tmp_path / "recipe.yaml"), *common]) == 0
    line = capsys.readouterr().out.strip().splitlines()[-1]
    name, *overrides = shlex.split(line)[shlex.split(line).index("train") + 1 :]
    assert set(laid_over) <= set(overrides)
    assert bool(laid_over) == bool(overrides)
    again = command(capsys, name, *overrides, "--world-size", "8", "--device", "cpu")
    assert {key: again[key] for key in ("mesh", "settings")} == {key: found[key] for key in ("mesh", "settings")}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--write", "no/best.yaml"], "no/best.yaml cannot be written; give a file in a directory that is there"),
        (["--plot", "no/plan.html"], "no/plan.html cannot be written"),
        (["--plot", "taken.html"], "taken.html cannot be written"),
        (["--plot", "plan.html", "--trace", "none.json"], "trace='none.json' is no trace; a recipe with log.trace"),
        (["--plot", "plan.html", "--trace", "cut.json"], "trace='cut.json' is no trace"),
        (["--plot", "plan.html", "--trace", "other.json"], "trace='other.json' is no trace"),
        (["--plot", "plan.html", "--trace", "two.json"], "trace='two.json' is of 2 processes, and world_size=8."),
        (["--trace", "two.json"], "give --plot FILE, too."),
    ],
)
def test_files_are_checked_before_anything_is_planned(tiny, options, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken.html").mkdir()
    (tmp_path / "cut.json").write_text('{"traceEvents": [')
    (tmp_path / "other.json").write_text('{"steps": 3}')
    write_trace(tmp_path / "two.json", Timeline([[], []]))
    assert main(["plan", tiny, "--world-size", "8", "--device", "cpu", *options]) == 2
    said = capsys.readouterr()
    assert words in said.err
    assert not said.out


@pytest.mark.parametrize(
    ("subject", "words"),
    [
        ("no-such.yaml", "no-such.yaml is neither a file nor a shipped recipe"),
        ("lama-3.1-8b", "lama-3.1-8b is neither a recipe nor a model"),
        ("smollm2-135m-demo", "model.path=missing is no directory with a config.json"),
    ],
)
def test_subject_that_is_nowhere(subject, words, capsys):
    overrides = ["model.path=missing"] if subject == "smollm2-135m-demo" else []
    assert main(["plan", subject, *overrides, "--world-size", "6", "--device", "cpu"]) == 2
    assert words in capsys.readouterr().err
