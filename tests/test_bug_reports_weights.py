"""Public bug reports of this field as tests: weights in and out, memory, buffers, dtypes, frozen parameters, meshes.

The ids in docstrings name the case. "close" means: loss within 1e-5, each gradient within 1e-5 relative L2.
"""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from tests import jobs_bugs as jobs
from tests import models
from tests.bug_models import LLAMA, Folders, assert_gradients_close, label, mesh, whole_batch, world
from tests.pool import WorkerPool

LLAMA3_ROPE = dict(
    rope_type="llama3",
    rope_theta=500000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    return Folders(tmp_path_factory.mktemp("bug-models"))


# Initialisation


@pytest.mark.parametrize(
    "config",
    [mesh(2, 1, 1), mesh(4, 1, 1), mesh(2, 1, 1, schedule="Interleaved1F1B", virtual_stages=2), mesh(1, 2, 2)],
    ids=label,
)
def test_random_weights_do_not_depend_on_the_mesh(pool, config):
    """T16A: stages that start from one random state hold identical layers."""
    alone = pool.run(1, jobs.initial_weights, mesh(1, 1, 1), LLAMA)[0]
    got = pool.run(world(config), jobs.initial_weights, config, LLAMA)[0]
    assert len(got) == 39
    assert list(got) == list(alone)
    assert all(torch.equal(got[name], alone[name]) for name in alone)
    q_projs = [got[f"model.layers.{i}.self_attn.q_proj.weight"] for i in range(4)]
    assert all(models.relative(a, b) > 0.5 for a, b in itertools.combinations(q_projs, 2))
    assert torch.stack(q_projs).std() == pytest.approx(0.2, rel=0.05)


# Export


def read_export(directory: Path) -> tuple[dict[str, torch.Tensor], list[Path]]:
    """Every tensor by name, each in one file alone, after checking the index against the files."""
    files = sorted(directory.glob("*.safetensors"))
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - a safetensors handle is no dict
                assert name not in tensors
                tensors[name] = opened.get_tensor(name)
    if len(files) > 1:
        index = json.loads((directory / "model.safetensors.index.json").read_text())
        assert {n: directory / f for n, f in index["weight_map"].items()}.keys() == tensors.keys()
        assert {directory / f for f in index["weight_map"].values()} == set(files)
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    return tensors, files


@pytest.mark.parametrize(
    ("sizes", "source_shard"),
    [*itertools.product([(1, 2, 1), (1, 1, 2), (2, 1, 1)], ["1GB", "48KB"]), ((2, 2, 2), "48KB")],
    ids=str,
)
def test_sharded_export_is_complete(pool, folders, tmp_path, sizes, source_shard):
    """T19A: an index that lists each key once; the weights are those of the mesh to the last bit."""
    config, folder = mesh(*sizes), folders(shard=source_shard)
    assert len(list(Path(folder).glob("*.safetensors"))) == (1 if source_shard == "1GB" else 4)
    results = pool.run(world(config), jobs.export, config, folder, whole_batch(4, 16), str(tmp_path), [None], "40KB")
    tensors, files = read_export(tmp_path / "None")
    assert len(files) >= 4
    assert len(tensors) == 39
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "None", output_loading_info=True)
    assert not any(info.values())
    gathered = folders.model()
    before = {n: t.clone() for n, t in gathered.state_dict().items()}
    gathered.load_state_dict(results[0]["params"])
    ids = whole_batch(4, 16)["input_ids"]
    with torch.no_grad():
        assert torch.equal(loaded(ids, use_cache=False).logits, gathered(ids, use_cache=False).logits)
    gathered.load_state_dict(before)
    assert any(not torch.equal(before[n], t) for n, t in tensors.items()), "the step before the export is lost"


def test_export_has_the_dtype_that_was_asked_for(pool, folders, tmp_path):
    """T19C: master weights written as they are take twice the space that config.json promises."""
    config = mesh(1, 2, 1, compute_dtype="bfloat16")
    wanted = {"bfloat16": 82496, "float32": 164992}
    results = pool.run(2, jobs.export, config, folders(), whole_batch(4, 16), str(tmp_path), list(wanted), "1GB")
    for dtype, size in wanted.items():
        tensors, _ = read_export(tmp_path / dtype)
        assert sum(t.nbytes for t in tensors.values()) == size
        assert {str(t.dtype) for t in tensors.values()} == {f"torch.{dtype}"}
        assert AutoConfig.from_pretrained(tmp_path / dtype).dtype == getattr(torch, dtype)
    assert all(result["dtypes"] == {torch.float32} for result in results)


