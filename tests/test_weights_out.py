"""Random weights, and weights out: the directories transformers would write, from one tensor at a time."""

import copy
import json
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from transformers import AutoTokenizer, GPT2Config, LlamaForCausalLM, PreTrainedTokenizerFast

from meshpar.weights_in import RandomSource, SafetensorsSource
from meshpar.weights_out import write_pretrained
from tests.weight_files import (
    INDEX,
    built,
    entries_of,
    llama_config,
    on_meta,
    qwen2_config,
    reloaded,
    saved,
    tensors_of,
)

CONFIGS = {
    "llama": llama_config(),
    "tied": llama_config(tie_word_embeddings=True),
    "qwen2": qwen2_config(),
}


def write(path: Path, model, dtype=torch.float32, **settings) -> Path:
    settings = {"config": model.config, "generation_config": model.generation_config, **settings}
    write_pretrained(path, entries_of(model, dtype), tensors_of(model), **settings)
    return path


def files_of(path: Path) -> dict[str, list[str]]:
    """Weight file -> the names it holds, in order."""
    held = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            held[file.name] = list(opened.keys())
    return held


def same_weights(left, right) -> bool:
    left, right = left.state_dict(), right.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


# ---- random weights ----


def test_random_weights_depend_on_seed_and_name_alone():
    model = on_meta(llama_config())
    whole = {name: RandomSource(model).read(name) for name in model.state_dict()}
    source = RandomSource(model)
    before = torch.get_rng_state()
    for name in reversed(whole):
        index = (slice(1, None),)
        assert torch.equal(source.read(name, index), whole[name][index])
    assert torch.equal(torch.get_rng_state(), before)
    assert source.bytes_read == sum(tensor[1:].nbytes for tensor in whole.values())
    assert not torch.equal(RandomSource(model, seed=1).read("lm_head.weight"), whole["lm_head.weight"])
    deeper = RandomSource(on_meta(llama_config(num_hidden_layers=5)))
    assert torch.equal(deeper.read("lm_head.weight"), whole["lm_head.weight"])


def test_random_matrices_differ_and_have_the_std_of_the_config():
    source = RandomSource(on_meta(llama_config(initializer_range=0.3)))
    matrices = [source.read(name) for name in sorted(source.names) if "norm" not in name]
    assert len({matrix.sum().item() for matrix in matrices}) == len(matrices) == 30
    for matrix in matrices:
        assert matrix.dtype == torch.float32
        assert matrix.std().item() == pytest.approx(0.3, rel=0.1)
        assert matrix.mean().item() == pytest.approx(0, abs=0.04)


def test_random_norms_are_ones_biases_zeros_and_the_padding_row_zero():
    source = RandomSource(on_meta(qwen2_config(pad_token_id=5)))
    assert all((source.read(name) == 1).all() for name in source.names if "norm" in name)
    biases = [name for name in source.names if name.endswith("bias")]
    assert len(biases) == 12
    assert not any(source.read(name).any() for name in biases)
    embedding = source.read("model.embed_tokens.weight")
    assert not embedding[5].any()
    assert embedding[4].all()


def test_random_tied_names_are_one_tensor():
    source = RandomSource(on_meta(llama_config(tie_word_embeddings=True)))
    assert torch.equal(source.read("lm_head.weight"), source.read("model.embed_tokens.weight"))


def test_random_weights_that_an_outer_module_rescales_are_rescaled():
    source = RandomSource(on_meta(GPT2Config(n_embd=64, n_layer=8, n_head=4, vocab_size=64, n_positions=32)))
    assert source.read("transformer.h.3.mlp.c_fc.weight").std().item() == pytest.approx(0.02, rel=0.1)
    assert source.read("transformer.h.3.mlp.c_proj.weight").std().item() == pytest.approx(0.02 / 4, rel=0.1)


class WithGate(LlamaForCausalLM):
    """A model with a parameter that no initialiser knows, and a persistent buffer."""

    def __init__(self, config):
        super().__init__(config)
        self.gate = nn.Parameter(torch.ones(3))
        self.register_buffer("scale", torch.arange(3.0, device="cpu"))


