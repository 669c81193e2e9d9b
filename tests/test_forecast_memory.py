"""The forecast of a rank's memory, against real steps."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch.distributed as dist

from meshpar.config import ParallelConfig
from meshpar.planner.activations import Activations, Kept, measure
from meshpar.planner.memory import MemoryOfRank, memory_of_ranks
from meshpar.planner.orders import schedule_order
from meshpar.planner.simulate import Action
from meshpar.planner.skeleton import lay_out, no_network, open_skeleton
from meshpar.planner.step_memory import Moment, Step
from meshpar.planner.study import Study
from tests import jobs_forecast as jobs
from tests import models

ROWS, SEQ = 16, 32


def mesh(pp: int = 1, dp: int = 1, tp: int = 1, schedule: str = "1F1B", **more) -> dict:
    config = dict(pp=pp, dp_shard=dp, tp=tp, schedule=schedule, compute_dtype="float32", **more)
    virtual = 2 if schedule not in ("1F1B", "GPipe") else 1
    return {"virtual_stages": virtual, "microbatches": 4, **config} if pp > 1 else config


STATE_CASES = [
    (mesh(dp=2), "llama", {}),
    (mesh(dp=2), "llama", dict(tie_word_embeddings=True)),
    (mesh(tp=2), "llama", dict(vocab_size=97)),
    (mesh(dp=2, tp=2), "llama", dict(vocab_size=97, intermediate_size=65)),
    (mesh(tp=4), "llama", {}),
    (mesh(tp=4), "llama", dict(num_attention_heads=6, hidden_size=48)),
    (mesh(tp=3), "llama", dict(num_attention_heads=4, num_key_value_heads=4)),
    (mesh(pp=2), "llama", {}),
    (mesh(pp=2), "llama", dict(tie_word_embeddings=True)),
    (mesh(pp=2, dp=2), "llama", dict(tie_word_embeddings=True, vocab_size=97)),
    (mesh(pp=2, stage_layers=[3, 1]), "llama", {}),
    (mesh(pp=2, schedule="Interleaved1F1B"), "llama", {}),
    (mesh(pp=2, schedule="ZBVZeroBubble"), "llama", dict(tie_word_embeddings=True)),
    (mesh(pp=2, tp=2), "llama", dict(num_hidden_layers=5)),
    (mesh(dp=2, dp_replicate=2), "llama", dict(vocab_size=97)),
    (mesh(dp=4), "llama", dict(vocab_size=97, intermediate_size=66, hidden_size=36, head_dim=8)),
    (mesh(dp=2, tp=2), "qwen2", dict(vocab_size=99)),
    (mesh(pp=2, tp=2), "qwen3", {}),
    (mesh(dp=2, tp=2), "mixtral", dict(num_local_experts=4, num_experts_per_tok=2)),
    (mesh(pp=2, dp=2), "mixtral", dict(num_local_experts=4, num_experts_per_tok=2)),
    (mesh(dp=2, tp=2), "gemma", dict(head_dim=8, tie_word_embeddings=True)),
    (mesh(pp=2, tp=2), "phi3", {}),
    (mesh(dp=4, sequence_parallel=False), "phi3", dict(vocab_size=98)),
    (mesh(pp=2, tp=2, sequence_parallel=False), "gpt2", dict(tie_word_embeddings=True)),
    (mesh(dp=2, tp=2, param_dtype="bfloat16"), "llama", {}),
]


def config_of(settings: dict) -> ParallelConfig:
    return ParallelConfig(**{"compute_dtype": "float32", **settings})


def forecast(settings: dict, family: str, changes: dict, batch: dict):
    """Skeleton, config, what a microbatch keeps, and how many microbatches there are."""
    config = config_of(settings)
    count = config.microbatches or 1
    rows, seq = batch["input_ids"].shape
    with no_network(config.tp) as tp:
        skeleton = lay_out(open_skeleton(models.tiny_config(family, **changes)), config, tp)
        kept = measure(skeleton, config, rows // config.dp // count, seq, device="cpu")
    return skeleton, config, kept, count


def on_each_core(pool, find, cases: list[tuple]) -> list:
    """``find(*case)`` of each case, on two processes outside of any job."""
    halves = pool.run(2, found_alone, find, cases)
    return [halves[i % 2][i // 2] for i in range(len(cases))]


def found_alone(find, cases: list[tuple]) -> list:
    rank = dist.get_rank()
    dist.destroy_process_group()
    return [find(*case) for case in cases[rank::2]]


def ranks_of(*case) -> list[MemoryOfRank]:
    """What is forecast of each rank."""
    return list(memory_of_ranks(*forecast(*case)))


def of_rank(ranks, where: dict):
    """The entry that stands for a rank."""
    return max((r for r in ranks if r.pp == where["pp"] and r.dp <= where["dp"]), key=lambda r: r.dp)


def test_state_is_exact_to_the_byte(pool):
    for world in (2, 3, 4):
        cases = [case for case in STATE_CASES if config_of(case[0]).world_size == world]
        batches = [models.make_batch(ROWS, SEQ, case[2].get("vocab_size", 96)) for case in cases]
        cases = [(*case, batch) for case, batch in zip(cases, batches, strict=True)]
        real = pool.run(world, jobs.state_bytes, cases)
        for i, (case, ranks) in enumerate(zip(cases, on_each_core(pool, ranks_of, cases), strict=True)):
            assert sum(r.count for r in ranks) == world
            for found in (rank[i] for rank in real):
                want = of_rank(ranks, found)
                assert (want.parameters, want.gradients, want.optimizer) == (
                    found["parameters"], found["gradients"], found["optimizer"]
                ), (case[:3], found)  # fmt: skip


KEPT_CASES = [
    (mesh(pp, 1, tp, schedule, activation_checkpoint=mode), "llama", {})
    for mode in ("none", "selective", "full")
    for pp, tp, schedule in (
        (2, 1, "GPipe"),
        (2, 1, "1F1B"),
        (2, 2, "1F1B"),
        (2, 1, "Interleaved1F1B"),
        (2, 2, "Interleaved1F1B"),
        (2, 1, "InterleavedZeroBubble"),
        (2, 1, "ZBVZeroBubble"),
        (2, 1, "LoopedBFS"),
        (2, 1, "DualPipeV"),
        (1, 2, "1F1B"),
    )
]


def kept_by_ranks(*case) -> list[dict]:
    """What is forecast of each pp rank: "most", "late" of it, and of its "stages" (kept, sent to the next)."""
    skeleton, config, kept, count = forecast(*case)
    order = schedule_order(config, count) if config.pp > 1 else [[(Action("F", 0, 0),)]]
    return [_kept_by_rank(skeleton, config, kept, count, pp, actions) for pp, actions in enumerate(order)]


def _kept_by_rank(skeleton, config: ParallelConfig, kept: Activations, count: int, pp: int, times) -> dict:
    step = Step(skeleton, config, _of_forwards(kept), count, skeleton.weights, pp)
    actions = [action for actions in times for action in actions]
    most = max(_both(held + step.kept(skeleton.ranges[a.stage])) for a, held in step.held(actions))
    # What was sent last stays for a moment; what goes to this rank's own next stage is its receive buffer.
    own = sum(a == b == pp for a, b in pairwise(skeleton.stage_ranks))
    late = kept.hidden * (own * count if config.virtual_stages > 1 else 1)
    stages = {r.index: (_both(step.kept(r)), 0 if r.is_last else kept.hidden) for r in skeleton.ranges}
    return {"most": most, "late": late, "stages": stages}


def test_activations_are_what_autograd_keeps(pool):
    """On every stage, and of all microbatches that its rank has between forward and backward at a time."""
    for world in (2, 4):
        cases = [(*case, models.make_batch(ROWS, SEQ)) for case in KEPT_CASES if config_of(case[0]).world_size == world]
        real = pool.run(world, jobs.kept_activations, cases)
        for i, (case, ranks) in enumerate(zip(cases, on_each_core(pool, kept_by_ranks, cases), strict=True)):
            config = config_of(case[0])
            for found in (rank[i] for rank in real):
                want = ranks[found["pp"]]
                most = want["most"]
                assert found["most"] - want["late"] <= most * 1.05 <= found["most"] * 1.1, case[:3]
                for index, size in found["stages"].items():
                    kept, sent = want["stages"][index]
                    assert kept == pytest.approx(size, rel=0.01), (case[:3], index)
                    if config.tp == 1 and config.activation_checkpoint == "none":
                        assert found["saved"][index] + sent == pytest.approx(size, abs=64)  # the loss


def _of_forwards(kept: Activations) -> Activations:
    """Without gradients, which the recording leaves out: between its parts, a backward has what the forward kept."""

    def same(part: Kept) -> Kept:
        return replace(part, between=part.kept)

    parts = {name: same(getattr(kept, name)) for name in ("embedding", "shared", "head", "loss")}
    return replace(kept, layers=[same(layer) for layer in kept.layers], **parts)


def _both(moment: Moment) -> int:
    return moment.activations + moment.loss


WIDE = dict(
    hidden_size=256,
    intermediate_size=768,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    vocab_size=2048,
)
PEAK_CASES = [
    (mesh(dp=2) | dict(compute_dtype="bfloat16"), "llama", WIDE),
    (mesh(tp=2), "llama", WIDE),
    (mesh(pp=2) | dict(compute_dtype="bfloat16"), "llama", WIDE),
    (mesh(pp=2, schedule="Interleaved1F1B", activation_checkpoint="full"), "llama", WIDE),
    (mesh(pp=2, schedule="InterleavedZeroBubble"), "llama", WIDE),
    (mesh(pp=2, schedule="ZBVZeroBubble"), "llama", WIDE),
    (mesh(pp=2, schedule="ZBVZeroBubble", activation_checkpoint="full"), "llama", WIDE),
    (mesh(pp=2, schedule="ZBVZeroBubble") | dict(compute_dtype="bfloat16"), "llama", WIDE),
]


def test_the_peak_of_a_step(pool):
    """Every tensor of a real step, recorded, on the CPU. A single microbatch's peak comes before its gradients."""
    cases = [(*case, models.make_batch(8, 128, WIDE["vocab_size"])) for case in PEAK_CASES]
    real = pool.run(2, jobs.peaks, cases)
    for i, (case, ranks) in enumerate(zip(cases, on_each_core(pool, ranks_of, cases), strict=True)):
        for found in (rank[i] for rank in real):
            want, peak = of_rank(ranks, found), found["held"] + found["peak"]
            early = want.gradients if case[0]["pp"] == 1 else 0
            assert 0.95 * peak < want.total, (case[:2], want, peak)
            assert want.total - early < 1.05 * peak, (case[:2], want, peak)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", dict(num_hidden_layers=7)),
        ("gemma3_text", dict(layer_types=["full_attention", "sliding_attention"] * 4, sliding_window=8)),
        ("mixtral", dict(num_hidden_layers=6, num_local_experts=4, num_experts_per_tok=2)),
    ],
)
@pytest.mark.parametrize("sizes", [dict(pp=2), dict(tp=2), dict(pp=2, tp=2, sequence_parallel=False)], ids=str)
def test_a_study_that_lays_out_few_layers_measures_what_the_whole_layout_does(sizes, family, changes):
    if "layer_types" in changes:
        changes = {**changes, "num_hidden_layers": len(changes["layer_types"])}
    config = config_of({**sizes, "activation_checkpoint": "selective"})
    study = Study(open_skeleton(models.tiny_config(family, **changes)), SEQ)
    with no_network(config.tp) as tp:
        whole = measure(lay_out(study.model, config, tp), config, 2, SEQ)
    assert study.activations(config, 2) == whole