@pytest.mark.parametrize("wrapped", ["compiled", "full", "selective"])
@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_names_are_those_of_the_source(pool, folders, tmp_path, family, wrapped):
    """T26A: torch.compile and checkpoint wrappers leave their prefix in the keys."""
    compiled = wrapped == "compiled"
    config = mesh(1, 2, 1, activation_checkpoint="none" if compiled else wrapped)
    want = [name for name, _ in folders.model(family).named_parameters()]
    batch, out = whole_batch(4, 16), str(tmp_path)
    results = pool.run(2, jobs.export, config, folders(family), batch, out, [None], "1GB", compiled)
    assert all(result["names"] == result["state"] == want for result in results)
    tensors, _ = read_export(tmp_path / "None")
    assert set(tensors) == set(want)
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "None", output_loading_info=True)
    assert not any(info.values())


# Loading


MEMORY_CAP = 240 << 20
BIG = dict(vocab_size=32000, hidden_size=512, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=8)
BIG |= dict(num_key_value_heads=8, initializer_range=0.02)


@pytest.fixture(scope="module")
def big_folder(tmp_path_factory) -> str:
    """66.3 M parameters, 265 MB in float32, in at least 4 files."""
    path = tmp_path_factory.mktemp("big")
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **{**LLAMA, **BIG}))
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(66.3e6, rel=0.01)
    model.save_pretrained(path, max_shard_size="70MB")
    assert len(list(path.glob("*.safetensors"))) >= 4
    return str(path)


@pytest.fixture(scope="module")
def fresh_pool():
    """Processes that have run nothing yet: memory that earlier jobs freed would hide what loading takes."""
    workers = WorkerPool(2)
    yield workers
    workers.close()


@pytest.mark.parametrize("sizes", [(1, 1, 2), (1, 2, 1), (2, 1, 1)], ids=str)
def test_no_rank_holds_the_whole_model_while_loading(fresh_pool, folders, big_folder, sizes):
    """T20A, T21A: half of 265 MB and the largest tensor, 66 MB, with slack."""
    results = fresh_pool.run(2, jobs.memory_while_loading, mesh(*sizes), folders(), big_folder)
    for result in results:
        assert result["peak"] <= MEMORY_CAP, f"{result['peak'] / 1e6:.0f} MB"
        assert result["peak"] >= 50 << 20, "the sampler saw nothing"
        assert result["wrong"] == []


@pytest.mark.parametrize("rope", [None, LLAMA3_ROPE], ids=["default-rope", "llama3-rope"])
@pytest.mark.parametrize("sizes", [(1, 2, 1), (1, 1, 2), (2, 1, 1), (2, 1, 2)], ids=str)
def test_buffers_are_computed_and_not_left_empty(pool, folders, sizes, rope):
    """T22A: RoPE frequencies are in no file; left zero they give loss 4.7609 and no error."""
    config, changes, batch = mesh(*sizes), dict(rope_parameters=rope) if rope else {}, whole_batch(4, 16)
    reference = folders.model(**changes)
    want = dict(reference.named_buffers())
    with torch.no_grad():
        loss = models.reference_loss(reference, batch).item()
    if rope is None:
        assert loss == pytest.approx(4.5619, abs=5e-5)
    for result in pool.run(world(config), jobs.buffers, config, folders(**changes), batch):
        assert set(result["buffers"]) == set(want)
        assert all(torch.equal(buffer, want[name]) for name, buffer in result["buffers"].items())
        assert result["loss"] == pytest.approx(loss, abs=1e-5)


@pytest.mark.parametrize("sizes", [(1, 2, 1), (1, 1, 2), (2, 1, 1)], ids=str)
def test_a_truncated_file_is_named_by_every_rank(pool, tmp_path, sizes):
    """T35A: also by ranks that do not read it."""
    config, folders = mesh(*sizes), Folders(tmp_path)
    files = sorted(Path(folders(shard="48KB")).glob("*.safetensors"))
    assert len(files) == 4
    files[1].write_bytes(files[1].read_bytes()[:-1000])
    for message in pool.run(world(config), jobs.refusal, config, folders(shard="48KB")):
        assert message.startswith("ValueError")
        assert files[1].name in message
        assert "cut short" in message