def test_random_source_leaves_the_model_alone_and_never_hands_out_unset_memory():
    with torch.device("meta"):
        model = WithGate(llama_config())
    parameters = dict(model.named_parameters())
    source = RandomSource(model)
    with pytest.raises(ValueError, match="WithGate has no rule for random values of gate"):
        source.read("gate")
    assert source.read("scale", (slice(1, 3),)).tolist() == [1, 2]
    first = source.read("lm_head.weight")
    assert all(parameter is parameters[name] and parameter.is_meta for name, parameter in model.named_parameters())
    model.lm_head = None
    assert torch.equal(source.read("lm_head.weight"), first)
    assert source.shape("lm_head.weight") == (64, 32)
    with pytest.raises(KeyError, match="absent"):
        source.read("absent")
    with pytest.raises(ValueError, match="meta device"):
        RandomSource(built(llama_config()))


# ---- writing ----


@pytest.mark.parametrize("limit", ["1GB", "40KB", "10KB"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_directory_equals_the_one_of_save_pretrained(tmp_path, config, limit):
    model = built(config)
    theirs = saved(copy.deepcopy(model), tmp_path / "theirs", max_shard_size=limit)
    ours = write(tmp_path / "ours", model, max_shard_size=limit)
    assert {file.name for file in ours.iterdir()} == {file.name for file in theirs.iterdir()}
    assert files_of(ours) == files_of(theirs)
    for file in theirs.glob("*.json"):
        assert json.loads((ours / file.name).read_text()) == json.loads(file.read_text()), file.name
    assert same_weights(reloaded(ours), model)


def test_what_is_written_is_read_back_bit_equal(tmp_path):
    model = built(llama_config(), torch.bfloat16)
    source = SafetensorsSource(write(tmp_path, model, torch.bfloat16, max_shard_size="40KB"))
    assert source.names == set(model.state_dict())
    assert all(torch.equal(source.read(name), tensor) for name, tensor in model.state_dict().items())


def test_shard_limit_holds_and_the_index_lists_each_key_once(tmp_path):
    path = write(tmp_path, built(llama_config()), max_shard_size="40 kB")
    index, files = json.loads((path / INDEX).read_text()), files_of(path)
    assert len(files) >= 4
    assert index["metadata"] == {"total_size": 164_992, "total_parameters": 41_248}
    assert index["weight_map"] == {name: file for file, names in files.items() for name in names}
    assert len(index["weight_map"]) == sum(map(len, files.values())) == 39
    assert all(file.stat().st_size < 40_000 + 4_000 for file in path.glob("*.safetensors"))


@pytest.mark.parametrize(("before", "after"), [("50KB", "1GB"), ("1GB", "40KB"), ("40KB", "50KB")])
def test_files_of_an_earlier_save_are_removed(tmp_path, before, after):
    write(tmp_path, built(llama_config(initializer_range=0.1)), max_shard_size=before)
    model = built(llama_config())
    alone = write(tmp_path / "alone", model, max_shard_size=after)
    write(tmp_path, model, max_shard_size=after)
    assert {file.name for file in tmp_path.iterdir()} - {"alone"} == {file.name for file in alone.iterdir()}
    assert same_weights(reloaded(tmp_path), model)


@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 82_496), (torch.float32, 164_992)], ids=str)
def test_export_has_the_dtype_asked_for(tmp_path, dtype, size):
    model = built(llama_config())
    config = copy.deepcopy(model.config)
    source = SafetensorsSource(write(tmp_path, model, dtype))
    assert sum(source.read(name).nbytes for name in source.names) == source.bytes_read == size
    assert {source.read(name).dtype for name in source.names} == {dtype}
    loaded = reloaded(tmp_path)
    assert loaded.dtype == dtype
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight.to(dtype))
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    assert model.dtype == torch.float32
    assert model.config.to_dict() == config.to_dict()


def test_config_names_the_class_that_was_written(tmp_path):
    config = llama_config()
    config.architectures = ["LlamaModel"]
    write(tmp_path, built(llama_config()), config=config, generation_config=None)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert not (tmp_path / "generation_config.json").exists()


