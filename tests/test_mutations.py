"""Damaged files, by the hundred: read as something sound, or refused with a message that names the file or the key."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from meshpar.checkpoint import latest, read_manifest
from meshpar.config import ConfigError
from meshpar.pretrained import read_config, read_tokenizer
from meshpar.recipe import load_recipe, parse_recipe
from meshpar.recipe_errors import RecipeError
from meshpar.recipe_yaml import parse
from meshpar.train.data import load_rows
from meshpar.train.formats import FORMATS
from meshpar.weights_in import SafetensorsSource
from tests import jobs_mutations as jobs
from tests.jobs_bugs import refusal as refusal_of
from tests.mutations import as_json, changed, damaged, damaged_lines, examples
from tests.test_data import CLOSE, CONVERSATION, OPEN, TURN, make_tokenizer
from tests.test_recipe import EXAMPLE
from tests.weight_files import INDEX, built, llama_config, saved

pytestmark = pytest.mark.timeout(120)


def refusal(action: Callable[[], object], kind: type[Exception] = ValueError) -> str:
    """What ``action`` says when it raises ``kind``; nothing when it does not."""
    try:
        action()
    except kind as refused:
        return str(refused)
    return ""


# ---- recipes ----


@pytest.fixture(scope="module")
def recipe_file(tmp_path_factory):
    return tmp_path_factory.mktemp("recipes") / "recipe.yaml"


def read_or_refuse_recipe(file) -> None:
    try:
        recipe = load_recipe(file)
    except RecipeError as refused:
        problems = refused.problems
    else:
        problems = refusal(lambda: recipe.check(6), ConfigError).splitlines()
        assert parse_recipe(parse(recipe.dump_yaml())) == recipe
        assert all(line.startswith(("parallel.", "batch.")) for line in problems)
    assert all(line.isprintable() for line in problems)


@examples(150)
@given(data=damaged(EXAMPLE.encode()) | damaged_lines(EXAMPLE))
def test_damaged_recipe_text(recipe_file, data):
    recipe_file.write_bytes(data)
    read_or_refuse_recipe(recipe_file)


@examples(150)
@given(raw=changed(yaml.safe_load(EXAMPLE)))
def test_recipe_with_other_values(recipe_file, raw):
    recipe_file.write_bytes(as_json(raw))  # which is YAML
    read_or_refuse_recipe(recipe_file)


# ---- safetensors ----


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A small Llama in one file."""
    return saved(built(llama_config(num_hidden_layers=1)), tmp_path_factory.mktemp("one")) / "model.safetensors"


@pytest.fixture(scope="module")
def original(weights):
    return weights.read_bytes()


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """The index of the same model in several files."""
    path = saved(built(llama_config(num_hidden_layers=1)), tmp_path_factory.mktemp("many"), max_shard_size="10KB")
    return path / INDEX


@pytest.fixture(scope="module")
def original_index(index):
    return index.read_bytes()


def read_weights(directory) -> None:
    source = SafetensorsSource(directory)
    for name in source.names:
        assert source.read(name).shape == source.shape(name)
    assert source.bytes_read <= sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    assert all(stored.file.parent == directory for stored in source._tensors.values())


def read_or_refuse_weights(file) -> None:
    message = refusal(lambda: read_weights(file.parent))
    assert not message or str(file) in message


@examples(150)
@given(data=st.data())
def test_damaged_safetensors(weights, original, data):
    header = 8 + int.from_bytes(original[:8], "little")
    weights.write_bytes(data.draw(damaged(original, data.draw(st.sampled_from([8, header, len(original)])))))
    read_or_refuse_weights(weights)


@examples(150)
@given(data=st.data())
def test_safetensors_with_another_header(weights, original, data):
    length = int.from_bytes(original[:8], "little")
    header = as_json(data.draw(changed(json.loads(original[8 : 8 + length]))))
    weights.write_bytes(struct.pack("<Q", len(header)) + header + original[8 + length :])
    read_or_refuse_weights(weights)


@examples(100)
@given(data=st.data())
def test_damaged_index(index, original_index, data):
    index.write_bytes(data.draw(damaged(original_index) | changed(json.loads(original_index)).map(as_json)))
    read_or_refuse_weights(index)


