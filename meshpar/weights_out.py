"""Weights out: a Hugging Face directory written from tensors that arrive one at a time.

Everything is written aside and renamed at the end, the file that names the weights last, so that a crash
leaves no directory that looks whole and is not.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors.torch import save_file
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save

from .checkpoint_files import flush
from .pretrained import has_tokenizer, read_tokenizer
from .weights_files import INDEX_FILE, SINGLE_FILE, resolve_directory

log = logging.getLogger("meshpar")

Entry = tuple[str, Sequence[int], torch.dtype]

SHARD_FILE = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
STAGING_PREFIX = ".unfinished-save-"


def write_pretrained(
    out_dir: str | Path,
    entries: Sequence[Entry],
    tensors: Iterable[tuple[str, Tensor | None]],
    *,
    config: PreTrainedConfig,
    generation_config: GenerationConfig | None = None,
    tokenizer_source: str | Path | None = None,
    max_shard_size: int | str = "1GB",
    is_writer: bool = True,
    trust_remote_code: bool = False,
    with_code_of: Sequence[object] = (),
) -> None:
    """Write a directory for ``AutoModelForCausalLM.from_pretrained``, laid out as ``save_pretrained`` has it.

    ``entries`` are the name, whole shape and dtype on disk of every tensor, tied aliases left out;
    ``tensors`` yields the same names in the same order, each in memory that is not used again. Every rank
    runs through all of it, since it may be collective: the writer gets tensors, which it casts and writes,
    the others None. The writer holds at most one shard and one tensor. ``max_shard_size`` is in bytes, or
    text as "5GB". Weight files of an earlier save in ``out_dir`` are removed. ``tokenizer_source`` is a
    directory or hub id; one without a tokenizer is fine, and one whose tokenizer cannot be read (with
    ``trust_remote_code``, its own code included) is a warning. ``with_code_of``: where such a directory's code made the
    class of one of these, the code is written as well.

    Raises RuntimeError when a tensor is missing, surplus, out of order or of another shape than its entry.
    """
    arriving = _matched(entries, tensors)
    if not is_writer:
        for _ in arriving:
            pass
        return
    out = Path(out_dir)
    out.mkdir(parents=True, exist_ok=True)
    with _staging(out) as staging:
        _write_weights(staging, entries, arriving, max_shard_size)
        _write_code(staging, config, with_code_of)
        _write_configs(staging, config, generation_config, _written_dtype(entries))
        _publish(staging, out)
    if tokenizer_source is not None:
        _write_tokenizer(out, tokenizer_source, trust_remote_code)


def _matched(
    entries: Sequence[Entry], tensors: Iterable[tuple[str, Tensor | None]]
) -> Iterator[tuple[Entry, Tensor | None]]:
    """Each entry with its tensor; holds no tensor while the next one is made."""
    if len({name for name, *_ in entries}) < len(entries):
        raise RuntimeError("the list of tensors to write names one twice")
    arriving = iter(tensors)
    for entry in entries:
        name, tensor = next(arriving, ("nothing", None))
        if name != entry[0]:
            raise RuntimeError(f"tensors to write are out of step: {name} came where {entry[0]} was due")
        yield entry, tensor
        del tensor
    for name, _ in arriving:
        raise RuntimeError(f"tensors to write are out of step: {name} came after the last one")


def _write_weights(
    directory: Path,
    entries: Sequence[Entry],
    arriving: Iterable[tuple[Entry, Tensor | None]],
    max_shard_size: int | str,
) -> None:
    split = split_state_dict_into_shards_factory(
        {entry[0]: entry for entry in entries},
        get_storage_size=_stored_bytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_size,
    )
    pending: dict[str, dict[str, Tensor]] = {}
    for entry, tensor in arriving:
        file = split.tensor_to_filename[entry[0]]
        shard = pending.setdefault(file, {})
        shard[entry[0]] = _as_stored(entry, tensor)
        if len(shard) == len(split.filename_to_tensors[file]):
            save_file(pending.pop(file), directory / file, metadata={"format": "pt"})
        # Else the last tensor of a flushed shard would live on while the next one arrives.
        del tensor, shard
    if split.is_sharded:
        parameters = sum(math.prod(shape) for _, shape, _ in entries)
        index = {
            "metadata": {"total_parameters": parameters, **split.metadata},
            "weight_map": split.tensor_to_filename,
        }
        (directory / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _stored_bytes(entry: Entry) -> int:
    _, shape, dtype = entry
    return math.prod(shape) * dtype.itemsize


def _as_stored(entry: Entry, tensor: Tensor | None) -> Tensor:
    name, shape, dtype = entry
    if tensor is None or tensor.shape != torch.Size(shape):
        came = "no tensor" if tensor is None else f"shape {tuple(tensor.shape)}"
        raise RuntimeError(f"{name} should be written with shape {tuple(shape)}, but {came} arrived")
    stored = tensor.detach().to("cpu", dtype).contiguous()
    # A view of a larger tensor would keep all of it in memory until its shard is full.
    return stored if stored.untyped_storage().nbytes() == stored.nbytes else stored.clone()


def _written_dtype(entries: Sequence[Entry]) -> torch.dtype:
    return next(dtype for _, _, dtype in entries if dtype.is_floating_point)


def _write_configs(
    directory: Path, config: PreTrainedConfig, generation_config: GenerationConfig | None, dtype: torch.dtype
) -> None:
    # to_json_file, as save_pretrained also refuses settings that the source directory had all along.
    config = copy.deepcopy(config)
    config.dtype = str(dtype).removeprefix("torch.")
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if isinstance(model_class, type):
        config.architectures = [model_class.__name__]
    config.to_json_file(directory / "config.json", use_diff=True)
    if generation_config is not None:
        generation_config.to_json_file(directory / "generation_config.json", keys_to_pop=["compile_config"])


def own_code(config: PreTrainedConfig, model: PreTrainedModel) -> dict[str, str]:
    """File name -> text of the Python code that came with a model and made its classes; ``config`` then names it so."""
    made = (config, model)
    if not any(map(_has_own_code, made)):
        return {}
    try:
        with tempfile.TemporaryDirectory() as directory:
            _write_code(Path(directory), config, made)
            return {file.name: file.read_text(encoding="utf-8") for file in Path(directory).glob("*.py")}
    except OSError as error:
        log.warning("checkpoints will lack the model's own code, which cannot be read: %s", error)
        return {}


def _has_own_code(made: object) -> bool:
    return getattr(made, "_auto_class", None) is not None  # what transformers' own save_pretrained goes by


def _write_code(directory: Path, config: PreTrainedConfig, objects: Sequence[object]) -> None:
    for made in objects:
        if _has_own_code(made):
            custom_object_save(made, directory, config=config)


def _write_tokenizer(out: Path, source: str | Path, trust_remote_code: bool) -> None:
    directory = resolve_directory(source)
    if has_tokenizer(directory):
        try:
            read_tokenizer(directory, trust_remote_code).save_pretrained(out)
        except ValueError as problem:
            log.warning("%s has the weights, but no tokenizer: %s", out, problem)


@contextmanager
def _staging(out: Path) -> Iterator[Path]:
    """A directory inside ``out``, gone at the end; left-overs of a killed save go as well."""
    for leftover in out.glob(f"{STAGING_PREFIX}*"):
        shutil.rmtree(leftover)
    staging = Path(tempfile.mkdtemp(prefix=STAGING_PREFIX, dir=out))
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _publish(staging: Path, out: Path) -> None:
    """Put the new files in the place of the old, so that at no moment old and new weights are mixed."""
    new = sorted(staging.iterdir(), key=lambda path: path.name in (SINGLE_FILE, INDEX_FILE))
    for path in new:
        flush(path)
    # The files that name the weights go first and come last.
    for name in (SINGLE_FILE, INDEX_FILE):
        (out / name).unlink(missing_ok=True)
    for path in out.iterdir():
        if SHARD_FILE.fullmatch(path.name):
            path.unlink()
    for path in new:
        os.replace(path, out / path.name)
    flush(out)
