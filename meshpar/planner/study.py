"""What the forecasts of one model's meshes share, each part worked out once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from transformers import PreTrainedModel

from ..anatomy import dissect
from ..config import ParallelConfig, num_layers
from ..flow import Flow
from ..stages import StageRange, stage_ranges
from ..tp_plan import needs_flow
from .activations import Activations, measure
from .communication import Microbatches, Share, Traffic, clip_traffic, step_traffic
from .memory import MemoryOfRank, memory_of_ranks
from .skeleton import Skeleton, lay_out, no_network, staged, standing_for, without_alike
from .work import ModelWork, model_work

Found = TypeVar("Found")


@dataclass
class Study:
    """A model on the meta device, sequences of ``seq_len``, and what was found of it so far.

    ``packed``: rows hold several documents. ``kernels``: whose attention, "cuda" or "cpu". What cannot be laid out
    raises ValueError, every time it is asked for.
    """

    model: PreTrainedModel
    seq_len: int
    packed: bool = False
    kernels: str = "cuda"
    _flow: Flow | None = None
    _known: dict[Hashable, Any] = field(default_factory=dict)

    @property
    def layers(self) -> int:
        """Decoder layers."""
        return num_layers(self.model.config.get_text_config()) or 1

    def skeleton(self, config: ParallelConfig) -> Skeleton:
        """The layout of a resolved ``config``."""
        key = ("staged", *_layout_key(config), config.pp, config.virtual_stages, config.schedule, config.stage_layers)
        return self._once(key, lambda: staged(self._base(config), self._ranges(config), config))

    def work(self, config: ParallelConfig) -> ModelWork:
        """The arithmetic of each layer on a tp rank."""
        key = ("work", *_layout_key(config), config.compile)
        return self._once(key, lambda: self._work(config))

    def rough_work(self, config: ParallelConfig) -> ModelWork:
        """The same with every matrix divided by tp, without what a layout fills up: no more than `work`."""
        key = ("rough", config.tp, config.sequence_parallel, config.compile, config.compute_dtype)
        return self._once(key, lambda: model_work(self.model, config, self.seq_len))

    def activations(self, config: ParallelConfig, rows: int) -> Activations:
        """What a microbatch of ``rows`` keeps."""
        key = ("activations", *_layout_key(config), config.activation_checkpoint, config.pp > 1, rows)
        return self._once(key, lambda: self._measure(config, rows))

    def memory(self, config: ParallelConfig, batch: Microbatches) -> Iterator[MemoryOfRank]:
        """Memory of one rank after another."""
        count = in_a_pass(config, batch) if config.pp > 1 else batch.count
        return memory_of_ranks(self.skeleton(config), config, self.activations(config, batch.rows), count)

    def stage_layers(self, config: ParallelConfig) -> list[int]:
        """Decoder layers of each stage."""
        key = ("counts", config.num_stages, config.stage_layers)
        return self._once(key, lambda: [r.stop - r.start for r in self._ranges(config)])

    def traffic(self, config: ParallelConfig, batch: Microbatches, pp_rank: int) -> list[Traffic]:
        """What a pp rank sends in a step and the clipping of its gradients."""
        skeleton = self.skeleton(config)
        share = share_of(skeleton, self.work(config).hidden, pp_rank)
        sent = step_traffic(config, share, batch, skeleton.stage_ranks, pp_rank)
        sums: dict[tuple[str, str], int] = {}
        for one in (*sent, *clip_traffic(config)):
            sums[one.kind, one.dim] = sums.get((one.kind, one.dim), 0) + one.bytes
        return [Traffic(kind, dim, count) for (kind, dim), count in sums.items()]

    def _base(self, config: ParallelConfig) -> Skeleton:
        """The layout of any pipeline."""

        def lay_out_one() -> Skeleton:
            with no_network(config.tp) as mesh:
                return self._on(mesh, config)

        return self._once(("layout", *_layout_key(config)), lay_out_one)

    def _on(self, mesh: Any, config: ParallelConfig) -> Skeleton:
        skeleton = lay_out(self.model, config, mesh, partial(self._examined, config), self._flow)
        if needs_flow(config):
            self._flow = skeleton.plan.flow
        return skeleton

    def _examined(self, config: ParallelConfig, find: Callable[[], Any]) -> Any:
        return self._once(("examined", *_layout_key(config)), find)

    def _measure(self, config: ParallelConfig, rows: int) -> Activations:
        kinds = self._base(config).kinds
        with no_network(config.tp) as mesh:
            few = replace(self._of_few_layers(mesh, config, kinds), kinds=kinds)
            return measure(few, config, rows, self.seq_len, packed=self.packed, device=self.kernels)

    def _of_few_layers(self, mesh: Any, config: ParallelConfig, kinds: list[int]) -> Skeleton:
        """The layout of what is left of a model without layers that others stand for."""
        model = self._once(("few", *kinds), lambda: without_alike(self.model, kinds))
        left = {*standing_for(kinds), None}

        def once(find: Callable[[], Any]) -> Any:
            flow, opened, blocks = self._examined(config, find)
            index = dissect(model).layer_index
            return flow, opened, {name: block for name, block in blocks.items() if index(name) in left}

        return lay_out(model, config, mesh, once, self._flow)

    def _work(self, config: ParallelConfig) -> ModelWork:
        shapes = {name: spec.local_shape for name, spec in self._base(config).specs.items()}
        return model_work(self.model, config, self.seq_len, shapes)

    def _ranges(self, config: ParallelConfig) -> list[StageRange]:
        if needs_flow(config) and self._flow is None:
            self._base(config)
        flow = self._flow if needs_flow(config) and self._flow else Flow()
        key = ("ranges", config.num_stages, config.stage_layers)
        return self._once(key, lambda: stage_ranges(self.model, dissect(self.model), config, flow))

    def _once(self, key: Hashable, find: Callable[[], Found]) -> Found:
        """What ``find`` returns, or raises."""
        if key not in self._known:
            try:
                self._known[key] = find()
            except ValueError as error:
                self._known[key] = error
        found: Found = self._known[key]
        if isinstance(found, ValueError):
            raise found
        return found


def in_a_pass(config: ParallelConfig, batch: Microbatches) -> int:
    """Microbatches of one run of the schedule."""
    return min(config.microbatches or batch.count, batch.count)


def share_of(skeleton: Skeleton, hidden: int, pp_rank: int) -> Share:
    """What a pp rank holds."""
    held = [w for w in skeleton.weights if pp_rank in w.ranks]
    layers: dict[int, list[tuple[int, int]]] = {}
    for w in held:
        if isinstance(w.part, int):
            layers.setdefault(w.part, []).append((w.rows, w.width))
    return Share(
        hidden,
        list(layers.values()),
        rest=[(w.rows, w.width) for w in held if not isinstance(w.part, int)],
        partial=[(w.rows, w.width) for w in held if w.partial],
        copied=[(w.rows, w.width) for w in held if len(w.ranks) > 1],
    )


def _layout_key(config: ParallelConfig) -> tuple[Hashable, ...]:
    return (
        config.tp,
        config.sequence_parallel,
        needs_flow(config),
        config.param_dtype,
        config.compute_dtype,
    )
