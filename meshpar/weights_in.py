"""Weights in: one small protocol, three sources (safetensors files, a state dict, random numbers).

A source hands out any slice of any tensor by its Hugging Face name: a rank reads the shards it owns and no
more.
"""

from __future__ import annotations

import copy
import hashlib
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from .weights_files import listed, resolve_directory, scan

Index = tuple[slice, ...]

# Buffers that old checkpoints carry and every model now computes; transformers passes them over too.
COMPUTED_BUFFERS = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")


class WeightSource(Protocol):
    """Named tensors that can be read slice by slice.

    ``names`` are the tensors it holds; ``bytes_read`` counts the bytes of tensor data handed out so far.
    """

    names: frozenset[str]
    bytes_read: int

    def shape(self, name: str) -> torch.Size:
        """Shape of the whole tensor; KeyError for an unknown name."""
        ...

    def read(self, name: str, index: Index | None = None) -> Tensor:
        """The tensor, or the part ``index`` selects (one slice a leading dimension), in the source's dtype.

        The result is contiguous and the caller's own. KeyError for an unknown name.
        """
        ...


class SafetensorsSource:
    """The safetensors weights of a Hugging Face directory or hub id: one file, or an index and its shards.

    Every header is checked against its file's size when the source is made, also in files this rank never
    reads. Files are memory-mapped on first use. A slice of rows touches its own pages and no others; a slice
    of columns maps the whole tensor (the kernel maps 16 pages around each row's part), but only the slice is
    copied. ``widen``: bfloat16 and float16 come in float32, in the same pass over the data.

    Raises ValueError, naming the file, when there are no safetensors weights or they are damaged.
    """

    def __init__(self, path_or_hub_id: str | Path, widen: bool = False) -> None:
        self._wide = {torch.bfloat16: torch.float32, torch.float16: torch.float32} if widen else {}
        self.directory = resolve_directory(path_or_hub_id)
        self._tensors = scan(self.directory)
        self._open: dict[Path, safe_open] = {}
        self.names = frozenset(self._tensors)
        self.bytes_read = 0

    def check(self) -> None:
        """Compare every header with its file's size once more; raises ValueError naming a damaged file."""
        scan(self.directory)

    def shape(self, name: str) -> torch.Size:
        """Shape of the whole tensor; KeyError for an unknown name."""
        return torch.Size(self._tensors[name].shape)

    def read(self, name: str, index: Index | None = None) -> Tensor:
        """The tensor or a slice of it, on the CPU, in the file's dtype unless that is widened."""
        mapped: Tensor = self._handle(self._tensors[name].file).get_slice(name)[index or ()]
        self.bytes_read += mapped.nbytes
        dtype = self._wide.get(mapped.dtype, mapped.dtype)
        # A view of the mapping would die with a file that is rewritten in place.
        return mapped.to(dtype, copy=True, memory_format=torch.contiguous_format)

    def _handle(self, file: Path) -> safe_open:
        if file not in self._open:
            try:
                self._open[file] = safe_open(file, framework="pt")
            except SafetensorError as error:
                raise ValueError(f"{file} is damaged: {error}") from error
        return self._open[file]


class StateDictSource:
    """Tensors that are in memory already: a built model's, or a state dict's, on the CPU or a device.

    Raises ValueError when tensors are on the meta device, where they have no values.
    """

    def __init__(self, model_or_state_dict: nn.Module | Mapping[str, Tensor]) -> None:
        given = model_or_state_dict
        self._tensors: dict[str, Tensor] = given.state_dict() if isinstance(given, nn.Module) else dict(given)
        empty = [name for name, tensor in self._tensors.items() if tensor.is_meta]
        if empty:
            raise ValueError(f"these tensors are on the meta device and hold no values: {listed(empty)}")
        self.names = frozenset(self._tensors)
        self.bytes_read = 0

    def shape(self, name: str) -> torch.Size:
        """Shape of the whole tensor; KeyError for an unknown name."""
        return self._tensors[name].shape

    def read(self, name: str, index: Index | None = None) -> Tensor:
        """A copy of the tensor or of a slice of it, on its own device and in its own dtype."""
        part = self._tensors[name].detach()[index or ()]
        self.bytes_read += part.nbytes
        return part.clone(memory_format=torch.contiguous_format)


