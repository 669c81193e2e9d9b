"""Checkpoints in transformers' original layouts (experts apart, other names): in slice by slice, and out again."""

import random
import resource
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, DeepseekV3Config

from meshpar import skeleton
from meshpar.load import Reader, meta_copy, open_model, skeleton_from_config
from meshpar.weights_convert import ConvertedSource, original_layout, pin_layout
from meshpar.weights_in import SafetensorsSource
from meshpar.weights_out import write_pretrained
from tests import jobs_conversions as jobs
from tests.tiny_families import tiny_config, tiny_model
from tests.weight_files import reloaded, saved

# Experts stacked and joined, renamed, with buffers; joined along rows; cut in equal and in unlike parts; interleaved
# and padded; renamed only; a prefix that checkpoints of the larger model have.
TYPES = [
    *("mixtral", "deepseek_v3", "minimax", "qwen3_moe", "nemotron_h", "bailing_hybrid", "olmo_hybrid", "hrm_text"),
    *("lara_mini", "sarvam_moe", "inkling2_text", "gpt_neox", "exaone", "granitemoe", "qwen3_5_moe_text"),
    *("qwen2_moe", "olmoe", "deepseek_v2", "gpt_oss", "phimoe", "glm4_moe", "ernie4_5_moe"),
]


class NoMesh:
    device = torch.device("cpu")

    def rank(self, dim: str) -> int:
        return 0


def source_of(path: Path) -> ConvertedSource:
    opened = open_model(path)
    Reader(opened.skeleton, opened.source, NoMesh())  # checks names and shapes
    return opened.source


