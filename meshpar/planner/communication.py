"""Bytes that one rank sends in a training step, by collective and mesh dimension, from shapes and the config alone.

Of a tensor of N bytes over n ranks, a rank of a ring sends (n - 1) / n N in an all-gather or a reduce-scatter, and
twice that in an all-reduce. What is sent when:

    tensor parallel      a layer sums twice in the forward and twice in the backward (arXiv 1909.08053)
    sequence parallel    every one of those sums becomes a reduce-scatter with an all-gather before it; the backward
                         gathers a block's input once more instead of keeping it (arXiv 2205.05198)
    FSDP                 weights are gathered where they are used, gradients reduced to their shards (arXiv 2304.11277)
    pipeline             hidden states go one way, their gradients the other
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..config import ParallelConfig

Parameter = tuple[int, int]  # rows and elements a row of what a tp rank stores, padding included

_BLOCKS = 2  # of a decoder layer: attention and MLP
LAYER_GATHERS = (_BLOCKS, 2 * _BLOCKS)  # over tp in a layer's forward and backward, under sequence parallelism
_FLOAT32 = 4
_SCALAR = 8  # a float64
_BYTES = {"float32": 4, "bfloat16": 2}
_RING = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}


@dataclass(frozen=True)
class Traffic:
    """Bytes a rank sends in a step by collectives of one kind over one mesh dimension.

    ``kind``: "all_reduce", "all_gather", "reduce_scatter" or "p2p". ``dim``: "pp", "tp", and "dp", or, where there are
    replicas, "dp_shard" and "dp_replicate", with "dp" for the two as one.
    """

    kind: str
    dim: str
    bytes: int


@dataclass(frozen=True)
class Microbatches:
    """``count`` microbatches of [rows, seq_len] tokens, of one data-parallel rank in one step."""

    rows: int
    seq_len: int
    count: int = 1


@dataclass(frozen=True)
class Share:
    """What one rank holds of a model, over all of its stages.

    ``layers``: the parameters of each decoder layer. ``rest``: embedding, last norm and head, as far as they are here;
    a tied matrix counts once. ``partial``: those of both whose gradient is a term of a sum over tp. ``copied``: those
    that another pp rank holds as well.
    """

    hidden: int
    layers: Sequence[Sequence[Parameter]]
    rest: Sequence[Parameter] = ()
    partial: Sequence[Parameter] = ()
    copied: Sequence[Parameter] = ()


def ring_bytes(kind: str, payload: int, ranks: int) -> int:
    """Bytes a rank of a ring sends for whole tensors of ``payload`` bytes; point-to-point, the payload."""
    return payload if kind == "p2p" else _RING[kind] * (ranks - 1) * payload // ranks


def step_traffic(
    config: ParallelConfig,
    share: Share,
    batch: Microbatches,
    stage_ranks: Sequence[int] = (0,),
    pp_rank: int = 0,
    shard_rank: int = 0,
) -> list[Traffic]:
    """What a rank sends in one `forward_backward` of a model like Llama, with nothing between embedding and layers.

    A zero-bubble schedule sends more where layers are checkpointed or compiled: they are computed twice.

    ``stage_ranks``: the pp rank of each stage, in order. ``shard_rank``: the rank among those that FSDP shards over.
    """
    stages = [i for i, rank in enumerate(stage_ranks) if rank == pp_rank]
    payload = _tensor_parallel(config, share, batch, 0 in stages, len(stage_ranks) - 1 in stages)
    payload += _data_parallel(config, share, batch)
    payload += _once_a_step(config, share, shard_rank)
    payload["p2p", "pp"] += _pipeline(config, share, batch, stage_ranks, pp_rank)
    return _traffic(config, payload)


def clip_traffic(config: ParallelConfig) -> list[Traffic]:
    """What a rank sends in one `clip_grad_norm_`: one number is summed over each dimension in turn."""
    return _traffic(config, Counter({("all_reduce", dim): _SCALAR for dim in (*_fsdp_dims(config), "tp", "pp")}))


def layer_sums(config: ParallelConfig) -> tuple[int, int]:
    """Sums over tp in a layer's forward, and in its backward with what that computes again."""
    # What a layer returns is not needed again: a replay ends before its last sum.
    return _BLOCKS, _BLOCKS + (_BLOCKS - 1 if config.activation_checkpoint == "full" else 0)


