"""Every byte a rank sends in a training step, counted, against what the algorithms need."""

from __future__ import annotations

import pytest

from meshpar.config import ParallelConfig
from meshpar.planner.communication import (
    Microbatches,
    Parameter,
    Share,
    Traffic,
    clip_traffic,
    ring_bytes,
    step_traffic,
)
from meshpar.stages import stage_ranks
from tests import jobs_traffic as jobs
from tests import models
from tests.pool import JobFailed

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 32, 64, 4, 2, 8, 96
ROWS, SEQ = 16, 16
VIRTUAL = ("Interleaved1F1B", "ZBVZeroBubble")


def mesh(pp: int, dp: int, tp: int, schedule: str = "1F1B", **more) -> dict:
    """A float32 config of two layers a stage, and of two microbatches a pipeline rank."""
    config = dict(pp=pp, dp_shard=dp, tp=tp, schedule=schedule, compute_dtype="float32", **more)
    if pp > 1:
        config |= dict(virtual_stages=2 if schedule in VIRTUAL else 1, microbatches=2 * pp)
    return config


def cases():
    """(config, changes to the model, positions of a sequence)."""
    for sp in (True, False):
        tag, half = "-sp" if sp else "", dict(sequence_parallel=sp, compute_dtype="bfloat16")
        for mode in ("none", "selective", "full"):
            more = dict(sequence_parallel=sp, activation_checkpoint=mode)
            yield pytest.param(mesh(1, 1, 2, **more), {}, SEQ, id=f"1x1x2{tag}-{mode}")
        for schedule in ("1F1B", *VIRTUAL):
            yield pytest.param(mesh(2, 1, 2, schedule, sequence_parallel=sp), {}, SEQ, id=f"2x1x2-{schedule}{tag}")
        odd = dict(vocab_size=97, intermediate_size=65)
        yield pytest.param(mesh(1, 2, 2, sequence_parallel=sp), odd, 15, id=f"1x2x2{tag}-padded")
        yield pytest.param(mesh(1, 2, 2) | half, {}, SEQ, id=f"1x2x2{tag}-bfloat16")
        yield pytest.param(mesh(2, 1, 2) | half, {}, SEQ, id=f"2x1x2{tag}-bfloat16")
    yield pytest.param(mesh(2, 2, 2, activation_checkpoint="full"), {}, SEQ, id="2x2x2-1F1B-sp-full")
    yield pytest.param(mesh(2, 2, 2, "Interleaved1F1B"), {}, SEQ, id="2x2x2-Interleaved1F1B-sp")
    yield pytest.param(mesh(2, 2, 2, "ZBVZeroBubble", sequence_parallel=False), {}, SEQ, id="2x2x2-ZBVZeroBubble")
    yield pytest.param(mesh(1, 2, 1, microbatches=2, activation_checkpoint="full"), {}, SEQ, id="1x2x1-full")
    yield pytest.param(mesh(1, 2, 1, reduce_dtype="bfloat16"), {}, SEQ, id="1x2x1-reduced-in-bfloat16")
    yield pytest.param(mesh(1, 2, 1, microbatches=2, dp_replicate=2), {}, SEQ, id="1x(2x2)x1")
    yield pytest.param(mesh(1, 2, 1, microbatches=2, reshard_after_forward=False), {}, SEQ, id="1x2x1-gathered-once")
    yield pytest.param(mesh(2, 2, 1, reshard_after_forward=True), {}, SEQ, id="2x2x1-gathered-anew")
    yield pytest.param(mesh(1, 1, 2, dp_replicate=2), {}, SEQ, id="1x(2x1)x2")
    yield pytest.param(mesh(2, 2, 1, dp_replicate=2), {}, SEQ, id="2x(2x2)x1")
    tied = dict(tie_word_embeddings=True)
    yield pytest.param(mesh(2, 1, 1), {}, SEQ, id="2x1x1-1F1B")
    for schedule in ("1F1B", *VIRTUAL):
        yield pytest.param(mesh(2, 1, 1, schedule), tied, SEQ, id=f"2x1x1-{schedule}-tied")
    yield pytest.param(mesh(2, 2, 1), tied | dict(vocab_size=97), SEQ, id="2x2x1-tied-padded")
    yield pytest.param(mesh(1, 2, 1, microbatches=2), tied, SEQ, id="1x2x1-tied")


def layer(config: ParallelConfig, ffn: int = FFN) -> tuple[list[Parameter], list[Parameter]]:
    """What a tp rank stores of a Llama layer: its projections, and its norms."""
    q, kv, wide = HEADS // config.tp * HEAD_DIM, KV_HEADS // config.tp * HEAD_DIM, -(-ffn // config.tp)
    projections = [(q, HIDDEN), (kv, HIDDEN), (kv, HIDDEN), (HIDDEN, q), (wide, HIDDEN), (wide, HIDDEN), (HIDDEN, wide)]
    return projections, [(HIDDEN, 1), (HIDDEN, 1)]


