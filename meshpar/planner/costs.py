"""What one microbatch costs on each stage: compute by roofline, tp's collectives, and FSDP's beside them.

What is assumed:

    compute        a matrix product takes its arithmetic or the reading of its weights, whichever is longer; attention
                   is causal, and its backward computes the scores again; the rest moves its bytes to memory and back
    tp             nothing hides its collectives, but async_tp, which leaves 1 / tp of them
    FSDP           a layer's gathers and reductions run beside its compute, and what is longer counts
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import add

from ..config import ParallelConfig
from .communication import LAYER_GATHERS, Microbatches, Parameter, Share, layer_sums, step_traffic
from .devices import Device
from .links import Network, Reach, reach
from .simulate import Kind
from .work import ModelWork, Work

WIDTH = {"float32": 4, "bfloat16": 2}
_ATTENTION_BACKWARD = 2.5  # times the forward: scores again, and four more products
POINTWISE_BACKWARD = 2.3  # times the forward: counted over every operation of a Llama layer


@dataclass(frozen=True)
class Cost:
    """Seconds of one microbatch: forward, whole backward, and the two parts of a backward that is split."""

    forward: float = 0.0
    backward: float = 0.0
    inputs: float = 0.0
    weights: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.forward + other.forward,
            self.backward + other.backward,
            self.inputs + other.inputs,
            self.weights + other.weights,
        )

    def times(self, count: int) -> Cost:
        """Of several such."""
        return Cost(self.forward * count, self.backward * count, self.inputs * count, self.weights * count)

    def of(self, kind: Kind) -> float:
        """Seconds of an action."""
        return {"F": self.forward, "B": self.backward, "I": self.inputs, "W": self.weights}[kind]


@dataclass(frozen=True)
class Place:
    """A configuration on its devices."""

    config: ParallelConfig
    device: Device
    network: Network

    def reach(self, dim: str) -> Reach:
        """Where the groups of a mesh dimension sit; "dp" is the whole of replicate x shard."""
        c = self.config
        size, stride = {
            "tp": (c.tp, 1),
            "dp_shard": (c.dp_shard, c.tp),
            "dp_replicate": (c.dp_replicate, c.tp * c.dp_shard),
            "dp": (c.dp, c.tp),
            "pp": (c.pp, c.tp * c.dp),
        }[dim]
        return Reach(size, 1, size) if dim in self.network.whole else reach(size, stride, self.network.per_node)

    def seconds(self, kind: str, sent: float, dim: str, calls: int = 1) -> float:
        """Seconds of collectives over ``dim``."""
        return self.network.seconds(kind, sent, self.reach(dim), calls)

    def busy(self, compute: float, operations: float) -> float:
        """Seconds of operations that compute for ``compute``: the host starts them, before or while they run."""
        starts = operations * self.device.launch
        return max(compute, starts) if self.device.asynchronous else compute + starts


def stage_costs(work: ModelWork, batch: Microbatches, stage_layers: Sequence[int], place: Place) -> list[Cost]:
    """Of each stage, one microbatch: its layers, and the embedding's and the head's part."""
    costs, first = [], 0
    known = {id(layer): layer for layer in work.layers}
    each = {
        key: _beside_fsdp(layer_cost(layer, work.hidden, batch, place), layer, work.hidden, place)
        for key, layer in known.items()
    }
    for index, count in enumerate(stage_layers):
        cost = Cost()
        for key, n in Counter(id(layer) for layer in work.layers[first : first + count]).items():
            cost += each[key].times(n)
        first += count
        cost += _embedding_cost(work.hidden, batch, place) if index == 0 else Cost()
        cost += _head_cost(work, batch, place) if index == len(stage_layers) - 1 else Cost()
        costs.append(cost)
    return costs


def layer_cost(work: Work, hidden: int, batch: Microbatches, place: Place) -> Cost:
    """One microbatch through a layer, tp's collectives included, FSDP's not."""
    config, device, tokens = place.config, place.device, batch.rows * batch.seq_len
    dtype = config.compute_dtype
    read = work.weights * WIDTH[dtype] / device.memory_rate
    products = max(2 * work.products * tokens / device.matmul_rate(dtype), read)
    core = work.attention * batch.seq_len * tokens / device.attention_rate(dtype)  # 2 FLOPs, over half the positions
    rest = work.pointwise * tokens / device.memory_rate
    ahead, back, again = _tp_seconds(hidden, batch, place)
    forward = place.busy(products + core + rest, work.operations)
    # Attention's output matrix: what is summed over tp is not kept; that of the MLP ends a layer and is not needed.
    summed = work.attention * hidden * tokens / device.matmul_rate(dtype) if config.tp > 1 else 0.0
    replay = {
        "none": 0.0,
        "selective": place.busy(core + rest + summed, work.operations),
        "full": forward,
    }[config.activation_checkpoint]
    inputs = place.busy(products + _ATTENTION_BACKWARD * core + POINTWISE_BACKWARD * rest, work.operations) + replay
    weights = place.busy(products, work.operations / 2)
    return Cost(
        forward=forward + ahead,
        backward=inputs + weights + back,
        inputs=inputs + back,
        weights=weights + replay + again,
    )


def _tp_seconds(hidden: int, batch: Microbatches, place: Place) -> tuple[float, float, float]:
    """Seconds of tp's collectives in a layer's forward, in its backward, and in a replay for the weights alone."""
    config = place.config
    sums, gathers = layer_sums(config), LAYER_GATHERS
    sent = sent_bytes(Share(hidden, [[]]), config, batch, "tp")
    kinds = {"all_reduce": sums} if not config.sequence_parallel else {"all_gather": gathers, "reduce_scatter": sums}
    again = {"none": 0, "selective": 0, "full": sums[0] - 1}[config.activation_checkpoint]
    entered = gathers[0] if config.activation_checkpoint != "none" else 0
    seconds = [0.0, 0.0, 0.0]
    for kind, (ahead, back) in kinds.items():
        each = sent.get(kind, 0) / (ahead + back)
        for i, calls in enumerate((ahead, back, entered if kind == "all_gather" else again)):
            seconds[i] += place.seconds(kind, each * calls, "tp", calls)
    shown = 1 / config.tp if config.async_tp and config.compile and config.sequence_parallel else 1.0
    return seconds[0] * shown, seconds[1] * shown, seconds[2] * shown


def _embedding_cost(hidden: int, batch: Microbatches, place: Place) -> Cost:
    """The sum of what tp ranks look up, and under sequence parallelism the gather of its gradient."""
    sent = sent_bytes(Share(hidden, []), place.config, batch, "tp", 0)
    return Cost(forward=sum(place.seconds(kind, count, "tp") for kind, count in sent.items()))


def _head_cost(work: ModelWork, batch: Microbatches, place: Place) -> Cost:
    """Logits, loss and all of the head's gradients: they are made in the forward."""
    dtype, tokens = place.config.compute_dtype, batch.rows * batch.seq_len
    products = 3 * 2 * work.head.products * tokens / place.device.matmul_rate(dtype)
    rest = work.head.pointwise * tokens / place.device.memory_rate
    sent = sent_bytes(Share(work.hidden, []), place.config, batch, "tp", 2)
    collectives = sum(place.seconds(kind, count, "tp", 3) for kind, count in sent.items())
    return Cost(forward=place.busy(products + rest, work.head.operations) + collectives)


