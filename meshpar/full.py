"""Whole tensors of the whole model, one at a time, on rank 0: what exports and parity checks read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from .anatomy import Anatomy, dissect
from .flow import Flow
from .grads import local
from .mesh import Mesh
from .split import shared_names
from .stages import StageRange, stage_of
from .styles import ParamSpec


@dataclass
class FullTensors:
    """The whole model's parameters, by name, and where each lives; made before the model is cut."""

    mesh: Mesh
    anatomy: Anatomy
    flow: Flow
    shapes: dict[str, tuple[int, ...]]
    vocab_size: int
    buffers: dict[str, tuple[tuple[int, ...], torch.dtype]]
    names: dict[str, list[str]]  # of what has several: by the first of them, which is its name everywhere else
    specs: dict[str, ParamSpec] = field(default_factory=dict)
    ranges: list[StageRange] = field(default_factory=list)
    stage_ranks: list[int] = field(default_factory=list)

    @classmethod
    def describe(cls, model: PreTrainedModel, mesh: Mesh, flow: Flow) -> FullTensors:
        """Names and shapes of a whole model: tied tensors once, under the embedding's name; buffers that files hold."""
        params, persistent = dict(model.named_parameters()), model.state_dict()
        return cls(
            mesh,
            dissect(model),
            flow,
            {n: tuple(p.shape) for n, p in params.items()},
            model.get_output_embeddings().weight.shape[0],
            {n: (tuple(b.shape), b.dtype) for n, b in model.named_buffers() if n in persistent},
            {names[0]: names for names in shared_names(model)},
        )

    @property
    def numel(self) -> int:
        """Parameters of the whole model, tied ones once."""
        return sum(torch.Size(shape).numel() for shape in self.shapes.values())

    def holders(self, name: str) -> list[int]:
        """The pp ranks that have parameter ``name``: several where stages share it."""
        return sorted({self._owner(n) for n in self.names.get(name, [name])})

    def gather(self, params: dict[str, nn.Parameter], what: str) -> Iterator[tuple[str, Tensor | None]]:
        """See `ParallelModel.full_tensors`."""
        frozen = self._frozen(params) if what == "grad" else set()
        for name, shape in self.shapes.items():
            if name in frozen:
                continue
            owner = self._owner(name)
            part = None
            if self.mesh.rank("pp") == owner:
                param = params[name]
                value = param if what == "param" else param.grad
                part = self._gather_stage(torch.zeros_like(param) if value is None else value, self.specs[name])
            yield name, self._to_rank0(part, owner, shape, next(iter(params.values())).dtype)

    def gather_buffers(self, buffers: dict[str, Tensor]) -> Iterator[tuple[str, Tensor | None]]:
        """The buffers that files hold, in the same way; a stage's ranks all have its buffers whole."""
        for name, (shape, dtype) in self.buffers.items():
            owner = self._owner(name)
            part = buffers[name].detach() if self.mesh.rank("pp") == owner else None
            yield name, self._to_rank0(part, owner, shape, dtype)

    def _frozen(self, params: dict[str, nn.Parameter]) -> set[str]:
        own = {n for n, p in params.items() if not p.requires_grad}
        everyone: list[set[str]] = [set()] * dist.get_world_size()
        dist.all_gather_object(everyone, own)
        return set().union(*everyone)

    def _owner(self, name: str) -> int:
        return self.stage_ranks[stage_of(name, self.anatomy, self.flow, self.ranges)]

    def _gather_stage(self, value: Tensor, spec: ParamSpec) -> Tensor | None:
        """The tensor in Hugging Face's shape on the first dp and tp rank of a stage, None on its others."""
        mesh, shard_dim = self.mesh, self.mesh.dp_dims[-1]
        if "dp_replicate" in mesh.dp_dims and mesh.rank("dp_replicate") > 0:
            return None
        rows = spec.local_shape[0]
        chunk = -(-rows // mesh.size(shard_dim))
        own = local(value.detach())
        padded = own.new_zeros((chunk, *own.shape[1:]))
        padded[: own.shape[0]] = own
        blocks = _gather(padded, mesh.group(shard_dim))
        if blocks is None:
            return None
        parts = _gather(torch.cat(blocks)[:rows].contiguous(), mesh.group("tp"))
        return None if parts is None else _assemble(parts, spec)

    def _to_rank0(self, part: Tensor | None, owner: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        mesh = self.mesh
        first = all(mesh.rank(d) == 0 for d in (*mesh.dp_dims, "tp"))
        if not first:
            return None
        if owner > 0:
            group = mesh.group("pp")
            if mesh.rank("pp") == owner:
                dist.send(part, group=group, group_dst=0)
            elif mesh.rank("pp") == 0:
                part = torch.empty(shape, dtype=dtype, device=mesh.device)
                dist.recv(part, group=group, group_src=owner)
        return part.cpu() if mesh.rank("pp") == 0 else None


def _gather(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor] | None:
    """Every rank's tensor on the group's first rank, None on the others."""
    first = group.rank() == 0
    parts = [torch.empty_like(tensor) for _ in range(group.size())] if first else None
    dist.gather(tensor, parts, group=group, group_dst=0)
    return parts


def _assemble(parts: list[Tensor], spec: ParamSpec) -> Tensor:
    if spec.layout.dim is None:
        return parts[0]
    whole, dim = parts[0].new_empty(spec.shape), spec.layout.dim
    for rank, own in enumerate(parts):
        for s in spec.layout.stored(rank, (0, own.shape[0])):
            if s.part.is_first_copy(rank):
                length = s.real - s.start
                whole.narrow(dim, s.origin, length).copy_(own.narrow(dim, s.start, length))
    return whole
