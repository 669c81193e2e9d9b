"""Memory of every rank of a mesh, by component, at the moment of a training step at which it holds most.

Parameters, gradients and AdamW's states follow from the skeleton and FSDP's split of rows, and are exact. What a step
holds beside them is in `step_memory`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..config import ParallelConfig
from .activations import Activations
from .orders import schedule_order
from .skeleton import Skeleton, Weight
from .step_memory import Moment, Step

_STEP_COUNT = 4  # bytes of the float32 in which AdamW counts a parameter's steps


@dataclass(frozen=True)
class MemoryOfRank:
    """Bytes of a rank at its heaviest moment, by component; ``count`` ranks are alike, of which this is the first.

    ``gradients``: the shards of all, which a rank has from the second backward on, or, in their place, a part of them
    whole; at the peak of a step of one microbatch they are not there yet, and ``total`` is as much too high.
    ``loss``: what the loss and the head keep and need. ``transient``: all else. ``moment``: "forward", "loss",
    "backward", "reduction" (of gradients over dp) or "optimizer".
    """

    pp: int
    dp: int
    tp: int
    count: int
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    loss: int
    transient: int
    moment: str

    @property
    def total(self) -> int:
        """The sum of all components."""
        return self.state + self.activations + self.loss + self.transient

    @property
    def state(self) -> int:
        """What is held between steps, gradients included."""
        return self.parameters + self.gradients + self.optimizer


def memory_of_ranks(
    skeleton: Skeleton, config: ParallelConfig, activations: Activations, microbatches: int
) -> Iterator[MemoryOfRank]:
    """All ranks, those that are alike once: by pp rank, then by the rank among those that FSDP shards over.

    ``microbatches``: of one data-parallel rank in a step, as many as ``activations`` was measured for one of.
    """
    order = schedule_order(config, microbatches) if config.pp > 1 else None
    for pp_rank in range(config.pp):
        weights = [w for w in skeleton.weights if pp_rank in w.ranks]
        step = Step(skeleton, config, activations, microbatches, weights, pp_rank)
        actions = [a for action in order[pp_rank] for a in action] if order else None
        heaviest = max(step.moments(actions), key=lambda moment: moment.total)
        for dp_rank, alike in _alike_shards(weights, config.dp_shard):
            yield _of_rank(config, weights, heaviest, pp_rank, dp_rank, alike)


def heaviest(ranks: Iterable[MemoryOfRank]) -> MemoryOfRank:
    """The rank that needs most memory."""
    return max(ranks, key=lambda rank: rank.total)


def _of_rank(
    config: ParallelConfig, weights: Sequence[Weight], moment: Moment, pp_rank: int, dp_rank: int, alike: int
) -> MemoryOfRank:
    own = [(w, w.shard_bytes(config.dp_shard, dp_rank)) for w in weights]
    parameters, trained = sum(size for _, size in own), sum(size for w, size in own if w.trains)
    optimizer = 2 * trained + _STEP_COUNT * sum(w.trains for w in weights)
    stepping = Moment("optimizer", 0, 0, trained)  # square roots of the second moments, of all parameters at once
    moment = max(moment, stepping, key=lambda m: m.total)
    return MemoryOfRank(
        pp_rank, dp_rank, 0, alike * config.dp_replicate * config.tp, parameters, trained, optimizer,
        moment.activations, moment.loss, moment.transient, moment.name,
    )  # fmt: skip


def _alike_shards(weights: Iterable[Weight], shards: int) -> Iterator[tuple[int, int]]:
    """First of each run of ranks that have as many rows of everything, and the length of the run."""
    starts = {0}
    for rows in {w.rows for w in weights}:
        full = rows // -(-rows // shards)  # ranks with a whole chunk; the next one may have a part of one
        starts |= {start for start in (full, full + 1) if start < shards}
    for start, stop in zip(ordered := sorted(starts), [*ordered[1:], shards], strict=True):
        yield start, stop - start
