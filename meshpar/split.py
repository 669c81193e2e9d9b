"""Pipeline stages: which layers go where, and one skeleton that runs as any of its stages.

A rank keeps one Hugging Face model. Layers of other ranks become holes that return their hidden states unchanged, so
layer indices, parameter names and `config.layer_types[i]` stay what they are. To run as one of its stages the model
swaps in a layer list with holes around that stage's layers and calls its own unmodified forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import ScheduleDualPipeV, ScheduleZBVZeroBubble, get_schedule_class
from transformers import PreTrainedModel

from .anatomy import Anatomy
from .config import ParallelConfig
from .styles import TensorParallel, map_hidden


def layer_costs(model: PreTrainedModel, anatomy: Anatomy) -> tuple[list[float], float]:
    """Forward multiply-adds a token of each decoder layer, and of the head: weights alone, as scores are alike."""
    layers = [
        float(sum(p.numel() for p in model.get_submodule(anatomy.layer(i)).parameters() if p.ndim > 1))
        for i in range(anatomy.num_layers)
    ]
    head = sum(p.numel() for p in model.get_submodule(anatomy.head).parameters() if p.ndim > 1)
    return layers, float(head)


def balance(costs: list[float], last: float, stages: int) -> list[int]:
    """Layers per stage, in order, at least one each, with the dearest stage as cheap as can be.

    ``last`` is what the last stage carries besides its layers. Among equals the most even split wins.
    """
    prefix = [0.0]
    for cost in costs:
        prefix.append(prefix[-1] + cost)
    n = len(costs)
    best: list[dict[int, tuple[tuple[float, float], int]]] = [
        {n: ((0.0, 0.0), n)}
    ]  # by stages from the end: start -> cost
    for k in range(1, stages + 1):
        row: dict[int, tuple[tuple[float, float], int]] = {}
        extra = last if k == 1 else 0.0
        for start in range(stages - k, n - k + 1):
            options = []
            for stop, ((worst, squares), _) in best[-1].items():
                if stop > start:
                    cost = prefix[stop] - prefix[start] + extra
                    options.append(((max(worst, cost), squares + cost * cost), stop))
            if options:
                row[start] = min(options)
        best.append(row)
    counts, start = [], 0
    for k in range(stages, 0, -1):
        stop = best[k][start][1]
        counts.append(stop - start)
        start = stop
    return counts


@dataclass(frozen=True)
class StageRange:
    """Decoder layers ``start`` to ``stop`` are stage ``index`` of ``count``."""

    index: int
    count: int
    start: int
    stop: int

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1


def stage_ranges(model: PreTrainedModel, anatomy: Anatomy, config: ParallelConfig) -> list[StageRange]:
    """All stages in order: by `config.stage_layers`, else balanced by FLOPs with the head counted."""
    count = config.num_stages if config.pp > 1 else 1
    layers = (
        list(config.stage_layers)
        if config.stage_layers and config.pp > 1
        else balance(*layer_costs(model, anatomy), count)
    )
    starts = [sum(layers[:i]) for i in range(count + 1)]
    return [StageRange(i, count, starts[i], starts[i + 1]) for i in range(count)]


def stages_of_rank(config: ParallelConfig, pp_rank: int) -> list[int]:
    """Stage indices on a pp rank: every pp-th one, or both arms of a V where the schedule is one."""
    if config.pp == 1:
        return [0]
    if is_v_schedule(config.schedule):
        return [pp_rank, 2 * config.pp - 1 - pp_rank]
    return [pp_rank + v * config.pp for v in range(config.virtual_stages)]


def stage_ranks(config: ParallelConfig) -> list[int]:
    """pp rank of each stage, in stage order."""
    rank_of = {stage: rank for rank in range(config.pp) for stage in stages_of_rank(config, rank)}
    return [rank_of[i] for i in range(len(rank_of))]


def is_v_schedule(name: str) -> bool:
    """Whether a rank holds stages i and 2 pp - 1 - i, so that the first and the last stage share a rank."""
    return issubclass(get_schedule_class(name), (ScheduleZBVZeroBubble, ScheduleDualPipeV))


class Hole(nn.Module):
    """Stands for a decoder layer of another stage: returns its hidden states, shows the layer's plain attributes."""

    def __init__(self, layer: nn.Module | None = None) -> None:
        super().__init__()
        for key, value in vars(layer).items() if layer is not None else ():
            if not key.startswith("_") and key != "forward":
                setattr(self, key, value)

    def forward(self, *args, **kwargs):
        return args[0] if args else kwargs["hidden_states"]


class Injection(Hole):
    """The hole before a stage's first layer: returns what the previous stage sent instead of its own input."""

    received: Tensor | None = None

    def forward(self, *args, **kwargs):
        return self.received


