"""What test_mutations runs inside a process group."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st

from meshpar import checkpoint, parallelize_model
from meshpar.config import ParallelConfig
from tests import models
from tests.mutations import as_json, changed, examples

CONFIG = ParallelConfig(compute_dtype="float32")


def save_two(directory: Path) -> None:
    """Checkpoints of a tiny model at steps 1 and 2."""
    model = parallelize_model(models.tiny_config(num_hidden_layers=1), CONFIG)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in (1, 2):
        checkpoint.save(directory / f"step-{step}", model, optimizer, {"step": step})


def load_damaged_models(directory: Path) -> None:
    """Models from files with another header: loaded from floating-point numbers of their shapes, or refused by name."""
    models.tiny_model(num_hidden_layers=1).save_pretrained(directory)
    file = directory / "model.safetensors"
    original = file.read_bytes()
    length = int.from_bytes(original[:8], "little")

    @examples(60)
    @given(header=changed(json.loads(original[8 : 8 + length])) | other_models(json.loads(original[8 : 8 + length])))
    def load(header):
        text = as_json(header)
        file.write_bytes(struct.pack("<Q", len(text)) + text + original[8 + length :])
        try:
            model = parallelize_model(directory, CONFIG)
        except ValueError as refused:
            message = str(refused)
        else:
            message = ""
            shapes = {name: list(p.shape) for name, p in model.named_parameters()}
            assert shapes == {name: entry["shape"] for name, entry in header.items() if name in shapes}
            assert {entry["dtype"] for name, entry in header.items() if name in shapes} == {"F32"}
        assert not message or "weight" in message or str(file) in message

    load()


@st.composite
def other_models(draw: st.DrawFn, header: dict) -> dict:
    """A sound header, of other tensors: of another dtype or shape of the same size, renamed, or with names swapped."""
    names = sorted(header.keys() - {"__metadata__"})
    name, other = draw(st.sampled_from(names)), draw(st.sampled_from(names))
    entry = header[name]
    match draw(st.sampled_from(["dtype", "shape", "rename", "swap"])):
        case "dtype":
            return header | {name: entry | {"dtype": draw(st.sampled_from(["I32", "U32", "F32"]))}}
        case "shape":
            shapes = [entry["shape"][::-1], [*entry["shape"], 1], [math.prod(entry["shape"])]]
            return header | {name: entry | {"shape": draw(st.sampled_from(shapes))}}
        case "rename":
            return {n + draw(st.sampled_from(["", "x", "\ud800"])) * (n == name): e for n, e in header.items()}
        case _:
            return header | {name: header[other], other: entry}
