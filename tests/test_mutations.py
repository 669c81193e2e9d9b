"""Damaged files, by the hundred: read as something sound, or refused with a message that names the file or the key."""

from __future__ import annotations

import json
import struct

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors import safe_open
from transformers import AutoTokenizer

from meshpar.checkpoint import FORMAT, latest, read_manifest
from meshpar.config import ConfigError
from meshpar.recipe import load_recipe, parse_recipe
from meshpar.recipe_errors import RecipeError
from meshpar.recipe_yaml import parse
from meshpar.train.data import load_rows, pad_token_id
from meshpar.train.formats import FORMATS
from meshpar.weights_in import SafetensorsSource
from tests.mutations import INSERTED, as_json, changed, damaged, damaged_lines, examples
from tests.test_data import CHATML, CONVERSATION, make_tokenizer
from tests.test_recipe import EXAMPLE
from tests.weight_files import INDEX, built, llama_config, saved

pytestmark = pytest.mark.timeout(120)


def shown(error: Exception) -> str:
    """The message, which a terminal can print."""
    text = str(error)
    assert text.strip()
    return text


# ---- recipes ----

RECIPE = yaml.safe_load(EXAMPLE)


@pytest.fixture(scope="module")
def recipe_file(tmp_path_factory):
    return tmp_path_factory.mktemp("recipes") / "recipe.yaml"


def read_or_refuse_recipe(file) -> None:
    try:
        recipe = load_recipe(file)
    except RecipeError as refused:
        assert refused.problems == shown(refused).split("\n")
        return
    assert parse_recipe(parse(recipe.dump_yaml())) == recipe
    try:
        recipe.check(6)
    except ConfigError as refused:
        assert all(line.startswith(("parallel.", "batch.")) for line in shown(refused).split("\n"))


@examples(150)
@given(data=damaged(EXAMPLE.encode()) | damaged_lines(EXAMPLE))
def test_damaged_recipe_text(recipe_file, data):
    recipe_file.write_bytes(data)
    read_or_refuse_recipe(recipe_file)


@examples(150)
@given(raw=changed(RECIPE))
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
def shards(tmp_path_factory):
    """The same in several files and an index."""
    path = saved(built(llama_config(num_hidden_layers=1)), tmp_path_factory.mktemp("many"), max_shard_size="10KB")
    return path / INDEX


def read_or_refuse_weights(damaged_file) -> None:
    directory = damaged_file.parent
    try:
        source = SafetensorsSource(directory)
        for name in source.names:
            assert source.read(name).shape == source.shape(name)
    except ValueError as refused:
        assert str(damaged_file) in shown(refused)
        return
    assert source.bytes_read <= sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    assert all(stored.file.parent == directory for stored in source._tensors.values())


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
def test_damaged_index(shards, data):
    text = shards.read_bytes()
    try:
        shards.write_bytes(data.draw(damaged(text) | changed(json.loads(text)).map(as_json)))
        read_or_refuse_weights(shards)
    finally:
        shards.write_bytes(text)
