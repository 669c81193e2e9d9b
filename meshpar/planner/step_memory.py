"""What a rank holds in a training step beside its state: replayed from the schedule's own order of actions.

Activations are measured (`activations`) and held as long as the order of actions holds them (`orders`). What FSDP and
the pipeline add is worked out from what they do:

    whole weights      a layer and the next one, with what is outside of layers; all, where they stay gathered
    whole gradients    a layer's until they are scattered; all, where they are reduced once a step
    receive buffers    one for each microbatch, for hidden states and for gradients
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter

from ..config import ParallelConfig, torch_dtype
from ..stages import StageRange
from .activations import Activations, Kept
from .simulate import Action, Kind
from .skeleton import Skeleton, Weight


@dataclass(slots=True)  # not frozen, which is slow: a search makes millions
class Moment:
    """What a rank holds at a time beside its state, in bytes."""

    name: str
    activations: int
    loss: int
    transient: int

    @property
    def total(self) -> int:
        return self.activations + self.loss + self.transient

    def __add__(self, other: Moment) -> Moment:
        return Moment(
            self.name or other.name,
            self.activations + other.activations,
            self.loss + other.loss,
            self.transient + other.transient,
        )


_NOTHING = Moment("", 0, 0, 0)
_KINDS: tuple[Kind, ...] = ("F", "B", "I", "W")


@dataclass(frozen=True)
class Step:
    """A training step of one pp rank."""

    skeleton: Skeleton
    config: ParallelConfig
    activations: Activations
    microbatches: int
    weights: Sequence[Weight]
    pp_rank: int

    def moments(self, actions: Sequence[Action] | None) -> Iterator[Moment]:
        """The moments of a step at which a rank may hold most."""
        yield self._reduction()
        if actions is None:
            yield from self._of_loop()
            return
        whole: dict[int, int] = {}  # gradients of stages that have gone backward
        most: dict[tuple[int, Kind], Moment] = {}  # held in actions of a kind since `whole` changed
        for (kind, index, _), held in self.held(actions):
            if kind in "FI" or index in whole:
                if (index, kind) not in most or held.total > most[index, kind].total:
                    most[index, kind] = held
                continue
            yield from self._at_most(most, whole)
            stage, gradients = self.skeleton.ranges[index], sum(whole.values())
            for moment, behind in self._backward(stage, kind):
                yield moment + held + self._always(gradients + behind)
            whole[index] = self._sizes_of(stage) * self._reduce
            most = {}
        yield from self._at_most(most, whole)

    def _at_most(self, most: Mapping[tuple[int, Kind], Moment], whole: Mapping[int, int]) -> Iterator[Moment]:
        """Of actions of each stage and kind the heaviest, by what is held of other microbatches then."""
        always = self._always(sum(whole.values()))
        return (self._heaviest[index][kind] + held + always for (index, kind), held in most.items())

    def _always(self, gradients: int) -> Moment:
        """What a pipeline's rank holds throughout, and whole gradients."""
        return Moment("", 0, 0, self._buffers + self._weights) + self._whole(min(gradients, self._gradients))

    def held(self, actions: Sequence[Action]) -> Iterator[tuple[Action, Moment]]:
        """What is kept of other microbatches during each action: of those between their forward and backward.

        Schedules of several stages a rank also keep what they sent, hidden states and gradients, to the step's end.
        """
        activations = loss = transient = 0
        before = {(r.index, kind): self._freed(r.index, kind) for r in self._own for kind in _KINDS}
        after = {(r.index, kind): self._made(r.index, kind) for r in self._own for kind in _KINDS}
        for action in actions:
            freed, made = before[action.stage, action.kind], after[action.stage, action.kind]
            activations, loss = activations - freed.activations, loss - freed.loss
            yield action, Moment("", activations, loss, transient)
            activations, loss = activations + made.activations, loss + made.loss
            transient += made.transient

    def _freed(self, stage: int, kind: Kind) -> Moment:
        """What an action needs of what was held: from its start on it is the action's own."""
        kept, between = self._kept[stage]
        return {"F": _NOTHING, "B": kept, "I": kept, "W": between}[kind]

    def _made(self, stage: int, kind: Kind) -> Moment:
        """What is held from the end of an action on."""
        kept, between = self._kept[stage]
        made = {"F": kept, "B": _NOTHING, "I": between, "W": _NOTHING}[kind]
        ranks = [*self.skeleton.stage_ranks, self.pp_rank]
        sends = self.config.virtual_stages > 1 and kind != "F"
        if sends and kind != "I" and ranks[stage + 1] != self.pp_rank:
            made += Moment("", self.activations.hidden, 0, 0)
        if sends and kind != "W" and stage > 0 and ranks[stage - 1] != self.pp_rank:
            made += Moment("", 0, 0, self.activations.hidden)
        return made

    # One stage, one microbatch

    def _parts(self, r: StageRange) -> list[tuple[str, Kept]]:
        parts: list[tuple[str, Kept]] = [("shared", self.activations.shared)]
        parts += [("root", self.activations.embedding)] if r.is_first else []
        parts += [("layer", layer) for layer in self.activations.layers[r.start : r.stop]]
        return parts + ([("head", self.activations.head), ("loss", self.activations.loss)] if r.is_last else [])

    def kept(self, r: StageRange) -> Moment:
        """What a microbatch keeps on a stage."""
        return Moment("", self.activations.of_stage(r), self.activations.loss.kept if r.is_last else 0, 0)

    @cached_property
    def _own(self) -> list[StageRange]:
        """The rank's stages."""
        return [r for r in self.skeleton.ranges if self.skeleton.stage_ranks[r.index] == self.pp_rank]

    @cached_property
    def _kept(self) -> dict[int, tuple[Moment, Moment]]:
        """By stage, what a microbatch keeps before its backward and between the two parts of one."""
        return {r.index: (self.kept(r), Moment("", self.activations.between(r), 0, 0)) for r in self._own}

    @cached_property
    def _heaviest(self) -> dict[int, dict[Kind, Moment]]:
        """By stage, of an action of each kind, beside what is the same throughout it."""
        size = attrgetter("total")

        def of(kind: Kind, r: StageRange) -> Moment:
            return max(self._forward(r) if kind == "F" else (m for m, _ in self._backward(r, kind)), key=size)

        return {r.index: {"F": of("F", r), "B": of("B", r), "I": of("I", r), "W": of("W", r)} for r in self._own}

    def _forward(self, r: StageRange) -> Iterator[Moment]:
        below = 0
        for name, part in self._parts(r):
            gathered = self._gathered(name)
            if name == "loss":
                yield Moment("loss", below, part.forward, gathered)
            else:
                yield Moment("forward", below, 0, part.forward + gathered)
            below += part.kept

    def _backward(self, r: StageRange, kind: Kind = "B") -> Iterator[tuple[Moment, int]]:
        """Each moment with the bytes of whole gradients that parts behind it have by then, in a first backward.

        A backward for inputs turns what a part keeps into what is left for the weights, one part after another.
        """
        below, behind, layer, whole = 0, self.activations.between(r), r.start, self._sizes_of(r)
        for name, part in self._parts(r):
            around = self._gathered(name) + self._scattered(name, r)
            if name == "layer":
                whole, layer = whole - self._sizes[layer], layer + 1
            if name == "loss" and kind != "W":
                yield Moment("loss", below, part.kept + part.backward, around), 0
                continue
            behind -= part.between
            below += part.between if kind == "W" else part.kept
            held = below + (behind if kind == "I" else 0)
            needed = part.backward
            if kind == "W":  # one gradient at a time, and a checkpointed layer's activations again
                again = name == "layer" and self.config.activation_checkpoint != "none"
                needed = max(0, part.backward - self._sizes[layer - 1] * self._compute) if again else 0
                needed += self._largest * self._compute
            yield Moment("backward", held, 0, needed + around), whole * self._reduce

    def _sizes_of(self, r: StageRange) -> int:
        """Elements of a stage's parameters."""
        ends = (self._sizes["root"] if r.is_first or r.is_last else 0) + (self._sizes["head"] if r.is_last else 0)
        return ends + sum(self._sizes[i] for i in range(r.start, r.stop))

    def _whole(self, gradients: int) -> Moment:
        """Whole gradients as far as they are more than the shards that will be left of them."""
        return Moment("", 0, 0, max(0, gradients - self._shards))

    def _of_loop(self) -> Iterator[Moment]:
        """Without a pipeline: one microbatch after another."""
        (stage,) = self.skeleton.ranges
        always = Moment("", 0, 0, self._weights) + self._whole(self._gradients)
        for moment in (*self._forward(stage), *(moment for moment, _ in self._backward(stage))):
            yield moment + always

    # What FSDP and the pipeline add

    @cached_property
    def _scatters(self) -> bool:
        """Whether each microbatch's gradients are scattered."""
        one = self.microbatches == 1 and self.config.reshards
        return self.config.pp == 1 and (self.config.dp > 1 or one)

    @cached_property
    def _reshards(self) -> bool:
        return self.config.reshards and (self.config.pp > 1 or self._scatters)

    @cached_property
    def _sizes(self) -> dict[int | str, int]:
        """Elements of each of FSDP's groups, whole: rows are filled up to a multiple of the shards."""
        found: dict[int | str, int] = {"root": 0, "head": 0}
        for w in self.weights:
            rows = -(-w.rows // self.config.dp_shard) * self.config.dp_shard
            found[w.part] = found.get(w.part, 0) + rows * w.width
        return found

    @cached_property
    def _layer(self) -> int:
        """Elements of the largest layer."""
        return max(size for part, size in self._sizes.items() if isinstance(part, int))

    @cached_property
    def _largest(self) -> int:
        """Elements of the largest weight of a layer."""
        return max(w.rows * w.width for w in self.weights if isinstance(w.part, int))

    @cached_property
    def _compute(self) -> int:
        return torch_dtype(self.config.compute_dtype).itemsize

    @cached_property
    def _reduce(self) -> int:
        return torch_dtype(self.config.reduce_dtype).itemsize

    @cached_property
    def _weights(self) -> int:
        """Of weights that stay gathered throughout."""
        return (self._sizes["root"] if self._reshards else sum(self._sizes.values())) * self._compute

    @cached_property
    def _gradients(self) -> int:
        """Of gradients that stay whole until the end of the step."""
        return 0 if self._scatters else sum(self._sizes.values()) * self._reduce

    @cached_property
    def _shards(self) -> int:
        """Of gradients once they are reduced, on the first rank, which has most."""
        return sum(w.shard_bytes(self.config.dp_shard, 0) for w in self.weights if w.trains)

    @cached_property
    def _buffers(self) -> int:
        """Receive buffers: a stage has one a microbatch for what it gets from either side."""
        sides = sum((not r.is_first) + (not r.is_last) for r in self._own)
        return sides * self.microbatches * self.activations.hidden

    def _gathered(self, part: str) -> int:
        """Of weights that are whole at this part and not throughout: the part's, and as much once more in flight."""
        if not self._reshards or part not in ("layer", "head", "loss"):
            return 0
        return 2 * (self._layer if part == "layer" else max(self._sizes["head"], self._layer // 2)) * self._compute

    def _scattered(self, part: str, r: StageRange) -> int:
        """Of whole gradients on their way to shards: those of the group before, in the dtype they are summed in."""
        if not self._scatters:
            return 0
        tied = self._sizes["root"] if r.is_last and not self._sizes["head"] else 0
        flying = {"layer": max(self._layer, self._sizes["head"]), "root": self._sizes["root"]}.get(part, 0)
        return flying * self._reduce + tied * self._compute

    def _reduction(self) -> Moment:
        """The largest group's gradients, laid out to be scattered, beside all of them whole."""
        held = Moment("reduction", 0, 0, max(self._sizes.values()) * self._reduce + self._buffers)
        return held if self._scatters else held + Moment("", 0, 0, self._weights) + self._whole(self._gradients)
