"""Weights in: parity with transformers' own loading, and clear ends for damaged or foreign files."""

import json
import random
import shutil
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaModel

from meshpar.weights_in import (
    SafetensorsSource,
    StateDictSource,
    check_names,
    check_shapes,
    check_tied,
    resolve_prefix,
)
from tests.weight_files import INDEX, built, llama_config, on_meta, qwen2_config, saved

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def random_index(shape, numbers: random.Random) -> tuple[slice, ...]:
    spans = [sorted(numbers.choices(range(size + 1), k=2)) for size in shape]
    return tuple(slice(*span) for span in spans[: numbers.randint(1, len(shape))])


# ---- reading ----


@pytest.mark.parametrize("shard", ["50GB", "20KB"], ids=["single", "sharded"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("config", [llama_config(), qwen2_config()], ids=["llama", "qwen2"])
def test_slices_equal_from_pretrained(tmp_path, config, dtype, shard):
    path = saved(built(config, dtype), tmp_path, max_shard_size=shard)
    expected = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).state_dict()
    source, numbers, read = SafetensorsSource(path), random.Random(0), 0
    assert source.names == set(expected)
    for name, tensor in expected.items():
        assert source.shape(name) == tensor.shape
        for index in [None, *(random_index(tensor.shape, numbers) for _ in range(3))]:
            part = source.read(name, index)
            assert part.dtype == dtype
            assert part.is_contiguous()
            assert torch.equal(part, tensor if index is None else tensor[index])
            read += part.nbytes
    assert source.bytes_read == read


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_widened_slices_are_the_same_numbers(tmp_path, dtype):
    path = saved(built(llama_config(), dtype), tmp_path)
    plain, wide = SafetensorsSource(path), SafetensorsSource(path, widen=True)
    for name in plain.names:
        for index in (None, (slice(1, 5),), (slice(None), slice(2, 7))[: len(plain.shape(name))]):
            part = wide.read(name, index)
            assert part.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
            assert part.is_contiguous()
            assert torch.equal(part, plain.read(name, index).to(part.dtype))
    assert wide.bytes_read == plain.bytes_read


def test_what_was_read_outlives_the_file(tmp_path):
    model = built(llama_config())
    source = SafetensorsSource(saved(model, tmp_path))
    rows = source.read("lm_head.weight", (slice(8, 16),))
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(0)
    assert torch.equal(rows, model.lm_head.weight[8:16])


def test_scalars_and_empty_tensors_can_be_read(tmp_path):
    save_file({"s": torch.tensor(3.0), "e": torch.zeros(0, 4)}, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path)
    assert source.read("s").item() == 3.0
    assert source.read("e", (slice(0, 0), slice(1, 3))).shape == (0, 2)
    with pytest.raises(KeyError, match="absent"):
        source.read("absent")


@pytest.mark.parametrize("config", [llama_config(), llama_config(tie_word_embeddings=True)], ids=["own", "tied"])
def test_state_dict_source_hands_out_copies(config):
    model = built(config)
    source = StateDictSource(model)
    part = source.read("lm_head.weight", (slice(0, 4), slice(8, 24)))
    assert torch.equal(part, model.lm_head.weight[:4, 8:24])
    assert source.bytes_read == 4 * 16 * 4
    part.zero_()
    assert model.lm_head.weight[:4, 8:24].any()
    with pytest.raises(ValueError, match=r"meta device.* 39 in all"):
        StateDictSource(on_meta(llama_config()))


def test_hub_id_is_read_from_the_cache_offline(tmp_path, monkeypatch):
    repo = tmp_path / "models--some--model"
    model = built(llama_config())
    saved(model, repo / "blobs")
    snapshot = repo / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for file in (repo / "blobs").iterdir():
        (snapshot / file.name).symlink_to(file)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("abc")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert torch.equal(SafetensorsSource("some/model").read("lm_head.weight"), model.lm_head.weight)
    for absent in ("some/other", "no/such/directory", "/nowhere"):
        with pytest.raises(ValueError, match=f"^{absent} is no directory"):
            SafetensorsSource(absent)


# ---- damaged and unwanted files ----


@pytest.fixture(scope="module")
def four_shards(tmp_path_factory) -> Path:
    """The 41,248-parameter Llama in four files."""
    path = saved(built(llama_config()), tmp_path_factory.mktemp("four"), max_shard_size="50KB")
    assert len(list(path.glob("*.safetensors"))) == 4
    return path


@pytest.fixture
def copy_of_four(four_shards, tmp_path) -> Path:
    return Path(shutil.copytree(four_shards, tmp_path / "copy"))


def edit_index(path: Path, change) -> None:
    index = json.loads((path / INDEX).read_text())
    change(index["weight_map"])
    (path / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize("cut", [1000, None], ids=["data", "header"])
def test_truncated_shard_is_named_by_ranks_that_do_not_read_it(copy_of_four, cut):
    source = SafetensorsSource(copy_of_four)
    shard = copy_of_four / "model-00002-of-00004.safetensors"
    shard.write_bytes(shard.read_bytes()[: -cut if cut else 50])
    for open_again in (lambda: SafetensorsSource(copy_of_four), source.check):
        with pytest.raises(ValueError, match=r"model-00002-of-00004\.safetensors is cut short"):
            open_again()


def test_longer_file_is_named(copy_of_four):
    with (copy_of_four / "model-00003-of-00004.safetensors").open("ab") as file:
        file.write(b"\0" * 8)
    with pytest.raises(ValueError, match=r"model-00003-of-00004\.safetensors is longer"):
        SafetensorsSource(copy_of_four)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("../secret.safetensors", "outside its directory"),
        ("/etc/secret.safetensors", "outside its directory"),
        ("a/../../b.safetensors", "outside its directory"),
        ("..\\secret.safetensors", "outside its directory"),
        ("model-00009-of-00004.safetensors", "not there"),
        ("pytorch_model.bin", "no safetensors file"),
        ("model-00001-of-00004.safetensors", "does not hold it"),
        (7, "no safetensors file"),
    ],
)
def test_bad_index_entry_is_refused_by_name(copy_of_four, file, message):
    (copy_of_four.parent / "secret.safetensors").touch()
    edit_index(copy_of_four, lambda weight_map: weight_map.update({"lm_head.weight": file}))
    with pytest.raises(ValueError, match=rf"{INDEX}.*lm_head.weight.*{message}"):
        SafetensorsSource(copy_of_four)