def test_models_of_damaged_directories(pool, tmp_path):
    pool.run(1, jobs.load_damaged_models, tmp_path)


def test_weights_that_are_no_floating_point_numbers_are_refused(pool, tmp_path):
    file = saved(built(llama_config()), tmp_path) / "model.safetensors"
    save_file({**load_file(file), "lm_head.weight": torch.ones(64, 32, dtype=torch.int32)}, file)
    (message,) = pool.run(1, refusal_of, {"dp_shard": 1}, str(tmp_path))
    assert message == (
        "ValueError: lm_head.weight is stored as int32, and weights are floating-point numbers; quantised are not read"
    )


# ---- configs and tokenizers ----


@pytest.fixture(scope="module")
def described(tmp_path_factory):
    """A directory with a config and a tokenizer, and what its files hold."""
    directory = tmp_path_factory.mktemp("described")
    make_tokenizer().save_pretrained(directory)
    llama_config().save_pretrained(directory)
    return directory, {file.name: file.read_bytes() for file in directory.glob("*.json")}


@examples(150)
@given(data=st.data())
def test_damaged_config_and_tokenizer(described, data):
    directory, files = described
    name = data.draw(st.sampled_from(sorted(files)))
    (directory / name).write_bytes(data.draw(damaged(files[name]) | changed(json.loads(files[name])).map(as_json)))
    try:
        for read in (read_config, read_tokenizer):
            message = refusal(lambda read=read: read(directory))
            assert not message or str(directory) in message
            assert "\n" not in message
    finally:
        (directory / name).write_bytes(files[name])


# ---- checkpoints ----


@pytest.fixture(scope="module")
def manifest(pool, tmp_path_factory):
    """The manifest of a checkpoint at step 2, beside a sound one of step 1, and what it holds."""
    directory = tmp_path_factory.mktemp("checkpoints")
    pool.run(1, jobs.save_two, directory)
    path = directory / "step-2" / "meshpar.json"
    return path, path.read_bytes()


@examples(100)
@given(data=st.data())
def test_damaged_manifest(manifest, data):
    path, original = manifest
    path.write_bytes(data.draw(damaged(original) | changed(json.loads(original)).map(as_json)))
    message = refusal(lambda: read_manifest(path.parent))
    assert not message or str(path) in message
    assert latest(path.parent.parent) == path.parents[1] / ("step-1" if message else "step-2")


# ---- data ----

CALLS = "{% for call in m.tool_calls %}{{ call.function.name + call.function.arguments | tojson }}{% endfor %}"
TOOL_CALL = [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]
ROW = {"text": "def f(x):", "prompt": "x +", "response": " 1", "messages": CONVERSATION}
ROWS = [ROW, ROW | {"messages": [*CONVERSATION[:2], {"role": "assistant", "tool_calls": TOOL_CALL}]}]


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    return tmp_path_factory.mktemp("data") / "train.jsonl"


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer(OPEN + CALLS + TURN + CLOSE)


def tokenise(file, format, tokenizer) -> None:
    for row in load_rows(str(file), format, tokenizer, seq_len=64, pack=True):
        assert len(row.input_ids) == len(row.labels) == len(row.position_ids) == 64
        assert ((row.input_ids >= 0) & (row.input_ids < len(tokenizer))).all()


def tokenise_or_refuse(file, format, tokenizer) -> None:
    message = refusal(lambda: tokenise(file, format, tokenizer))
    assert not message or message.startswith(str(file))


@examples(150)
@given(format=st.sampled_from(sorted(FORMATS)), data=damaged(b"\n".join(map(as_json, ROWS)) + b"\n"))
def test_damaged_json_lines(lines, tokenizer, format, data):
    lines.write_bytes(data)
    tokenise_or_refuse(lines, format, tokenizer)


@examples(150)
@given(format=st.sampled_from(sorted(FORMATS)), rows=changed(ROWS))
def test_json_lines_with_other_values(lines, tokenizer, format, rows):
    lines.write_bytes(b"\n".join(map(as_json, rows)))
    tokenise_or_refuse(lines, format, tokenizer)
