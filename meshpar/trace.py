"""Module outputs of the mesh put back together, beside those of the unmodified model: where do they part?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from .layout import Layout
from .model import ParallelModel
from .split import Hole
from .tp_plan import Plan

# Outputs of the same module in float32 in another order of summation; a wrong one is off by far more.
_OUTPUT_BAR = 1e-3

Recorded = dict[str, list[Tensor]]


@contextmanager
def record_outputs(parallel: ParallelModel, names: list[str]) -> Iterator[Recorded]:
    """Record the outputs of this rank's modules ``names``, a list in microbatch order each, while the context lasts."""
    recorded: Recorded = {}
    with _hooks(parallel._runner.model, names, recorded):
        yield recorded


@contextmanager
def _hooks(model: nn.Module, names: list[str], recorded: Recorded) -> Iterator[None]:
    modules = dict(model.named_modules())
    handles = []
    for name in names:
        if name in modules and not isinstance(modules[name], Hole):
            keep = _keeper(recorded, name)
            handles.append(modules[name].register_forward_hook(keep))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _keeper(recorded: Recorded, name: str):
    def keep(module: nn.Module, args: tuple, out) -> None:
        out = out[0] if isinstance(out, tuple) else out
        if isinstance(out, Tensor) and out.is_floating_point():
            recorded.setdefault(name, []).append(out.detach().cpu())

    return keep


def gather_outputs(parallel: ParallelModel, recorded: Recorded, rows: int) -> dict[str, Tensor]:
    """On rank 0: module name -> its whole output for the global batch of ``rows`` rows; {} elsewhere. Collective."""
    mesh = parallel._mesh
    where = {dim: mesh.rank(dim) for dim in ("pp", "dp", "tp")}
    own = {name: torch.cat(parts)[: rows // mesh.size("dp")] for name, parts in recorded.items()}
    everyone = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object((where, own), everyone, dst=0)
    if everyone is None:
        return {}
    pieces: dict[str, dict[tuple[int, int], Tensor]] = {}
    for at, outputs in everyone:
        for name, value in outputs.items():
            pieces.setdefault(name, {})[at["dp"], at["tp"]] = value
    return {name: _join(parallel, name, of) for name, of in pieces.items()}


def _join(parallel: ParallelModel, name: str, pieces: Mapping[tuple[int, int], Tensor]) -> Tensor:
    dp, tp = parallel._mesh.size("dp"), parallel._mesh.size("tp")
    return torch.cat([_join_tp(parallel, name, [pieces[d, t] for t in range(tp)]) for d in range(dp)])


def _join_tp(parallel: ParallelModel, name: str, parts: list[Tensor]) -> Tensor:
    """Outputs of the tp ranks: split features (a colwise projection), sequence shards, or the same whole tensor."""
    style = parallel.plan.get(name)
    if style is not None and not isinstance(style, str):  # a caller's torch style does what the model's own would
        style = parallel.plan.roles[name]
    layout = parallel._full.specs[f"{name}.weight"].layout if f"{name}.weight" in parallel._full.specs else None
    if len(parts) == 1:
        return parts[0]
    if style in ("colwise", "pair_in", "vocab_head", "colwise_norm"):
        return _join_features(parts, layout)
    if style == "embedding_rowwise" and parallel._runner.tp.sum_at_layers:
        return torch.stack(parts).sum(0)
    inside = parallel.plan.block_of(name) not in (None, name)
    sharded = style != "embedding_rowwise" and not (inside and style != "rowwise")
    if sharded and parallel._runner.tp.sequence_parallel:
        return torch.cat(parts, dim=1)[:, : parallel._runner.tp.seq_len]
    return parts[0]


def _join_features(parts: list[Tensor], layout: Layout) -> Tensor:
    """A rank's features lie as its weight's rows do."""
    found = [
        (s.origin, own[..., s.start : s.real])
        for rank, own in enumerate(parts)
        for s in layout.stored(rank, (0, layout.local))
        if s.part.is_first_copy(rank)
    ]
    return torch.cat([piece for _, piece in sorted(found, key=lambda item: item[0])], dim=-1)


def comparable(parallel: ParallelModel) -> list[str]:
    """Modules whose outputs can be put back together; not what a block uses on its own heads, or sums only later."""
    plan = parallel.plan
    whole = tuple(f"{n}." for n, style in plan.items() if style == "whole")
    names = [n for n in plan if not n.startswith(whole) and _can_be_joined(plan, n)]
    return names + [plan.anatomy.layer(i) for i in range(plan.anatomy.num_layers)]


def _can_be_joined(plan: Plan, name: str) -> bool:
    block = plan.block_of(name)
    if block in (None, name):
        return True
    role = plan.roles[name]
    return role in ("colwise", "colwise_norm") or (role == "rowwise" and plan.blocks[block].style == "block")


def run_order(reference: PreTrainedModel, batch: Mapping[str, Tensor], names: list[str]) -> Recorded:
    """The outputs of the reference's modules ``names``, in the order in which they finish."""
    recorded: Recorded = {}
    device = next(reference.parameters()).device
    inputs = {k: v.to(device) for k, v in batch.items() if k != "labels"}
    with torch.no_grad(), _hooks(reference, names, recorded):
        reference(**inputs, use_cache=False)
    return recorded


def first_difference(recorded: Recorded, outputs: Mapping[str, Tensor]) -> tuple[str, float] | None:
    """The first module, in the order the reference runs them, whose output is not the reference's, and how far off."""
    for name, (want, *_) in recorded.items():
        got = outputs.get(name)
        if got is None:
            continue
        distance = ((got - want).norm() / want.norm().clamp(min=1e-12)).item() if got.shape == want.shape else 1.0
        if distance > _OUTPUT_BAR:
            return name, distance
    return None