def test_generation_settings_that_transformers_refuses_to_save_do_not_stop_the_save(tmp_path):
    model = built(llama_config())
    model.generation_config.temperature = 0.5
    with pytest.raises(ValueError, match="temperature"):
        model.generation_config.save_pretrained(tmp_path)
    write(tmp_path / "out", model)
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["temperature"] == 0.5


def test_tokenizer_comes_along_if_there_is_one(tmp_path):
    vocabulary = {"<unk>": 0, "hello": 1, "world": 2}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(vocabulary, "<unk>")),
        unk_token="<unk>",
        chat_template="{{ messages }}",
    )
    tokenizer.save_pretrained(tmp_path / "source")
    model = built(llama_config())
    write(tmp_path / "out", model, tokenizer_source=tmp_path / "source")
    copied = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert copied.get_vocab() == vocabulary
    assert copied.chat_template == "{{ messages }}"
    bare = write(tmp_path / "bare", model)
    write(tmp_path / "none", model, tokenizer_source=bare)
    assert not list((tmp_path / "none").glob("*token*"))


def test_writer_holds_one_shard_and_one_tensor(tmp_path):
    rows, limit, alive = 256, 4 * 256 * 1024, set()

    def tensors():
        for name, *_ in entries:
            array = np.zeros((rows, 256), np.float32)
            alive.add(name)
            assert len(alive) <= 4
            weakref.finalize(array, alive.remove, name)
            yield name, torch.from_numpy(array)
            del array

    entries = [(f"t{number}", (rows, 256), torch.float32) for number in range(21)]
    write_pretrained(tmp_path, entries, tensors(), config=llama_config(), max_shard_size=limit)
    assert len(files_of(tmp_path)) == 6
    assert not alive


def test_part_of_a_larger_tensor_is_written_as_its_own(tmp_path):
    whole = torch.arange(48.0).view(6, 8)
    parts = {"top": whole[:3], "bottom": whole[3:], "left": whole[:, :4]}
    entries = [(name, part.shape, torch.float32) for name, part in parts.items()]
    write_pretrained(tmp_path, entries, iter(parts.items()), config=llama_config())
    source = SafetensorsSource(tmp_path)
    assert all(torch.equal(source.read(name), part) for name, part in parts.items())


def test_ranks_that_do_not_write_run_through_all_tensors(tmp_path):
    model, seen = built(llama_config()), []
    nothing = ((seen.append(name) or name, None) for name, _ in tensors_of(model))
    write_pretrained(tmp_path / "out", entries_of(model), nothing, config=model.config, is_writer=False)
    assert len(seen) == 39
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda pairs: pairs[:-1], "nothing came where lm_head.weight was due"),
        (lambda pairs: [*pairs, ("extra", torch.zeros(1))], "extra came after the last"),
        (lambda pairs: [pairs[1], pairs[0], *pairs[2:]], "came where model.embed_tokens.weight was due"),
        (lambda pairs: [(pairs[0][0], pairs[0][1].T), *pairs[1:]], r"shape \(64, 32\), but shape \(32, 64\)"),
        (lambda pairs: [(pairs[0][0], None), *pairs[1:]], "but no tensor arrived"),
    ],
    ids=["missing", "surplus", "order", "shape", "none"],
)
def test_failed_save_raises_and_leaves_the_earlier_one_whole(tmp_path, change, message):
    model = built(llama_config())
    write(tmp_path, model, max_shard_size="40KB")
    other = built(llama_config(initializer_range=0.1))
    pairs = change(list(tensors_of(other)))
    with pytest.raises(RuntimeError, match=message):
        write_pretrained(tmp_path, entries_of(other), iter(pairs), config=other.config, max_shard_size="50KB")
    assert same_weights(reloaded(tmp_path), model)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_left_overs_of_a_killed_save_go_with_the_next(tmp_path):
    leftover = tmp_path / ".unfinished-save-abc"
    leftover.mkdir()
    (leftover / "model.safetensors").write_bytes(b"half")
    write(tmp_path, built(llama_config()))
    assert not leftover.exists()


def test_a_name_twice_is_refused(tmp_path):
    entries = [("a", (1,), torch.float32)] * 2
    with pytest.raises(RuntimeError, match="names one twice"):
        write_pretrained(tmp_path, entries, iter([("a", torch.zeros(1))] * 2), config=llama_config())
