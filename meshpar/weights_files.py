"""A Hugging Face directory on disk: where it is, what its safetensors files hold, whether they are whole."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeGuard

from huggingface_hub import snapshot_download

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLED_FILES = ("pytorch_model*", "model*.bin", "*.pth", "*.ckpt")
# Code is not run unless it is trusted.
HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "*.py"]
# Sub-folders and consolidated files hold the same weights a second time, in other formats.
HUB_DUPLICATES = ["*/*", "consolidated*"]
# safetensors refuses longer headers as well.
MAX_HEADER_BYTES = 100_000_000
DTYPE_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: ``start`` and ``stop`` are byte offsets in the data part of ``file``."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def resolve_directory(path_or_hub_id: str | Path) -> Path:
    """A local directory as it is, or the local copy of a hub id, downloaded if need be.

    HF_HUB_OFFLINE=1 keeps to what is there. Raises ValueError when it is neither a directory nor a hub id.
    """
    path = Path(path_or_hub_id)
    if path.is_dir():
        return path
    if path.exists():
        raise ValueError(f"{path} is a file; give the directory that holds it")
    try:
        return Path(snapshot_download(str(path_or_hub_id), allow_patterns=HUB_FILES, ignore_patterns=HUB_DUPLICATES))
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(
            f"{path_or_hub_id} is no directory, and the hub gave nothing by that name: {reason}"
        ) from error


def scan(directory: Path) -> dict[str, StoredTensor]:
    """Every tensor in the directory's weight files, by name.

    Reads the index and each file's header, no data. Raises ValueError, naming the file, when there are no
    safetensors weights, when a header does not fit its file's size, and when index and files disagree.
    """
    if (directory / SINGLE_FILE).is_file():
        return _read_header(directory / SINGLE_FILE)
    if not (directory / INDEX_FILE).is_file():
        raise ValueError(_no_weights(directory))
    weight_map = _read_index(directory / INDEX_FILE)
    tensors: dict[str, StoredTensor] = {}
    for file in sorted(set(weight_map.values())):
        for name, stored in _read_header(directory / file).items():
            if name in tensors:
                raise ValueError(f"{directory}: {name} is in both {tensors[name].file.name} and {file}")
            tensors[name] = stored
    for name, file in weight_map.items():
        if name not in tensors or tensors[name].file != directory / file:
            raise ValueError(f"{directory / INDEX_FILE} says {name} is in {file}, which does not hold it")
    return tensors


def _no_weights(directory: Path) -> str:
    pickled = [path.name for pattern in PICKLED_FILES for path in directory.glob(pattern)]
    if any(directory.glob("*.safetensors")):
        return f"{directory} has safetensors files, but neither {SINGLE_FILE} nor {INDEX_FILE} is among them"
    if pickled:
        return (
            f"{directory} holds pickled weights only ({listed(pickled)}); opening them can run code, so they "
            "are not read. If you trust them, convert them once: "
            f"AutoModelForCausalLM.from_pretrained('{directory}').save_pretrained('NEW_DIRECTORY')"
        )
    return f"{directory} holds no safetensors weights: neither {SINGLE_FILE} nor {INDEX_FILE} is there"


def _read_index(path: Path) -> dict[str, str]:
    """Tensor name -> file name, for files that exist and lie inside the index's directory."""
    index = _parse_json(path.read_bytes(), path)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{path} has no weight_map from tensor names to files")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file.endswith(".safetensors"):
            raise ValueError(f"{path} puts {name} into {file!r}, which is no safetensors file")
        # Only the text is checked: a hub cache is made of links that lead out of the directory.
        parts = PurePosixPath(file)
        if parts.is_absolute() or ".." in parts.parts or any(character in file for character in "\\:\0"):
            raise ValueError(f"{path} puts {name} into {file!r}, which is outside its directory")
        if not os.path.isfile(path.parent / file):
            raise ValueError(f"{path} puts {name} into {file}, which is not there")
    return weight_map


def _read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file; ValueError unless they cover the rest of the file exactly."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise ValueError(f"{path} is cut short or no safetensors file: no whole header in its {size} bytes")
        header = _parse_json(file.read(length), path)
    header.pop("__metadata__", None)
    tensors = {name: _parse_entry(path, name, entry) for name, entry in header.items()}
    described = 0
    for name, stored in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)):
        if stored.start != described:
            raise ValueError(f"{path} is damaged: the data of {name} overlaps or leaves a gap before it")
        described = stored.stop
    if described != size - 8 - length:
        state = "cut short" if described > size - 8 - length else "longer than it should be"
        raise ValueError(
            f"{path} is {state}: its header describes {described} bytes of tensors, the file holds "
            f"{size - 8 - length}; copy or download it again"
        )
    return tensors


def _parse_entry(path: Path, name: str, entry: object) -> StoredTensor:
    fields = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not (_is_sizes(shape) and _is_sizes(offsets) and len(offsets) == 2 and isinstance(dtype, str)):
        raise ValueError(f"{path} is damaged: the header's entry for {name} is not a dtype, a shape and two offsets")
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"{path}: {name} is stored as {dtype}; known are {', '.join(sorted(DTYPE_BYTES))}")
    if offsets[1] - offsets[0] != math.prod(shape) * DTYPE_BYTES[dtype]:
        raise ValueError(f"{path} is damaged: {name} has shape {shape} in {dtype} but data_offsets {offsets}")
    return StoredTensor(path, dtype, tuple(shape), offsets[0], offsets[1])


def _is_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _parse_json(data: bytes, path: Path) -> dict[str, Any]:
    """A JSON object without repeated keys; raises ValueError naming the file."""
    try:
        value = json.loads(data, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if type(value) is not dict:
        raise ValueError(f"{path} is damaged: a JSON object was expected")
    return value


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"{listed([key for key in values if keys.count(key) > 1])} appears twice")
    return values


def listed(names: Iterable[str], limit: int = 10) -> str:
    """The first ``limit`` names in order, and how many there are in all."""
    ordered = sorted(names)
    more = f" and {len(ordered) - limit} more, {len(ordered)} in all" if len(ordered) > limit else ""
    return ", ".join(ordered[:limit]) + more