@dataclass
class Stage:
    """One pipeline stage of a skeleton: its range and what to swap in to run it."""

    range: StageRange
    swaps: list[tuple[nn.Module, str, nn.Module]] = field(default_factory=list)
    injection: Injection | None = None
    captured: Tensor | None = None

    @contextmanager
    def active(self) -> Iterator[None]:
        """The skeleton shows only this stage's layers while the context lasts."""
        before = [parent._modules[name] for parent, name, _ in self.swaps]
        for parent, name, module in self.swaps:
            parent._modules[name] = module
        try:
            yield
        finally:
            for (parent, name, _), module in zip(self.swaps, before, strict=True):
                parent._modules[name] = module
            self.captured = None
            if self.injection is not None:
                self.injection.received = None


def split_model(model: PreTrainedModel, anatomy: Anatomy, own: list[StageRange]) -> list[Stage]:
    """Cut ``model`` in place down to the stages ``own`` and return them; parts of other ranks become holes."""
    layers = model.get_submodule(anatomy.layers)
    count = own[0].count
    holes = [Hole(layer) for layer in layers]
    kept = {i for r in own for i in range(r.start, r.stop)}
    for i in range(anatomy.num_layers):
        if i not in kept:
            layers[i] = holes[i]
    has_first, has_last = any(r.is_first for r in own), any(r.is_last for r in own)
    if not has_last:
        for name in (*anatomy.tail, anatomy.head):
            _replace(model, name, Hole())
    if not has_first and not (has_last and anatomy.tied):
        _replace(model, anatomy.embedding, Hole())
    return [_make_stage(model, anatomy, r, holes) if count > 1 else Stage(r) for r in own]


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, module)


def _make_stage(model: PreTrainedModel, anatomy: Anatomy, r: StageRange, holes: list[Hole]) -> Stage:
    layers = model.get_submodule(anatomy.layers)
    stage = Stage(r)
    shown: list[nn.Module] = [layers[i] if r.start <= i < r.stop else holes[i] for i in range(anatomy.num_layers)]
    if not r.is_first:
        stage.injection = Injection(holes[r.start - 1])
        shown[r.start - 1] = stage.injection
    owner, _, leaf = anatomy.layers.rpartition(".")
    stage.swaps.append((model.get_submodule(owner), leaf, nn.ModuleList(shown)))
    if not r.is_last:
        layers[r.stop - 1].register_forward_hook(lambda _, args, out: _capture(stage, out))
        for name in (*anatomy.tail, anatomy.head):
            owner, _, leaf = name.rpartition(".")
            stage.swaps.append((model.get_submodule(owner), leaf, Hole()))
    return stage


def _capture(stage: Stage, output: Tensor) -> None:
    if not isinstance(output, Tensor):
        raise ValueError(
            f"a decoder layer returned a {type(output).__name__}; meshpar pipelines models whose layers return one "
            "tensor"
        )
    stage.captured = output


class Runner(nn.Module):
    """The FSDP root: runs the skeleton as one of its stages."""

    def __init__(self, model: PreTrainedModel, anatomy: Anatomy, stages: list[Stage], tp: TensorParallel) -> None:
        super().__init__()
        self.model = model
        self.anatomy, self.stages, self.tp = anatomy, stages, tp
        first = next((s for s in stages if s.range.is_first), None)
        if first is not None and tp.sequence_parallel:
            layer = model.get_submodule(anatomy.layer(0))
            layer.register_forward_pre_hook(lambda _, a, k: map_hidden(a, k, tp.split), with_kwargs=True)

    def own_layers(self) -> list[nn.Module]:
        """The decoder layers this rank holds, in order."""
        ranges = sorted((s.range.start, s.range.stop) for s in self.stages)
        return [self.model.get_submodule(self.anatomy.layer(i)) for a, b in ranges for i in range(a, b)]

    def forward(self, index: int, x: Tensor, **inputs) -> Tensor:
        """Run stage ``index``: ``x`` is input_ids [b, s] on the first, hidden states on the others.

        Returns hidden states for the next stage ([b, s, h], or this rank's sequence shard of them), or on the last
        stage the logits [b, s, local vocabulary].
        """
        stage = next(s for s in self.stages if s.range.index == index)
        self.tp.seq_len = inputs.pop("seq_len")
        with stage.active():
            if stage.range.is_first:
                entry = {"input_ids": x}
            else:
                stage.injection.received = x
                # Only the shape is read: masks and positions come from it; the first hole returns the real ones.
                blank = x.new_zeros(1, 1, 1).expand(x.shape[0], self.tp.seq_len, x.shape[-1])
                entry = {"inputs_embeds": blank}
            target = self.model if stage.range.is_last else self.model.get_submodule(self.anatomy.base)
            output = target(**entry, **inputs, use_cache=False)
            return output.logits if stage.range.is_last else _differentiable(stage.captured)


def _differentiable(hidden: Tensor) -> Tensor:
    """A stage whose parameters are all frozen still gets a gradient sent back, and needs somewhere to put it."""
    return hidden if hidden.requires_grad or not torch.is_grad_enabled() else hidden.detach().requires_grad_()
