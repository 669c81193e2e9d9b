"""A model directory's own code and configs: code runs only where it is trusted, and what is broken is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from meshpar.checkpoint import export
from meshpar.cli import main
from meshpar.config import ConfigError
from meshpar.load import open_model
from meshpar.pretrained import read_config, read_tokenizer
from meshpar.weights_out import write_pretrained
from tests import jobs_train
from tests.weight_files import built, entries_of, llama_config, tensors_of
from tests.workspace import recipe

RAN = "import os, pathlib\npathlib.Path(os.environ.get('RAN', __file__ + '.ran')).touch()\n"
CODE = {
    "configuration_odd.py": "from transformers import LlamaConfig\n\n"
    "class OddConfig(LlamaConfig):\n    model_type = 'odd'\n",
    "modeling_odd.py": "from transformers import LlamaForCausalLM\nfrom .configuration_odd import OddConfig\n\n"
    "class OddForCausalLM(LlamaForCausalLM):\n    config_class = OddConfig\n",
    "tokenization_odd.py": "from transformers import PreTrainedTokenizerFast\n\n"
    "class OddTokenizer(PreTrainedTokenizerFast):\n    pass\n",
}
MODEL_CODE = {"AutoConfig": "configuration_odd.OddConfig", "AutoModelForCausalLM": "modeling_odd.OddForCausalLM"}
TOKENIZER_CODE = {"AutoTokenizer": [None, "tokenization_odd.OddTokenizer"]}


def edit(file: Path, **changes) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.fixture
def directory(workspace, tmp_path) -> Path:
    """The tiny model and its tokenizer, to be broken."""
    return Path(shutil.copytree(workspace / "model", tmp_path / "model"))


@pytest.fixture
def odd(directory) -> Path:
    """The same model, as a type that only the directory's own code knows; that code leaves a file where it runs."""
    for name, code in CODE.items():
        (directory / name).write_text(RAN + code)
    edit(directory / "config.json", model_type="odd", architectures=["OddForCausalLM"], auto_map=MODEL_CODE)
    edit(directory / "tokenizer_config.json", tokenizer_class="OddTokenizer", auto_map=TOKENIZER_CODE)
    return directory


@pytest.fixture
def no_questions(monkeypatch):
    """transformers asks on the terminal whether to run code, where it is not told."""

    def asked(*_):
        raise AssertionError("nobody is there to answer")

    monkeypatch.setattr("builtins.input", asked)


@pytest.mark.parametrize("read", [read_config, read_tokenizer, open_model])
def test_code_that_is_not_trusted_is_refused_and_not_run(odd, no_questions, read):
    with pytest.raises(ConfigError, match=rf"of {odd} needs Python code.*set model\.trust_remote_code=true"):
        read(odd)
    assert not list(odd.glob("*.ran"))


def test_show_refuses_code_with_one_line(odd, no_questions, capsys):
    assert main(["show", str(odd)]) == 2
    assert capsys.readouterr().err.startswith(f"meshpar: the config of {odd} needs Python code")


def test_a_type_that_transformers_knows_needs_no_code_of_its_own(odd, no_questions):
    edit(odd / "config.json", model_type="llama")
    config = read_config(odd)
    assert config.auto_map == MODEL_CODE
    assert type(open_model(odd).skeleton).__name__ == "LlamaForCausalLM"
    assert not list(odd.glob("*.ran"))


def test_a_tokenizer_of_untrusted_code_is_not_written_and_the_weights_are(odd, tmp_path, caplog):
    model = built(llama_config())
    write_pretrained(tmp_path / "out", entries_of(model), tensors_of(model), config=model.config, tokenizer_source=odd)
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert "has the weights, but no tokenizer: the tokenizer of" in caplog.text


