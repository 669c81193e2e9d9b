"""A directory to train in: a tiny model with a tokenizer, training and evaluation data, and recipes for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from tests import models


def make_workspace(where: Path, dropout: float) -> Path:
    """Fill ``where`` with model/ (weights and tokenizer), train.jsonl, eval.jsonl."""
    models.tiny_model(attention_dropout=dropout).save_pretrained(where / "model")
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": 3 + i for i in range(90)}}
    words = Tokenizer(WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>")
    tokenizer.save_pretrained(where / "model")
    for name, count, first in (("train", 24, 0), ("eval", 5, 40)):
        lines = [
            {"prompt": f"w{i} w{i + 1} ", "response": " ".join(f"w{(i * j) % 90}" for j in range(1, 4 + i % 13))}
            for i in range(first, first + count)
        ]
        (where / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return where


def recipe(workspace: Path, out: Path, parallel: dict, **changes) -> dict:
    """Six steps of four packed rows; ``changes``: section__key=value."""
    raw = {
        "model": {"path": str(workspace / "model")},
        "parallel": {"compute_dtype": "float32", **parallel},
        "data": {"path": str(workspace / "train.jsonl"), "format": "instruct", "seq_len": 32},
        "batch": {"global_size": 4},
        "optim": {"lr": 0.01, "eps": 1e-5, "warmup_steps": 2},
        "train": {"steps": 6},
        "checkpoint": {"async": False},
        "log": {},
        "output_dir": str(out),
    }
    for key, value in changes.items():
        section, name = key.split("__")
        raw[section][name] = value
    return raw


def environment() -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return clean | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def run_python(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=240, check=False)