def _tensor_parallel(
    config: ParallelConfig, share: Share, batch: Microbatches, has_embedding: bool, has_head: bool
) -> Counter[tuple[str, str]]:
    sums = len(share.layers) * sum(layer_sums(config))
    tokens = batch.rows * batch.seq_len * batch.count
    loss = 3 * _FLOAT32 * tokens * has_head  # each token's largest logit, sum of exponentials, and own logit
    if not config.sequence_parallel:
        hidden = tokens * share.hidden * _BYTES[config.compute_dtype]
        return Counter({("all_reduce", "tp"): (sums + has_embedding + has_head) * hidden + loss})
    gathers = len(share.layers) * sum(LAYER_GATHERS)
    hidden = batch.rows * _shard_len(config, batch) * config.tp * batch.count * share.hidden
    hidden *= _BYTES[config.compute_dtype]
    return Counter(
        {
            ("all_gather", "tp"): (gathers + has_embedding + has_head) * hidden,
            ("reduce_scatter", "tp"): (sums + has_embedding + has_head) * hidden,
            ("all_reduce", "tp"): loss,
        }
    )


def _data_parallel(config: ParallelConfig, share: Share, batch: Microbatches) -> Counter[tuple[str, str]]:
    """FSDP: layers are gathered for each forward and each backward, or once a step; what is outside them, once.

    With a pipeline all gradients stay whole until the end of the step.
    """
    shard_dim, times = _fsdp_dims(config)[-1], batch.count if config.pp == 1 else 1
    in_layers = sum(_padded(config, layer) for layer in share.layers)
    rest = _padded(config, share.rest)
    gathered = (2 * batch.count if config.reshards else 1) * in_layers + rest
    payload = Counter(
        {
            ("all_gather", shard_dim): gathered * _BYTES[config.compute_dtype],
            ("reduce_scatter", shard_dim): times * (in_layers + rest) * _BYTES[config.reduce_dtype],
        }
    )
    if config.dp_replicate > 1:
        own = (in_layers + rest) // config.dp_shard
        payload["all_reduce", "dp_replicate"] = own * _BYTES[config.reduce_dtype]
    return payload


def _once_a_step(config: ParallelConfig, share: Share, shard_rank: int) -> Counter[tuple[str, str]]:
    return Counter(
        {
            ("all_reduce", "tp"): _stored(config, share.partial, shard_rank) * _FLOAT32,
            ("all_reduce", "dp"): (3 + 1) * _SCALAR,  # tokens, batches and their square; the loss
            ("all_reduce", "pp"): _SCALAR,  # the loss
            ("p2p", "pp"): _stored(config, share.copied, shard_rank) * _BYTES[config.param_dtype],
        }
    )


def _pipeline(
    config: ParallelConfig, share: Share, batch: Microbatches, stage_ranks: Sequence[int], pp_rank: int
) -> int:
    borders = [(a, b) for a, b in pairwise(stage_ranks) if a != b]
    sends = sum(pp_rank in border for border in borders)  # the one behind a border sends gradients back
    hidden = batch.rows * _shard_len(config, batch) * share.hidden * _BYTES[config.compute_dtype]
    return sends * batch.count * hidden


def _shard_len(config: ParallelConfig, batch: Microbatches) -> int:
    """Positions of each sequence that a rank holds between blocks."""
    return -(-batch.seq_len // config.tp) if config.sequence_parallel else batch.seq_len


def _fsdp_dims(config: ParallelConfig) -> tuple[str, ...]:
    return ("dp_replicate", "dp_shard") if config.dp_replicate > 1 else ("dp",)


def _padded(config: ParallelConfig, params: Iterable[Parameter]) -> int:
    """Elements that FSDP moves of ``params``: it fills their rows up to a multiple of the shards."""
    return sum(-(-rows // config.dp_shard) * config.dp_shard * width for rows, width in params)


def _stored(config: ParallelConfig, params: Iterable[Parameter], shard_rank: int) -> int:
    """Elements of ``params`` on one of the ranks that FSDP shards over."""

    def own(rows: int) -> int:
        chunk = -(-rows // config.dp_shard)
        return max(0, min(chunk, rows - shard_rank * chunk))

    return sum(own(rows) * width for rows, width in params)


def _traffic(config: ParallelConfig, payload: Counter[tuple[str, str]]) -> list[Traffic]:
    sizes = {
        "pp": config.pp,
        "dp": config.dp,
        "dp_replicate": config.dp_replicate,
        "dp_shard": config.dp_shard,
        "tp": config.tp,
    }
    sent = (Traffic(kind, dim, ring_bytes(kind, whole, sizes[dim])) for (kind, dim), whole in sorted(payload.items()))
    return [one for one in sent if one.bytes]