def test_trusted_code_trains_verifies_and_goes_along_with_the_trained_model(
    pool, odd, workspace, tmp_path, monkeypatch, capfd
):
    raw = recipe(workspace, tmp_path / "run", {"tp": 2, "dp_shard": 1}, model__path=str(odd), train__steps=2)
    file, ran, modules = tmp_path / "recipe.yaml", tmp_path / "ran", str(tmp_path / "modules")
    file.write_text(yaml.safe_dump(raw))
    monkeypatch.setenv("RAN", str(ran))
    monkeypatch.setenv("HF_MODULES_CACHE", modules)
    assert main(["train", str(file)]) == 2
    assert not ran.exists()
    assert capfd.readouterr().err == (
        f"meshpar: the config of {odd} needs Python code that comes with it, which is not run unless you trust it: "
        "read that code, then set model.trust_remote_code=true (--trust-remote-code where there is no recipe, "
        "trust_remote_code=True in Python).\n"
    )
    raw["model"]["trust_remote_code"] = True
    printed = pool.run(2, jobs_train.verify_with_code, raw, modules, str(ran))[0]
    assert "equal to one process: OddForCausalLM" in printed
    ran.unlink()
    assert main(["train", str(file), "model.trust_remote_code=true"]) == 0
    assert ran.exists()
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", modules)
    out = tmp_path / "run" / "model"
    exported = tmp_path / "exported"
    shutil.rmtree(odd)
    ran.unlink()
    with pytest.raises(ConfigError, match=r"needs Python code that comes with it.*--trust-remote-code"):
        export(tmp_path / "run" / "checkpoints" / "step-2", exported)
    assert not ran.exists()
    assert main(["export", str(tmp_path / "run" / "checkpoints" / "step-2"), str(exported), "--trust-remote-code"]) == 0
    assert ran.exists()
    assert (exported / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()
    assert type(AutoModelForCausalLM.from_pretrained(exported, trust_remote_code=True)).__name__ == "OddForCausalLM"
    loaded = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)
    assert type(loaded).__name__ == "OddForCausalLM"
    assert type(AutoTokenizer.from_pretrained(out, trust_remote_code=True)).__name__ == "OddTokenizer"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", None, "{} has no config.json"),
        ("config.json", b"", "the config of {} cannot be used: .* not a valid JSON file"),
        ("config.json", b'{"model_type": "llama"', "the config of {} cannot be used: .* not a valid JSON file"),
        ("config.json", b"\xff\xfe", "the config of {} cannot be used: .* not a valid JSON file"),
        ("config.json", b"[]", "the config of {} cannot be used: "),
        ("config.json", b"[" * 100_000, "the config of {} cannot be used: RecursionError"),
        ("config.json", b"{}", "the config of {} cannot be used: .*`model_type`"),
        ("config.json", b'{"model_type": "llamma"}', "the config of {} cannot be used: .*`llamma`"),
        ("config.json", b'{"model_type": ["llama"]}', "the config of {} cannot be used: TypeError"),
        ("config.json", b'{"model_type": "llama", "hidden_size": "wide"}', "cannot be used: .*'hidden_size'.*'wide'"),
        ("config.json", b'{"model_type": "llama", "hidden_size": 50}', "of {} cannot be used: .*hidden size .50"),
        ("config.json", b'{"model_type": "llama", "hidden_act": "x"}', "the model of {} cannot be used: KeyError"),
        ("config.json", b'{"model_type": "vit"}', "the model of {} cannot be used: Unrecognized configuration"),
        ("tokenizer.json", b"", "the tokenizer of {} cannot be used: "),
        ("tokenizer.json", b"{}", "the tokenizer of {} cannot be used: KeyError: 'added_tokens'"),
        ("tokenizer.json", None, "the tokenizer of {} cannot be used: "),
        ("tokenizer_config.json", b'{"a":', "the tokenizer of {} cannot be used: "),
    ],
)
def test_a_broken_config_or_tokenizer_is_one_sentence_that_names_it(directory, name, content, message):
    (directory / name).unlink()
    if content is not None:
        (directory / name).write_bytes(content)
    read = read_tokenizer if name.startswith("tokenizer") else lambda path: open_model(path)
    with pytest.raises(ValueError, match=message.format(directory)) as refused:
        read(directory)
    assert "\n" not in str(refused.value)


def test_a_directory_without_a_tokenizer_says_which_files_make_one(directory):
    for file in directory.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ValueError, match=rf"{directory} has no tokenizer: none of tokenizer\.json, .* is there"):
        read_tokenizer(directory)