def _beside_fsdp(cost: Cost, layer: Work, hidden: int, place: Place) -> Cost:
    """A layer's times with the collectives of FSDP that every microbatch has beside them."""
    config = place.config
    gather, reduce = gather_and_reduce(layer.stored, hidden, place)
    gather = gather if config.reshards else 0.0
    reduce = reduce if config.pp == 1 else 0.0
    both = max if place.device.asynchronous else add  # a CPU's cores do both
    return Cost(
        forward=both(cost.forward, gather),
        backward=both(cost.backward, gather + reduce),
        inputs=both(cost.inputs, gather),
        weights=cost.weights,
    )


def gather_and_reduce(stored: Sequence[Parameter], hidden: int, place: Place) -> tuple[float, float]:
    """Seconds of one gather of some weights over the shards, and of one reduction of their gradients."""
    dim = "dp_shard" if place.config.dp_replicate > 1 else "dp"
    once = replace(
        place.config, pp=1, virtual_stages=1, schedule="1F1B", stage_layers=None, reshard_after_forward=False
    )
    sent = sent_bytes(Share(hidden, [stored]), once, Microbatches(1, 1), dim)
    gather, reduce = (place.seconds(kind, sent.get(kind, 0), dim) for kind in ("all_gather", "reduce_scatter"))
    return gather, reduce


def sent_bytes(share: Share, config: ParallelConfig, batch: Microbatches, dim: str, stage: int = 1) -> dict[str, int]:
    """Bytes over ``dim`` by kind for one microbatch of a stage of three: 0 has the embedding, 2 the head."""
    one = replace(batch, count=1)
    return {t.kind: t.bytes for t in step_traffic(config, share, one, (0, 1, 2), stage) if t.dim == dim}