class RandomSource:
    """Random weights as ``model._init_weights`` draws them, each a function of (seed, parameter name) alone.

    ``meta_model`` is a whole model on the meta device (real buffers are fine); a copy of it is kept, so later
    changes to it do not matter. Parameters come in float32 on the CPU; reading a slice draws the whole
    parameter. Raises ValueError when the model's parameters are not on the meta device.
    """

    def __init__(self, meta_model: PreTrainedModel, seed: int = 0) -> None:
        if not all(parameter.is_meta for parameter in meta_model.parameters()):
            raise ValueError("random weights are drawn for a model on the meta device; this one has values already")
        self._model = copy.deepcopy(meta_model)
        self._seed = seed
        self._tied = dict(getattr(meta_model, "all_tied_weights_keys", {}))
        self._shapes = {name: tensor.shape for name, tensor in meta_model.state_dict().items()}
        self.names = frozenset(self._shapes)
        self.bytes_read = 0
        # transformers' init functions pass flagged tensors over: only the one being drawn uses the generator.
        for tensor in chain(self._model.parameters(), self._model.buffers()):
            tensor._is_hf_initialized = True  # type: ignore[attr-defined]

    def shape(self, name: str) -> torch.Size:
        """Shape of the whole tensor; KeyError for an unknown name."""
        return self._shapes[name]

    def read(self, name: str, index: Index | None = None) -> Tensor:
        """The tensor or a slice of it; ValueError for one that the model's initialisation does not set."""
        if name not in self.names:
            raise KeyError(name)
        full = self._draw(self._tied.get(name, name))
        part = full if index is None else full[index].clone(memory_format=torch.contiguous_format)
        self.bytes_read += part.nbytes
        return part

    def _draw(self, name: str) -> Tensor:
        path, _, leaf = name.rpartition(".")
        owner = self._model.get_submodule(path)
        table: dict[str, Any] = owner._parameters if leaf in owner._parameters else owner._buffers
        absent = table[leaf]
        if not absent.is_meta:
            return absent.clone()
        # NaN shows what no initialiser wrote.
        table[leaf] = nn.Parameter(torch.full(absent.shape, math.nan, dtype=torch.float32, device="cpu"), False)
        try:
            self._initialise(path, _stable_hash(self._seed, name))
            drawn = table[leaf].detach()
        finally:
            table[leaf] = absent
        if drawn.isnan().any():
            raise ValueError(
                f"{type(self._model).__name__} has no rule for random values of {name}; build the model on "
                "the CPU with its own constructor and pass that, or load weights from a directory"
            )
        return drawn

    def _initialise(self, path: str, seed: int) -> None:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.default_generator.manual_seed(seed)
            for module, init_weights in self._initialisers(path):
                init_weights(module)

    def _initialisers(self, path: str) -> list[tuple[nn.Module, Callable[[nn.Module], None]]]:
        """The owner first, then each module around it (GPT-2's attention rescales its child's projection).

        A module is initialised by the innermost PreTrainedModel around it, as ``initialize_weights`` does.
        """
        outer_first = []
        init_weights = self._model._init_weights
        module = self._model
        for part in ["", *path.split(".")] if path else [""]:
            module = getattr(module, part) if part else module
            init_weights = module._init_weights if isinstance(module, PreTrainedModel) else init_weights
            outer_first.append((module, init_weights))
        return outer_first[::-1]