def test_key_missing_in_its_file_is_named(copy_of_four):
    edit_index(copy_of_four, lambda weight_map: weight_map.update({"ghost.weight": weight_map["lm_head.weight"]}))
    with pytest.raises(ValueError, match=r"ghost.weight is in model-0000\d-of-00004.safetensors, which does not"):
        SafetensorsSource(copy_of_four)


def test_key_in_two_files_is_named(copy_of_four):
    first, last = (copy_of_four / f"model-0000{n}-of-00004.safetensors" for n in (1, 4))
    save_file({**load_file(first), "lm_head.weight": torch.zeros(2)}, first)
    with pytest.raises(ValueError, match=rf"lm_head.weight is in both {first.name} and {last.name}"):
        SafetensorsSource(copy_of_four)


def test_key_twice_in_the_index_is_named(copy_of_four):
    text = (copy_of_four / INDEX).read_text()
    (copy_of_four / INDEX).write_text(text.replace('"weight_map": {', '"weight_map": {"lm_head.weight": "a",'))
    with pytest.raises(ValueError, match=r"lm_head\.weight appears twice"):
        SafetensorsSource(copy_of_four)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"weight_map": []}', "[" * 100_000], ids=range(6))
def test_damaged_index_is_named(copy_of_four, text):
    (copy_of_four / INDEX).write_text(text)
    with pytest.raises(ValueError, match=INDEX):
        SafetensorsSource(copy_of_four)


def test_directories_without_safetensors_weights_say_what_to_do(four_shards, copy_of_four, tmp_path):
    with pytest.raises(ValueError, match="holds no safetensors weights"):
        SafetensorsSource(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ValueError, match=r"pickled weights only \(pytorch_model.bin\).*save_pretrained"):
        SafetensorsSource(tmp_path)
    (copy_of_four / INDEX).unlink()
    with pytest.raises(ValueError, match=f"neither model.safetensors nor {INDEX}"):
        SafetensorsSource(copy_of_four)
    with pytest.raises(ValueError, match="is a file"):
        SafetensorsSource(four_shards / "config.json")