def write(path: Path, model, tensors: dict, max_shard_size="1GB") -> Path:
    entries = [(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]
    arriving = ((name, tensor.clone()) for name, tensor in tensors.items())
    layout = original_layout(model, entries, arriving)
    write_pretrained(path, *layout, config=model.config, max_shard_size=max_shard_size)
    return path


def untied(model) -> dict:
    return {n: t for n, t in model.state_dict().items() if n not in model.all_tied_weights_keys}


def all_files(path: Path) -> dict:
    return {n: t for file in path.glob("*.safetensors") for n, t in load_file(file).items()}


def same(left: dict, right: dict) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


def some_index(shape, numbers: random.Random) -> tuple:
    bounds = [sorted((numbers.randint(0, size), numbers.randint(0, size))) for size in shape]
    return tuple(slice(*b) for b in bounds[: numbers.randint(0, len(shape))])


@pytest.mark.parametrize("original", [True, False], ids=["original-layout", "model-layout"])
@pytest.mark.parametrize("model_type", TYPES)
def test_tensors_and_slices_equal_those_saved(model_type, original, tmp_path):
    model, numbers = tiny_model(model_type), random.Random(0)
    source = source_of(saved(model, tmp_path, save_original_format=original))
    for name, tensor in untied(model).items():
        assert torch.equal(source.read(name), tensor)
        for _ in range(4):
            index, before = some_index(tensor.shape, numbers), source.bytes_read
            part = source.read(name, index)
            assert torch.equal(part, tensor[index])
            assert part.is_contiguous()
            assert part.dtype == tensor.dtype
            if model_type != "inkling2_text":  # its projections are interleaved in the files
                assert source.bytes_read - before == part.nbytes


@pytest.mark.parametrize("model_type", TYPES)
def test_written_files_hold_what_save_pretrained_writes(model_type, tmp_path):
    model = tiny_model(model_type)
    whole = meta_copy(model)
    pin_layout(whole)
    ours = write(tmp_path / "ours", whole, untied(model))
    theirs = saved(model, tmp_path / "theirs")
    assert same(all_files(ours), all_files(theirs))
    assert same(reloaded(ours).state_dict(), model.state_dict())


@pytest.mark.parametrize("original", [True, False], ids=["original-layout", "model-layout"])
def test_a_model_is_written_in_the_layout_it_was_read_in(original, tmp_path):
    model = tiny_model("mixtral")
    read = saved(model, tmp_path / "read", save_original_format=original)
    opened = open_model(read)
    pin_layout(opened.skeleton)
    written = write(tmp_path / "written", opened.skeleton, untied(model), max_shard_size="50KB")
    assert len(list(written.glob("*.safetensors"))) > 3
    assert same(all_files(written), all_files(read))
    assert same(reloaded(written).state_dict(), model.state_dict())


def test_writing_holds_one_tensor_of_the_model_at_a_time(tmp_path):
    model = tiny_model("mixtral")
    pin_layout(model)
    tensors, alive, held = untied(model), weakref.WeakSet(), []

    def arriving():
        for name, tensor in tensors.items():
            held.append(len(alive))
            copied = tensor.clone()
            alive.add(copied.untyped_storage())
            yield name, copied
            del copied

    entries = [(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]
    write_pretrained(tmp_path, *original_layout(model, entries, arriving()), config=model.config, max_shard_size=1)
    assert max(held) == 0


def test_files_keep_their_dtype(tmp_path):
    source = source_of(saved(tiny_model("mixtral").bfloat16(), tmp_path))
    assert source.read("model.layers.0.mlp.experts.gate_up_proj", (slice(0, 0),)).dtype == torch.bfloat16
    assert all(source.read(name).dtype == torch.bfloat16 for name in source.names)


def test_half_of_the_fused_experts_reads_half_of_the_bytes(tmp_path):
    model = tiny_model("mixtral")
    source = source_of(saved(model, tmp_path))
    name = "model.layers.1.mlp.experts.gate_up_proj"
    experts, rows, _ = source.shape(name)
    halves = [(slice(0, experts // 2),), (slice(None), slice(rows // 4, 3 * rows // 4)), (*[slice(None)] * 2, slice(7))]
    for index in halves:
        before = source.bytes_read
        part = source.read(name, index)
        assert source.bytes_read - before == part.nbytes
    assert part.nbytes == experts * rows * 7 * 4


def test_interleaved_projections_read_the_rows_around_a_part(tmp_path):
    model = tiny_model("inkling2_text")
    source = source_of(saved(model, tmp_path))
    name = next(n for n in model.state_dict() if n.endswith("experts.gate_up_proj"))
    rows = source.shape(name)[1]
    for start, stop in ((0, rows // 4), (rows // 2, 3 * rows // 4), (rows // 8, rows // 4)):
        for experts in (slice(None), slice(1, 3)):
            before, index = source.bytes_read, (experts, slice(start, stop), slice(5, 20))
            part = source.read(name, index)
            assert torch.equal(part, model.state_dict()[name][index])
            assert source.bytes_read - before == 2 * part.nbytes  # gate and up take turns in the file


def test_experts_that_are_missing_or_too_many_are_named(tmp_path):
    tensors = all_files(saved(tiny_model("mixtral"), tmp_path))

    def problem_with(changed: dict) -> str:
        save_file(changed, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match="weights") as raised:
            source_of(tmp_path)
        return str(raised.value)

    layer = "model.layers.1.block_sparse_moe.experts"
    without = {n: t for n, t in tensors.items() if not n.startswith(f"{layer}.")}
    assert "missing in the weights: model.layers.1.mlp.experts.down_proj" in problem_with(without)
    without = {n: t for n, t in tensors.items() if n != f"{layer}.3.w2.weight"}
    assert "model.layers.1.mlp.experts.down_proj (weights (3, " in problem_with(without)
    without = {n: t for n, t in tensors.items() if n != f"{layer}.3.w1.weight"}
    assert f"gate_up_proj cannot be made from the weights {layer}.0.w1.weight" in problem_with(without)
    deeper = {n.replace("layers.1.", "layers.4."): t.clone() for n, t in tensors.items() if "layers.1." in n}
    assert "left over in the weights: model.layers.4.block_sparse_moe" in problem_with(tensors | deeper)
    fused = {"model.layers.1.mlp.experts.down_proj": torch.zeros(4, 32, 64)}
    assert "hold model.layers.1.mlp.experts.down_proj twice" in problem_with(tensors | fused)


@pytest.mark.parametrize(("model_type", "config"), [("mixtral", {"tp": 2}), ("deepseek_v3", {"pp": 2})])
def test_a_mesh_writes_the_files_it_read(pool, model_type, config, tmp_path):
    read = saved(tiny_model(model_type), tmp_path / "read")
    pool.run(2, jobs.read_and_write, read, config, tmp_path)
    for written in (tmp_path / "saved", tmp_path / "exported"):
        assert same(all_files(written), all_files(read))
        assert same(reloaded(written).state_dict(), reloaded(read).state_dict())


# ---- skeletons ----


def test_a_skeleton_takes_no_memory_for_experts_in_one_tensor():
    def peak():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20

    before = peak()
    model = skeleton_from_config(DeepseekV3Config())
    assert sum(p.numel() for p in model.parameters()) > 6e11
    assert peak() - before < 2
    assert all(p.is_meta for p in model.parameters())
    assert not any(b.is_meta for b in model.buffers())


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "gpt_neo", "minimax", "deepseek_v4"])
def test_a_skeleton_has_the_buffers_of_a_built_model(model_type):
    model = tiny_model(model_type)
    want, have = dict(model.named_buffers()), dict(skeleton_from_config(model.config).named_buffers())
    assert want
    assert same(have, want)


def test_a_buffer_as_large_as_a_parameter_is_computed(monkeypatch):
    whole = dict(skeleton_from_config(tiny_config("gpt_neo")).named_buffers())
    monkeypatch.setattr(skeleton, "LARGE", 1000)
    again = dict(skeleton_from_config(tiny_config("gpt_neo")).named_buffers())
    assert any(buffer.numel() > 1000 for buffer in whole.values())
    assert all(torch.equal(again[name], buffer) for name, buffer in whole.items())


def test_the_wrapped_source_is_the_files_own_for_a_model_without_conversions(tmp_path):
    model = tiny_model("llama")
    files = SafetensorsSource(saved(model, tmp_path))
    source = ConvertedSource(files, skeleton_from_config(AutoConfig.from_pretrained(tmp_path)))
    assert source.names == files.names
    assert all(torch.equal(source.read(name), files.read(name)) for name in files.names)
