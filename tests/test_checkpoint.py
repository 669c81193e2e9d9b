"""Checkpoints: the same state on any mesh, exact continuation, complete or not there, refused where they do not fit."""

import json
import logging
import os
import pickle
import re
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM

from meshpar import checkpoint
from meshpar.checkpoint_files import CheckpointError, check_contents, read_manifest, reading, remove
from meshpar.pieces import StoredTensors
from tests import jobs_train as jobs
from tests.workspace import run_python

ONE, DP2, TP2, PP2 = {"dp_shard": 1}, {"dp_shard": 2}, {"dp_shard": 1, "tp": 2}, {"dp_shard": 1, "pp": 2}
DP2_TP2, PP2_TP2 = {"dp_shard": 2, "tp": 2}, {"dp_shard": 1, "pp": 2, "tp": 2}
HSDP, TP4 = {"dp_replicate": 2, "dp_shard": 2}, {"dp_shard": 1, "tp": 4}
ZBV = {"dp_shard": 1, "pp": 2, "schedule": "ZBVZeroBubble", "virtual_stages": 2}
PP2_DP2 = {"dp_shard": 2, "pp": 2}


def world(config):
    sizes = [config.get(name, 1) for name in ("pp", "dp_replicate", "dp_shard", "tp")]
    return sizes[0] * sizes[1] * sizes[2] * sizes[3]


def label(value):
    return "-".join(f"{k}{v}" for k, v in value.items()) if isinstance(value, dict) else None


def assert_equal_tensors(left, right):
    assert left.keys() == right.keys()
    different = [name for name in left if not torch.equal(left[name], right[name])]
    assert not different


def assert_whole(path):
    check_contents(path, read_manifest(path)["files"])


# (saved on, model, loaded on)
RESHARDED = [
    (DP2_TP2, {}, [ONE, TP2, DP2, PP2]),  # T18A
    (PP2_TP2, {"tie_word_embeddings": True}, [PP2_TP2, ONE]),
    (ZBV, {}, [PP2]),
    (TP4, {}, [PP2_TP2]),  # 2 kv heads on 4 ranks
    (HSDP, {"vocab_size": 97, "intermediate_size": 63}, [TP4]),
    (ONE, {"num_hidden_layers": 5}, [PP2_DP2]),
    (DP2_TP2, {"family": "phi3"}, [TP4, PP2_TP2]),  # query, key and value in one matrix, kv heads on two ranks each
    (DP2_TP2, {"family": "mixtral", "num_local_experts": 4, "intermediate_size": 52}, [ONE, PP2_TP2]),
]


@pytest.mark.parametrize(("saved_on", "changes", "loaded_on"), RESHARDED, ids=label)
def test_state_is_bit_equal_on_other_meshes_and_training_goes_on(pool, tmp_path, saved_on, changes, loaded_on):
    directory = tmp_path / "step-3"
    there = pool.run(world(saved_on), jobs.save_and_go_on, saved_on, changes, str(directory))
    for config in loaded_on:
        here = pool.run(world(config), jobs.load_and_go_on, config, changes, str(directory))
        for kind in ("param", "exp_avg", "exp_avg_sq"):
            assert_equal_tensors(here[0]["state"][kind], there[0]["state"][kind])
        assert {count for rank in here for count in rank["state"]["step"].values()} == {3.0}
        assert here[0]["extra"] == {"step": 3, "seed": 7}
        if config == saved_on:
            assert here[0]["after"] == there[0]["after"]
            assert_equal_tensors(here[0]["end"], there[0]["end"])
        else:
            torch.testing.assert_close(here[0]["after"], there[0]["after"], rtol=2e-6, atol=1e-6)


def test_what_ranks_hold_in_common_is_written_once(pool, tmp_path):
    changes = {"tie_word_embeddings": True}
    config = {"pp": 2, "dp_replicate": 2, "dp_shard": 1}
    pool.run(4, jobs.save_and_go_on, config, changes, str(tmp_path / "step-3"))
    metadata = FileSystemReader(tmp_path / "step-3").read_metadata()
    described = sum(info.length for info in metadata.storage_data.values())
    written = sum(file.stat().st_size for file in (tmp_path / "step-3").glob("*.distcp"))
    assert written == described
    names = {name for name in metadata.state_dict_metadata if name.startswith("param.")}
    assert "param.lm_head.weight" not in names
    for name in names:
        stored = metadata.state_dict_metadata[name]
        assert sum(chunk.sizes.numel() for chunk in stored.chunks) == stored.size.numel()