def test_mutated_headers_are_read_or_refused_clearly(tmp_path):
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(4, 2), "b": torch.zeros(3, dtype=torch.int64)}, file)
    original, numbers, refused = file.read_bytes(), random.Random(0), 0
    for _ in range(400):
        mutated = bytearray(original)
        for _ in range(numbers.randint(1, 3)):
            mutated[numbers.randrange(len(mutated) - 56)] = numbers.randrange(256)
        file.write_bytes(mutated)
        try:
            source = SafetensorsSource(tmp_path)
            for name in source.names:
                assert source.read(name).shape == source.shape(name)
        except ValueError as error:
            refused += str(file) in str(error)
    assert refused > 300


# ---- names ----


def resolve(path: Path, model) -> dict[str, str]:
    return resolve_prefix(
        SafetensorsSource(path).names,
        model.state_dict().keys(),
        model.base_model_prefix,
        model.all_tied_weights_keys,
    )


def check(resolved: dict[str, str], model, ignored=()) -> None:
    check_names(resolved, model.state_dict().keys(), model.all_tied_weights_keys, "the model", ignored)


@pytest.mark.parametrize("tied", [True, False])
def test_bare_base_model_lacks_only_an_untied_head(tmp_path, tied):
    model = on_meta(llama_config(tie_word_embeddings=tied))
    torch.manual_seed(0)
    saved(LlamaModel(model.config), tmp_path)
    resolved = resolve(tmp_path, model)
    assert resolved["model.layers.1.mlp.up_proj.weight"] == "layers.1.mlp.up_proj.weight"
    if tied:
        check(resolved, model)
        assert resolved["lm_head.weight"] == "embed_tokens.weight"
    else:
        with pytest.raises(ValueError, match=r"those of the model; missing in the weights: lm_head.weight$"):
            check(resolved, model)


def test_whole_model_reads_into_the_bare_base_model(four_shards):
    base = LlamaModel(llama_config())
    resolved = resolve(four_shards, base)
    assert resolved["norm.weight"] == "model.norm.weight"
    check(resolved, base, ignored=["lm_head"])


def test_missing_and_surplus_names_are_listed_ten_at_most():
    model = on_meta(llama_config(num_hidden_layers=6))
    names = dict.fromkeys(on_meta(llama_config()).state_dict(), "") | {"extra.weight": ""}
    with pytest.raises(ValueError, match=r"model.layers.4.* and 8 more, 18 in all; left over .*: extra.weight$"):
        check(names, model)


def test_either_name_of_a_tied_tensor_is_enough_and_old_buffers_are_passed_over():
    model = on_meta(llama_config(tie_word_embeddings=True))
    for absent in ("lm_head.weight", "model.embed_tokens.weight", None):
        names = set(model.state_dict()) - {absent} | {"model.layers.0.self_attn.rotary_emb.inv_freq"}
        resolved = resolve_prefix(names, model.state_dict().keys(), "model", model.all_tied_weights_keys)
        check(resolved, model)
        check_names(names, {n for n, _ in model.named_parameters()}, model.all_tied_weights_keys, "the model")
        assert all(resolved[name] in names for name in model.state_dict())


def test_the_same_tensor_under_two_names_is_refused():
    with pytest.raises(ValueError, match=r"hold model\.norm\.weight twice, as model\.norm\.weight and as norm"):
        resolve_prefix(["norm.weight", "model.norm.weight"], {"model.norm.weight"}, "model", {})


def test_tied_tensors_that_differ_on_disk_are_refused(tmp_path):
    untied, tied = built(llama_config()), on_meta(llama_config(tie_word_embeddings=True))
    saved(untied, tmp_path)
    source, resolved = SafetensorsSource(tmp_path), resolve(tmp_path, tied)
    with pytest.raises(ValueError, match=r"lm_head.weight and model.embed_tokens.weight .* differ"):
        check_tied(source, resolved, tied.all_tied_weights_keys, rows=7)
    same = StateDictSource(built(tied.config))
    check_tied(same, {name: name for name in same.names}, tied.all_tied_weights_keys, rows=7)


def test_wrong_shapes_are_named(four_shards):
    model = on_meta(llama_config(intermediate_size=96))
    source, shapes = SafetensorsSource(four_shards), {n: p.shape for n, p in model.named_parameters()}
    with pytest.raises(ValueError, match=r"down_proj.weight \(weights \(32, 64\), model \(32, 96\)\).* 12 in all"):
        check_shapes(source, resolve(four_shards, model), shapes)