def resolve_prefix(
    names: Iterable[str], wanted: Collection[str], base_model_prefix: str, tied: Mapping[str, str]
) -> dict[str, str]:
    """Name in the model -> name in the source, for every name of the source.

    A directory saved from the bare base model lacks the prefix ("layers.0..." for "model.layers.0..."), one
    saved with a head and read into the base model has one too many; both ways as transformers does it. Names
    unknown to the model map to themselves. ``tied`` maps an alias to the name it shares its tensor with; if
    the source holds only one of them, both map to it. Raises ValueError when two names of the source mean the
    same tensor.
    """
    resolved: dict[str, str] = {}
    for name in sorted(names):
        target = _with_prefix_of(wanted, name, f"{base_model_prefix}.")
        if target in resolved:
            raise ValueError(f"the weights hold {target} twice, as {resolved[target]} and as {name}")
        resolved[target] = name
    shared = {tied.get(target, target): name for target, name in resolved.items()}
    for name in {*tied, *tied.values()}:
        if tied.get(name, name) in shared:
            resolved.setdefault(name, shared[tied.get(name, name)])
    return resolved


def _with_prefix_of(wanted: Collection[str], name: str, prefix: str) -> str:
    if name.startswith(prefix) and name.removeprefix(prefix) in wanted:
        return name.removeprefix(prefix)
    return prefix + name if name not in wanted and prefix + name in wanted else name


def check_names(
    source_names: Collection[str],
    wanted: Collection[str],
    tied: Mapping[str, str],
    model_label: str,
    ignored: Iterable[str] = (),
) -> None:
    """Refuse a source whose tensors are not the model's: ValueError with the names missing and left over.

    ``source_names`` are in the model's spelling (the keys of resolve_prefix's map). ``tied`` maps an alias to
    the name it shares its tensor with; one of the two is enough, both are fine. ``ignored`` are patterns of
    names that may be left over: the model's ``_keys_to_ignore_on_load_unexpected``.
    """
    ignore = re.compile("|".join(f"({pattern})" for pattern in (*COMPUTED_BUFFERS, *ignored)))
    held = {tied.get(name, name) for name in source_names}
    needed = {tied.get(name, name) for name in wanted}
    missing = [name for name in wanted if tied.get(name, name) not in held]
    surplus = [name for name in source_names if tied.get(name, name) not in needed and not ignore.search(name)]
    problems = [f"missing in the weights: {listed(missing)}"] if missing else []
    problems += [f"left over in the weights: {listed(surplus)}"] if surplus else []
    if problems:
        raise ValueError(f"the weights are not those of {model_label}; " + "; ".join(problems))


def check_shapes(source: WeightSource, resolved: Mapping[str, str], shapes: Mapping[str, torch.Size]) -> None:
    """Raise ValueError naming tensors whose shape is not the model's; ``resolved`` is from resolve_prefix."""
    wrong = [
        f"{name} (weights {tuple(source.shape(resolved[name]))}, model {tuple(shape)})"
        for name, shape in shapes.items()
        if name in resolved and source.shape(resolved[name]) != shape
    ]
    if wrong:
        raise ValueError(f"wrong shapes in the weights: {listed(wrong)}")


def check_tied(source: WeightSource, resolved: Mapping[str, str], tied: Mapping[str, str], rows: int = 4096) -> None:
    """Raise ValueError when a source holds both names of a tied tensor with different values.

    transformers then keeps them apart, so tying them would train another model than the files describe. Reads
    both, ``rows`` rows at a time.
    """
    for alias, name in tied.items():
        if name not in resolved or resolved[alias] == resolved[name]:
            continue
        for start in range(0, source.shape(resolved[name])[0], rows):
            index = (slice(start, start + rows),)
            if not torch.equal(source.read(resolved[alias], index), source.read(resolved[name], index)):
                raise ValueError(
                    f"{alias} and {name} are tied by the config but differ in the weights; set "
                    "tie_word_embeddings to false in config.json, or remove the wrong one from the weights"
                )


def _stable_hash(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little")