def test_background_save_holds_the_state_of_its_step(pool, tmp_path):
    pool.run(2, jobs.save_and_go_on, DP2, {}, str(tmp_path / "now"))
    pool.run(2, jobs.save_and_go_on, DP2, {}, str(tmp_path / "later"), background=True)
    now, later, earlier = (StoredTensors(tmp_path / name) for name in ("now", "later", "later-earlier"))
    assert now.entries() == later.entries() == earlier.entries()
    assert all(torch.equal(now.read(name), later.read(name)) for name in now.entries())
    step = next(name for name in now.entries() if name.endswith(".step"))
    assert (earlier.read(step), later.read(step)) == (2.0, 3.0), "the second save does not write into the first"


@pytest.mark.parametrize("config", [DP2, PP2], ids=label)
def test_learning_rates_continue(pool, tmp_path, config):  # T17A
    directory = str(tmp_path / "step")
    rates = [pool.run(2, jobs.learning_rates, config, directory, resume) for resume in (False, True)]
    for first, second in zip(*rates, strict=True):
        assert [*first, *second] == pytest.approx([0.01, 0.005, 0.01 / 3, 0.0025, 0.002, 0.01 / 6])


def test_every_rank_continues_its_own_random_numbers(pool, tmp_path):  # T17E
    run = partial(pool.run, 4, jobs.dropout_steps, PP2_TP2, str(tmp_path / "step-3"))
    undisturbed, first, second = run(False, 6), run(False, 3), run(True, 3)
    for whole, before, after in zip(undisturbed, first, second, strict=True):
        assert whole["steps"] == before["steps"] + after["steps"]
        assert all(torch.equal(a, b) for a, b in zip(whole["own"], after["own"], strict=True))


def test_another_mesh_is_seeded_alike_on_tp_peers_and_apart_on_others(pool, tmp_path):
    pool.run(1, jobs.save_and_go_on, ONE, {}, str(tmp_path / "step-3"))
    draws = pool.run(4, jobs.draws_after_load, DP2_TP2, str(tmp_path / "step-3"))
    assert draws[0::2] == draws[1::2]
    assert len(set(draws)) == 2


def test_data_rows_continue_on_another_dp_size(pool, tmp_path):  # T17C
    directory = str(tmp_path / "step-2")
    seen = {row for rank in pool.run(2, jobs.rows_seen, directory, 0, 2, DP2) for row in rank}
    for config in (ONE, {"dp_shard": 4}):
        rest = [row for rank in pool.run(world(config), jobs.rows_seen, directory, 2, 2, config) for row in rank]
        assert len(rest) == 8
        assert seen | set(rest) == set(range(3, 19))


@pytest.mark.parametrize("config", [DP2, PP2], ids=label)
def test_moments_are_float32_beside_float32_parameters_of_a_bfloat16_model(pool, config):  # T23A
    for dtypes, changed in pool.run(2, jobs.from_bfloat16, config):
        assert dtypes == {torch.float32}
        assert changed >= 0.95


# Complete or not there


@pytest.fixture(scope="module")
def saved(pool, tmp_path_factory):
    """A complete checkpoint of step 3, of (1, 2, 1)."""
    directory = tmp_path_factory.mktemp("saved") / "step-3"
    pool.run(2, jobs.save_and_go_on, DP2, {}, str(directory))
    return directory


def test_latest_takes_the_newest_complete_one_and_names_what_it_skips(saved, tmp_path, caplog):
    assert checkpoint.latest(tmp_path) is None
    assert checkpoint.latest(tmp_path / "nowhere") is None
    for name in ("step-3", "step-10", "step-12", "step-20.superseded"):
        shutil.copytree(saved, tmp_path / name)
    (tmp_path / "step-12" / "meshpar.json").write_text('{"format": 1')
    shutil.copytree(saved, tmp_path / "step-13")
    (tmp_path / "step-13" / "meshpar.json").unlink()
    (tmp_path / "step-14.tmp").mkdir()
    with caplog.at_level(logging.WARNING):
        assert checkpoint.latest(tmp_path) == tmp_path / "step-10"
    assert [record.getMessage().rpartition("step-")[2].split(" ")[0] for record in caplog.records] == [
        "14.tmp",
        "13",
        "12/meshpar.json",
    ]


