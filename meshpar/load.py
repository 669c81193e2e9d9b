"""Open whatever a user passes as a model: its meta-device skeleton, and where its weights are read from."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from .layout import Stored
from .mesh import Mesh
from .pretrained import read_config, using
from .skeleton import without_parameters
from .styles import ParamSpec
from .weights_convert import ConvertedSource
from .weights_in import (
    RandomSource,
    SafetensorsSource,
    StateDictSource,
    WeightSource,
    check_names,
    check_shapes,
    check_tied,
    resolve_prefix,
)

Built = TypeVar("Built", bound=nn.Module)


@dataclass
class OpenedModel:
    """A model's skeleton (parameters on meta, buffers real) and its weights; ``origin`` has the tokenizer, if any."""

    skeleton: PreTrainedModel
    source: WeightSource
    origin: str | None


def open_model(
    model: str | Path | PreTrainedConfig | PreTrainedModel,
    seed: int = 0,
    widen: bool = False,
    trust_remote_code: bool = False,
) -> OpenedModel:
    """Open a directory or hub id, a config (random weights), or a built model (its weights, or random on meta).

    ``widen``: narrow floats of files come in float32. ``trust_remote_code``: run Python code that the directory holds.
    """
    if isinstance(model, PreTrainedModel):
        skeleton = meta_copy(model)
        on_meta = any(p.is_meta for p in model.parameters())
        source = RandomSource(skeleton, seed) if on_meta else StateDictSource(model)
        return OpenedModel(skeleton, source, getattr(model, "name_or_path", None) or None)
    if isinstance(model, PreTrainedConfig):
        skeleton = skeleton_from_config(model, trust_remote_code)
        return OpenedModel(skeleton, RandomSource(skeleton, seed), None)
    if not isinstance(model, (str, Path)):
        raise TypeError(f"model is a {type(model).__name__}; pass a path, a hub id, a config or a PreTrainedModel")
    files = SafetensorsSource(model, widen)
    skeleton = skeleton_from_config(read_config(files.directory, trust_remote_code), trust_remote_code)
    return OpenedModel(skeleton, ConvertedSource(files, skeleton), str(model))


def skeleton_from_config(config: PreTrainedConfig, trust_remote_code: bool = False) -> PreTrainedModel:
    """The model of ``config`` with parameters on the meta device and buffers, which no file holds, computed.

    Raises ValueError when transformers has no such causal language model, or cannot build it.
    """

    def build() -> PreTrainedModel:
        return AutoModelForCausalLM.from_config(
            copy.deepcopy(config), dtype=torch.float32, trust_remote_code=trust_remote_code
        )

    with using("model", config.name_or_path or f"a {type(config).__name__}", trust_remote_code):
        model = without_parameters(build)
    model.tie_weights()
    return model


def meta_copy(model: Built) -> Built:
    """A copy of a model or a part of one: its modules, flags and buffers, with parameters on the meta device."""
    empty = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        for p in model.parameters()
    }
    return copy.deepcopy(model, memo=dict(empty))


class Reader:
    """Reads this rank's part of each parameter from a source, padding included; checks names and shapes first."""

    def __init__(self, skeleton: PreTrainedModel, source: WeightSource, mesh: Mesh) -> None:
        self.source, self.tp_rank, self.device = source, mesh.rank("tp"), mesh.device
        tied = dict(getattr(skeleton, "all_tied_weights_keys", {}))
        wanted = skeleton.state_dict()
        self.names = resolve_prefix(source.names, wanted, skeleton.base_model_prefix, tied)
        label = type(skeleton).__name__
        check_names(self.names, wanted, tied, label, skeleton._keys_to_ignore_on_load_unexpected or ())
        check_shapes(source, self.names, {n: t.shape for n, t in wanted.items()})
        if tied and isinstance(source, ConvertedSource):
            check_tied(source, self.names, tied)

    def __call__(self, name: str, spec: ParamSpec, rows: tuple[int, int]) -> Tensor:
        """Rows ``rows`` of this rank's tp-local tensor of ``name``, in the source's dtype; on meta, nothing is read."""
        if self.device.type == "meta":
            return torch.empty((rows[1] - rows[0], *spec.local_shape[1:]), device="meta")
        dim, name = spec.layout.dim or 0, self.names[name]
        lead = () if dim == 0 else (slice(*rows), *(slice(None),) * (dim - 1))
        parts = [
            _zero_padded(self._read(name, (*lead, slice(s.origin, s.origin + s.real - s.start))), dim, s)
            for s in spec.layout.stored(self.tp_rank, rows)
        ]
        if not parts:  # FSDP left this rank no rows
            return self._read(name, (slice(0, 0),)).new_zeros((0, *spec.local_shape[1:]))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def _read(self, name: str, index: tuple[slice, ...]) -> Tensor:
        part = self.source.read(name, index)
        if not part.is_floating_point():
            kind = str(part.dtype).removeprefix("torch.")
            raise ValueError(
                f"{name} is stored as {kind}, and weights are floating-point numbers; quantised are not read"
            )
        return part

    def buffer(self, name: str) -> Tensor:
        """A persistent buffer, whole."""
        return self.source.read(self.names[name])


def _zero_padded(own: Tensor, dim: int, stored: Stored) -> Tensor:
    if stored.real == stored.stop:
        return own
    shape = list(own.shape)
    shape[dim] = stored.stop - stored.start
    whole = own.new_zeros(shape)
    whole.narrow(dim, 0, own.shape[dim]).copy_(own)
    return whole


def load_buffers(model: nn.Module, reader: Reader, device: torch.device) -> None:
    """Move buffers to ``device``; those a checkpoint holds are read from it."""
    persistent = set(model.state_dict()) - {n for n, _ in model.named_parameters(remove_duplicate=False)}
    for name, buffer in list(model.named_buffers()):
        owner, _, leaf = name.rpartition(".")
        value = reader.buffer(name).to(buffer.dtype) if name in persistent else buffer
        model.get_submodule(owner)._buffers[leaf] = value.to(device)