def share(config: ParallelConfig, pp_rank: int, changes: dict) -> Share:
    """What one rank of a Llama of `mesh` holds."""
    ranks = stage_ranks(config)
    projections, norms = layer(config, changes.get("intermediate_size", FFN))
    layers = [projections + norms] * (2 * ranks.count(pp_rank))
    matrix = (-(-changes.get("vocab_size", VOCABULARY) // config.tp), HIDDEN)
    has_embedding, has_head = ranks[0] == pp_rank, ranks[-1] == pp_rank
    tied = changes.get("tie_word_embeddings", False)
    matrices = [matrix] * (bool(has_embedding or has_head) if tied else has_embedding + has_head)
    last_norm = [(HIDDEN, 1)] * has_head
    on_shards = config.sequence_parallel and config.tp > 1
    return Share(
        HIDDEN,
        layers,
        matrices + last_norm,
        partial=norms * len(layers) + last_norm if on_shards else [],
        copied=[matrix] * (tied and has_embedding != has_head),
    )


def by_key(traffic: list[Traffic]) -> dict[tuple[str, str], int]:
    return {(one.kind, one.dim): one.bytes for one in traffic}


def compare(pool, config: dict, changes: dict, seq: int = SEQ) -> list[tuple[dict, dict]]:
    """What each rank sent in a step, and what the formula says; what it sent to clip is held against its own here."""
    resolved = ParallelConfig(**config)
    stages, count = stage_ranks(resolved), config.get("microbatches", 1)
    batch = models.make_batch(ROWS, seq, changes.get("vocab_size", VOCABULARY))
    microbatches = Microbatches(ROWS // resolved.dp // count, seq, count)
    config = config | dict(stage_layers=[2] * len(stages))
    changes = changes | dict(num_hidden_layers=2 * len(stages))
    found = []
    for rank in pool.run(resolved.world_size, jobs.sent_in_a_step, config, batch, changes):
        assert rank["clip"] == by_key(clip_traffic(resolved))
        held = share(resolved, rank["pp"], changes)
        needed = step_traffic(resolved, held, microbatches, stages, rank["pp"], rank["shard"])
        found.append((rank["step"], by_key(needed)))
    return found


@pytest.mark.parametrize(("config", "changes", "seq"), list(cases()))
def test_a_step_sends_what_its_algorithms_need(pool, config, changes, seq):
    for sent, needed in compare(pool, config, changes, seq):
        assert sent == needed


@pytest.mark.parametrize(("mode", "sp"), [("selective", True), ("full", True), ("full", False)])
def test_a_zero_bubble_schedule_computes_a_checkpointed_layer_twice(pool, mode, sp):
    """For the gradients of its inputs, and of its weights; the first stage has them both at once.

    That costs one replay's collectives more than the formula has, and only those.
    """
    config = mesh(2, 1, 2, "ZBVZeroBubble", sequence_parallel=sp, activation_checkpoint=mode)
    whole = ROWS * SEQ * HIDDEN * 4  # of all microbatches
    gathers, kind = (2, "reduce_scatter") if sp else (0, "all_reduce")
    for layers, (sent, needed) in zip((2, 2, 4, 4), compare(pool, config, {}), strict=True):
        more = {("all_gather", "tp"): layers * gathers * ring_bytes("all_gather", whole, 2)}
        if mode == "full":
            more[kind, "tp"] = layers * ring_bytes(kind, whole, 2)
        assert {key: sent[key] - needed.get(key, 0) for key in sent} == {key: more.get(key, 0) for key in sent}


def test_the_counter_sees_every_kind_of_call(pool):
    size, whole = 2, 4 * jobs.FLOATS
    half = whole // size
    gathered, scattered = {("all_gather", "world"): half}, {("reduce_scatter", "world"): half}
    want = {
        "all_reduce": {("all_reduce", "world"): whole},
        "all_reduce, functional": {("all_reduce", "world"): whole},
        "all_gather": gathered,
        "all_gather, one tensor": gathered,
        "all_gather, functional": gathered,
        "reduce_scatter": scattered,
        "reduce_scatter, one tensor": scattered,
        "reduce_scatter, functional": scattered,
        "p2p": {("p2p", "world"): whole},
        "p2p, batched": {("p2p", "world"): whole},
        "fully_shard": gathered | scattered,
        "backward": gathered | scattered,
        "checkpointed": {("all_reduce", "world"): 2 * whole},
    }
    assert pool.run(size, jobs.known_calls) == [want] * size


def test_the_counter_refuses_what_it_does_not_know(pool):
    with pytest.raises(JobFailed, match=r"how many bytes c10d::broadcast_ sends"):
        pool.run(2, jobs.unknown_call)


@pytest.mark.parametrize(
    ("kind", "ranks", "want"),
    [
        ("all_reduce", 4, 1500),
        ("all_gather", 4, 750),
        ("reduce_scatter", 2, 500),
        ("all_reduce", 1, 0),
        ("p2p", 2, 1000),
    ],
)
def test_what_a_ring_sends(kind, ranks, want):
    assert ring_bytes(kind, 1000, ranks) == want


def test_a_layer_of_a_70b_model_sends_the_published_bytes():
    """8 b s h (t - 1) / t elements with plain tensor parallelism (arXiv 2104.04473, section 3.2), 2 b s h a border."""
    hidden, seq, tp, border = 8192, 8192, 8, 2 * 8192 * 8192

    def sent(layers: int, **changes) -> dict[tuple[str, str], int]:
        config = ParallelConfig(pp=4, dp_shard=1, tp=tp, microbatches=4, **changes)
        return by_key(step_traffic(config, Share(hidden, [[]] * layers), Microbatches(1, seq), range(4), 1))

    plain, shards = (
        {key: sent(2, sequence_parallel=sp)[key] - count for key, count in sent(1, sequence_parallel=sp).items()}
        for sp in (False, True)
    )
    assert plain == {("all_reduce", "tp"): 939_524_096, ("all_reduce", "pp"): 0, ("p2p", "pp"): 0}
    gathered, scattered = shards["all_gather", "tp"], shards["reduce_scatter", "tp"]
    assert (gathered + scattered - 939_524_096) // 2 == 117_440_512  # a block's input, gathered once more
    assert sent(1, sequence_parallel=False)["p2p", "pp"] == 2 * border == 268_435_456
    assert sent(1, sequence_parallel=True)["p2p", "pp"] == 2 * border // tp