def test_a_save_replaces_leftovers_and_an_older_save_of_its_step(pool, saved, tmp_path):  # T34A
    leftover = tmp_path / "step-3.tmp"
    shutil.copytree(saved, leftover)
    (leftover / "meshpar.json").unlink()
    (leftover / "__0_0.distcp").write_bytes(b"half")
    shutil.copytree(saved, tmp_path / "step-3")
    (tmp_path / "step-3" / "of the older one").touch()
    pool.run(2, jobs.save_and_go_on, DP2, {}, str(tmp_path / "step-3"))
    assert [path.name for path in tmp_path.iterdir()] == ["step-3"]
    assert {p.name for p in (tmp_path / "step-3").iterdir()} == {p.name for p in saved.iterdir()}
    old, new = StoredTensors(saved), StoredTensors(tmp_path / "step-3")
    assert all(torch.equal(old.read(name), new.read(name)) for name in old.entries() if name.startswith("param."))


def test_a_save_that_one_rank_cannot_write_is_reported_on_every_rank(pool, saved, tmp_path):
    shutil.copytree(saved, tmp_path / "step-3")
    cause = f"could not write {tmp_path / 'step-3.tmp'}: OSError on rank 1: [Errno 27] File too large"
    assert pool.run(2, jobs.failing_saves, DP2, str(tmp_path / "step-3")) == [[cause] * 2] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["step-3"]
    assert_whole(tmp_path / "step-3")


def test_a_state_that_one_rank_cannot_save_is_refused_on_every_rank(pool, tmp_path):
    messages = pool.run(2, jobs.unsavable_on_one_rank, DP2, str(tmp_path / "step-1"))
    assert (
        messages
        == ["optim.model.embed_tokens.weight.odd is neither a number in a tensor nor shaped like its parameter"] * 2
    )
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_is_not_removed_while_it_is_read(saved, tmp_path):
    path = shutil.copytree(saved, tmp_path / "step-3")
    with reading(path):
        with pytest.raises(BlockingIOError):
            remove(path)
        assert_whole(path)
    remove(path)
    assert not path.exists()


# Refused


def test_checkpoint_of_another_model_is_refused_by_name(pool, saved):
    (message,) = pool.run(1, jobs.refused, ONE, str(saved), {"num_hidden_layers": 3, "vocab_size": 97})
    assert "parameters the model lacks: model.layers.3." in message
    assert "model.embed_tokens.weight (96, 32) there, (97, 32) here" in message


def test_checkpoint_of_another_dtype_is_refused(pool, saved):
    (message,) = pool.run(1, jobs.refused, {**ONE, "param_dtype": "bfloat16"}, str(saved))
    assert "parameters stored in float32 there, bfloat16 here" in message


def test_checkpoint_of_other_parameter_groups_is_refused(pool, saved):
    messages = pool.run(2, jobs.refused, PP2, str(saved), one_group=True)
    assert all("2 parameter groups there, 1 in the optimizer" in message for message in messages)


def test_incomplete_and_unknown_checkpoints_are_refused(saved, tmp_path):
    with pytest.raises(ValueError, match=r"no complete checkpoint: it has no meshpar\.json"):
        checkpoint.read_manifest(tmp_path)
    manifest = json.loads((saved / "meshpar.json").read_text())
    (tmp_path / "meshpar.json").write_text(json.dumps(manifest | {"format": 1}))
    with pytest.raises(ValueError, match="has format 1; this version reads format 2"):
        checkpoint.read_manifest(tmp_path)
    with pytest.raises(ValueError, match="format 1"):
        checkpoint.export(tmp_path, tmp_path / "out")


def truncate(path):
    os.truncate(path, path.stat().st_size - 1)


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def say_another_step(path):
    text = path.read_text()
    assert '"step": 3' in text
    path.write_text(text.replace('"step": 3', '"step": 2'))


