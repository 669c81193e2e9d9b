"""Tiny models and their Hugging Face directories, for the tests of reading and writing weights."""

from __future__ import annotations

import logging
import warnings
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

INDEX = "model.safetensors.index.json"


def llama_config(**changes) -> LlamaConfig:
    settings = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
    }
    return LlamaConfig(**{**settings, **changes})


def qwen2_config(**changes) -> Qwen2Config:
    return Qwen2Config(**{**llama_config().to_diff_dict(), "model_type": "qwen2", **changes})


def built(config, dtype=torch.float32):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    return model


def on_meta(config):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def saved(model, path: Path, **settings) -> Path:
    model.save_pretrained(path, **settings)
    return path


def entries_of(model, dtype=torch.float32) -> list:
    tied = model.all_tied_weights_keys
    return [(name, tensor.shape, dtype) for name, tensor in model.state_dict().items() if name not in tied]


def tensors_of(model):
    for name, tensor in model.state_dict().items():
        if name not in model.all_tied_weights_keys:
            yield name, tensor


@contextmanager
def no_warnings():
    """Fail on a Python warning or a transformers log record of level warning or above."""
    records: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: records.append(record.getMessage())
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            yield
    finally:
        logger.removeHandler(handler)
    assert not records


def reloaded(path: Path):
    with no_warnings():
        model, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(info.values()), info
    return model
