"""Checkpoints laid out otherwise than the model: other names, one tensor an expert, projections fused or apart.

transformers keeps, per model type, the renamings and operations between the two layouts. They are run here on tensors
that are not read yet, so a rank still reads only the slices it owns, and a save goes back one tensor at a time.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from .lazy import Index, LazyTensor, Ranges
from .weights_files import listed
from .weights_in import WeightSource
from .weights_out import Entry


class ConvertedSource:
    """``files`` under the names and in the shapes of ``model``, whichever of its layouts they are in.

    ``model`` is a whole model on the meta device; as `from_pretrained` does, the conversions that the files needed are
    noted on it, for saving in the same layout. Names of the files that mean nothing to the model stay as they are.
    Tensors come in the dtype that ``files`` gives. Raises ValueError, naming both sides, where tensors do not fit
    together.
    """

    def __init__(self, files: WeightSource, model: PreTrainedModel) -> None:
        self.files = files
        conversions = get_model_conversion_mapping(model)
        groups, left_over = _group(files, model, conversions)
        self._tensors = {name: _leaf(files, name, torch.float32) for name in left_over}
        for target, (transform, names) in groups.items():
            for name, tensor in _converted(target, transform, names, model).items():
                if name in self._tensors:
                    raise ValueError(f"the weights hold {name} twice, once as {listed(names)}")
                self._tensors[name] = tensor
        self.names = frozenset(self._tensors)
        model._weight_conversions = [c for c in conversions if c.was_used()]

    @property
    def bytes_read(self) -> int:
        """Bytes of tensor data that the files handed out so far."""
        return self.files.bytes_read

    def shape(self, name: str) -> torch.Size:
        """Shape of the whole tensor; KeyError for an unknown name."""
        return self._tensors[name].shape

    def read(self, name: str, index: Index | None = None) -> Tensor:
        """The tensor or a slice of it, contiguous."""
        return self._tensors[name].part(index).contiguous()


Groups = dict[str, tuple[WeightTransform, list[str]]]


def _group(files: WeightSource, model: PreTrainedModel, conversions: list[WeightTransform]) -> tuple[Groups, list[str]]:
    """The files' tensors that make up each tensor of the model (or the first of several), and those that make none.

    The order of names and of attempts is that of transformers' own loading.
    """
    renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
    converters = [c for c in conversions if isinstance(c, WeightConverter)]
    of_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    wanted, prefix = model.state_dict(), model.base_model_prefix
    ignored = re.compile("|".join(f"({p})" for p in model._keys_to_ignore_on_load_unexpected or ()) or r"(?!)")
    groups: Groups = {}
    left_over = []
    for name in sorted(files.names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, wanted)
        if target not in wanted and name in wanted:
            target, pattern = rename_source_key(name, [], [], prefix, wanted)
        if target in wanted:
            if target not in groups:
                groups[target] = (deepcopy(of_pattern[pattern]) if pattern else WeightRenaming(name, target), [])
            transform, names = groups[target]
            if names and not (pattern and isinstance(transform, WeightConverter)):
                raise ValueError(f"the weights hold {target} twice, as {names[0]} and as {name}")
            names.append(name)
            transform.add_tensor(target, name, pattern or name, _leaf(files, name, wanted[target].dtype))
        elif not ignored.search(target):
            left_over.append(name)
    return groups, left_over


def _leaf(files: WeightSource, name: str, dtype: torch.dtype) -> LazyTensor:
    """A tensor of the files. Operations see the model's dtype, as transformers casts first; the caller casts here."""

    def read(ranges: Ranges) -> Tensor:
        return files.read(name, tuple(slice(*r) for r in ranges))

    return LazyTensor(files.shape(name), read, {name}, dtype)


def _converted(
    target: str, transform: WeightTransform, names: list[str], model: PreTrainedModel
) -> dict[str, LazyTensor]:
    try:
        made = transform.convert(target, model=model, config=model.config)
    except Exception as error:  # the operations check little: what a bad file makes them raise can be anything
        raise ValueError(f"{target} cannot be made from the weights {listed(names)}: {error}") from error
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def pin_layout(model: PreTrainedModel) -> None:
    """Note on a whole model in which layout `save_pretrained` writes it, which a cut model no longer tells.

    That of the files it was read from, or transformers' original one. Prefixes then stay as the model has them.
    """
    if getattr(model, "_weight_conversions", None) is None:
        conversions = get_model_conversion_mapping(model, add_legacy=False)
        model._weight_conversions = [c for c in conversions if not isinstance(c, PrefixChange)]


def original_layout(
    model: PreTrainedModel, entries: Sequence[Entry], tensors: Iterable[tuple[str, Tensor | None]]
) -> tuple[list[Entry], Iterator[tuple[str, Tensor | None]]]:
    """Entries and tensors for `write_pretrained` as transformers' ``save_pretrained`` lays them out.

    ``entries`` and ``tensors`` are the model's, as `write_pretrained` takes them. A tensor is held until all those on
    disk that it is a part of are written.
    """
    arrived: dict[str, Tensor | None] = {}
    stored = revert_weight_conversion(model, {name: _pending(arrived, name, shape) for name, shape, _ in entries})
    place, dtypes = {name: i for i, (name, *_) in enumerate(entries)}, {name: dtype for name, _, dtype in entries}
    due: dict[str, dict[str, LazyTensor]] = {name: {} for name in place}
    for name, tensor in stored.items():
        due[max(tensor.sources, key=place.__getitem__)][name] = tensor
    ordered = [(name, t.shape, dtypes[min(t.sources)]) for ready in due.values() for name, t in ready.items()]
    return ordered, _emit(tensors, arrived, due)


def _pending(arrived: dict[str, Tensor | None], name: str, shape: Sequence[int]) -> LazyTensor:
    def read(ranges: Ranges) -> Tensor:
        tensor = arrived[name]
        assert tensor is not None
        return tensor[tuple(slice(*r) for r in ranges)]

    return LazyTensor(shape, read, {name})


def _emit(
    tensors: Iterable[tuple[str, Tensor | None]],
    arrived: dict[str, Tensor | None],
    due: dict[str, dict[str, LazyTensor]],
) -> Iterator[tuple[str, Tensor | None]]:
    """What is due when a tensor of the model arrives; None where the rank that does not write gets None."""
    uses = Counter(source for ready in due.values() for t in ready.values() for source in t.sources)
    for name, tensor in tensors:
        arrived[name] = tensor
        del tensor
        for out, lazy in due.pop(name, {}).items():
            yield out, None if arrived[name] is None else lazy.part()
            uses.subtract(lazy.sources)
            for source in [s for s in lazy.sources if not uses[s]]:
                # What is still to come of this name would be out of step.
                del arrived[source]