DAMAGE = [
    ("__1_0.distcp", truncate, r"__1_0\.distcp is damaged: it has \d+ bytes of the \d+ that were written"),
    ("__0_0.distcp", Path.unlink, r"is no complete checkpoint: __0_0\.distcp is missing"),
    ("__1_0.distcp", flip, r"__1_0\.distcp is damaged: it does not have the checksum it was written with"),
    (".metadata", flip, r"\.metadata is damaged: it does not have the checksum it was written with"),
    ("config.json", flip, r"config\.json is damaged: it does not have the checksum it was written with"),
    (
        "meshpar.json",
        say_another_step,
        r"meshpar\.json is damaged: its content does not have the checksum that it states",
    ),
]


@pytest.mark.parametrize(("file", "damage", "message"), DAMAGE, ids=[f"{d.__name__}-{f}" for f, d, _ in DAMAGE])
def test_a_damaged_checkpoint_is_refused_on_every_rank_before_anything_changes(
    pool, saved, tmp_path, file, damage, message
):
    shutil.copytree(saved, tmp_path / "step-3")
    damage(tmp_path / "step-3" / file)
    messages = pool.run(2, jobs.refused, PP2, str(tmp_path / "step-3"))
    assert messages[0] == messages[1]
    assert re.search(message, messages[0])
    with pytest.raises(CheckpointError, match=message):
        checkpoint.export(tmp_path / "step-3", tmp_path / "out")
    assert not (tmp_path / "out").exists()


class RunsCode:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


def test_an_index_that_would_run_code_or_leads_elsewhere_is_refused(saved, tmp_path):
    path = shutil.copytree(saved, tmp_path / "step-3") / ".metadata"
    path.write_bytes(pickle.dumps(RunsCode(tmp_path / "ran")))
    with pytest.raises(
        CheckpointError, match=r"damaged: it holds pathlib\.Path\.touch, which is no part of DCP's index"
    ):
        StoredTensors(path.parent)
    assert not (tmp_path / "ran").exists()
    index = pickle.loads((saved / ".metadata").read_bytes())
    for stored in index.storage_data.values():
        stored.relative_path = f"../{stored.relative_path}"
    path.write_bytes(pickle.dumps(index))
    with pytest.raises(CheckpointError, match=r"names '\.\./__._0\.distcp', which is outside its directory"):
        StoredTensors(path.parent)


# Out of a checkpoint


@pytest.mark.parametrize(
    ("config", "changes"),
    [(TP4, {"vocab_size": 97}), (PP2_TP2, {"tie_word_embeddings": True})],
    ids=label,
)
def test_export_in_one_process_is_what_save_pretrained_writes(pool, tmp_path, config, changes):
    step, gathered, exported = tmp_path / "step-1", tmp_path / "gathered", tmp_path / "exported"
    pool.run(4, jobs.save_and_export, config, changes, str(step), str(gathered))
    checkpoint.export(step, exported)
    assert {p.name for p in exported.iterdir()} == {p.name for p in gathered.iterdir()}
    for path in gathered.iterdir():
        assert (exported / path.name).read_bytes() == path.read_bytes()
    _, info = AutoModelForCausalLM.from_pretrained(exported, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))


EXPORT = """
import sys
from pathlib import Path
from transformers.models.llama import modeling_llama
from meshpar import checkpoint

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024

before = peak()
checkpoint.export(sys.argv[1], sys.argv[2], max_shard_size=int(sys.argv[3]))
print(peak() - before)
"""


def test_export_holds_one_file_and_two_tensors_at_most(pool, tmp_path):
    sizes = dict(hidden_size=512, intermediate_size=2048, num_hidden_layers=16, vocab_size=8192)
    largest, shard, others = 8192 * 512 * 4, 80_000_000, 30_000_000  # bytes; others: of modules that it imports
    pool.run(2, jobs.save_random, sizes, str(tmp_path / "step-0"))
    done = run_python("-c", EXPORT, str(tmp_path / "step-0"), str(tmp_path / "out"), str(shard))
    assert done.returncode == 0, done.stderr
    assert sum(path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors")) > 3 * shard
    assert int(done.stdout.splitlines()[-1]) < shard + 2 * largest + others
