"""Activations a rank keeps at once in a real step, beside what the simulator and the closed forms say."""

from __future__ import annotations

import pytest

from meshpar.config import ParallelConfig
from meshpar.planner.orders import schedule_order
from meshpar.planner.simulate import simulate
from tests import jobs_in_flight as jobs
from tests import models


def expected(config: ParallelConfig, microbatches: int) -> list[list[int]]:
    """Of each rank, after each of its forwards: (stage, microbatch) pairs whose backward has not ended."""
    ranks = []
    for spans in simulate(schedule_order(config, microbatches), lambda *_: 1.0).ranks:
        held, counts = 0, []
        for action, _, _ in spans:
            held += {"F": 1, "I": 0, "B": -1, "W": -1}[action.kind]
            counts += [held] if action.kind == "F" else []
        ranks.append(counts)
    return ranks


def closed_form(schedule: str, p: int, m: int) -> list[int]:
    """Most (stage, microbatch) pairs in flight on each rank, at two stages a rank where a rank has several."""
    warmup = [2 * (p - i - 1) + p + 1 for i in range(p)]
    return {
        "GPipe": [m] * p,
        "1F1B": [min(m, p - i) for i in range(p)],
        "Interleaved1F1B": [min(2 * m, n) for n in warmup],
        "InterleavedZeroBubble": [2 * p] * p,
        "ZBVZeroBubble": [2 * p] * p,
        "LoopedBFS": [2 * m] * p,
        "DualPipeV": [2 * p + 1] * p,
    }[schedule]


@pytest.mark.parametrize(
    ("schedule", "virtual"),
    [
        ("GPipe", 1),
        ("1F1B", 1),
        ("Interleaved1F1B", 2),
        ("InterleavedZeroBubble", 2),
        ("ZBVZeroBubble", 2),
        ("LoopedBFS", 2),
        ("DualPipeV", 2),
    ],
)
@pytest.mark.parametrize("pp", [2, 4])
def test_autograd_keeps_no_more_microbatches_than_the_schedule_needs(pool, pp, schedule, virtual):
    microbatches = 8
    settings = dict(pp=pp, dp_shard=1, schedule=schedule, virtual_stages=virtual, microbatches=microbatches)
    model = dict(num_hidden_layers=8)
    counts = pool.run(pp, jobs.in_flight, settings, models.make_batch(rows=microbatches), model)
    assert counts == expected(ParallelConfig(**settings), microbatches)
    assert [max(rank) for rank in counts] == closed_form(schedule, pp, microbatches)