# Dtypes


@pytest.mark.parametrize("sizes", [(1, 2, 1), (2, 1, 1)], ids=str)
def test_weights_from_a_bfloat16_folder_are_trained_in_float32(pool, folders, sizes):
    """T23A: small updates vanish in bfloat16 weights; there 12 % of the values change."""
    config, batches = mesh(*sizes, compute_dtype="bfloat16"), [whole_batch(4, 16)] * 5
    folder = folders(dtype=torch.bfloat16)
    results = pool.run(world(config), jobs.optimize, config, folder, batches, optimizer="AdamW", lr=1e-4)
    assert all(result["state_dtypes"] == {torch.float32} for result in results)
    name = "model.layers.0.mlp.up_proj.weight"
    before, after = folders.model(dtype=torch.bfloat16).get_parameter(name), results[0]["params"][name]
    assert after.dtype == torch.float32
    assert (after != before).float().mean() >= 0.95


def test_norm_gradients_are_summed_over_tp_in_float32(pool, folders):
    """T24A: a sum of two bfloat16 values that is exactly bfloat16 everywhere was rounded on the way."""
    config = mesh(1, 1, 2, compute_dtype="bfloat16", reduce_dtype="float32")
    grad = pool.run(2, jobs.train, config, folders(), [whole_batch(2, 8)])[0]["grads"]
    grad = grad["model.layers.0.input_layernorm.weight"]
    assert (grad == grad.bfloat16().float()).float().mean() < 0.9


# Frozen parameters


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("sizes", [(1, 1, 2), (1, 2, 2), (2, 1, 1)], ids=str)
def test_frozen_parameters_stay_frozen(pool, folders, sizes, when):
    """T27A: new parameters made for the shards must not become trainable."""
    config, batches = mesh(*sizes), [whole_batch(4, 16, seed) for seed in (1, 2, 3)]
    _, grads = models.reference(folders.model(), batches[0])
    results = pool.run(world(config), jobs.train_the_head_only, config, folders(), batches, when)
    assert set().union(*(result["trainable"] for result in results)) == {"lm_head.weight"}
    got = {n: g for n, g in results[0]["grads"].items() if n == "lm_head.weight" or g.any()}
    assert_gradients_close(got, {"lm_head.weight": grads["lm_head.weight"]})
    source = folders.model().state_dict()
    for name, param in results[0]["params"].items():
        assert torch.equal(param, source[name]) == (name != "lm_head.weight")


# Meshes


@pytest.mark.parametrize("sizes", [(2, 1, 2), (1, 2, 2), (2, 2, 1)], ids=str)
def test_a_callers_mesh_is_used(pool, folders, sizes):
    """transformers drops the mesh it is given and builds its own."""
    batch = whole_batch(4, 16)
    results = pool.run(math.prod(sizes), jobs.callers_mesh, sizes, folders(), batch)
    for result in results:
        assert result["same"]
        assert result["sizes"] == sizes
        assert result["loss"] == pytest.approx(4.5619, abs=5e-5)
    assert_gradients_close(results[0]["grads"], models.reference(folders.model(), batch)[1])


@pytest.mark.parametrize(
    ("ranks", "names", "words"),
    [
        ([0, 1], ("tp_only",), ("tp_only", "'pp', 'dp', 'tp'")),
        ([[[0], [1]]], ("dp", "pp", "tp"), ("'dp', 'pp', 'tp'",)),
        ([[[1, 0]]], ("pp", "dp", "tp"), ("ascending", "[[[1, 0]]]")),
    ],
    ids=["other-names", "other-order", "unsorted-ranks"],
)
def test_a_mesh_that_cannot_be_used_is_refused(pool, folders, ranks, names, words):
    """Unsorted ranks: torch sorts a group's ranks, so slices would be exchanged silently."""
    for message in pool.run(2, jobs.mesh_refused, folders(), ranks, names):
        assert all(word in message for word in words)
