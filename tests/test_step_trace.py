"""A traced step of a real run: what ran, in what order, on one clock."""

from __future__ import annotations

import itertools

import pytest

from meshpar.config import ParallelConfig
from meshpar.planner.chrome import read_trace, write_trace
from meshpar.planner.orders import schedule_order
from meshpar.planner.simulate import Action, simulate
from tests import jobs_train as jobs
from tests.workspace import recipe

MICROBATCHES = 4


def traced(pool, workspace, out, parallel: dict):
    raw = recipe(workspace, out, parallel, log__trace=True, train__steps=3, optim__warmup_steps=1)
    size = parallel.get("pp", 1) * parallel.get("dp_shard", 1)
    pool.run(size, jobs.train, raw)
    return read_trace(out / "trace.json")


@pytest.mark.parametrize(("schedule", "virtual"), [("1F1B", 1), ("ZBVZeroBubble", 2)])
def test_a_real_step_runs_the_simulated_actions(pool, no_dropout, tmp_path, schedule, virtual):
    settings = dict(pp=2, dp_shard=1, schedule=schedule, virtual_stages=virtual)
    timeline = traced(pool, no_dropout, tmp_path, settings)
    order = schedule_order(ParallelConfig(**settings, microbatches=MICROBATCHES), MICROBATCHES)
    assert [[span.action for span in spans] for spans in timeline.ranks] == [
        [*itertools.chain(*rank)] for rank in order
    ]
    finished = {span.action: span.finish for spans in timeline.ranks for span in spans}
    for spans in timeline.ranks:
        assert all(0 <= a.start < a.finish <= b.start for a, b in itertools.pairwise(spans))
        for span in spans:
            if span.action.kind == "F" and span.action.stage:
                assert finished[span.action._replace(stage=span.action.stage - 1)] < span.finish


def test_passes_of_a_schedule_follow_each_other(pool, no_dropout, tmp_path):
    timeline = traced(pool, no_dropout, tmp_path, dict(pp=2, dp_shard=1, microbatches=2))
    assert [a.microbatch for (a, _, _) in timeline.ranks[0] if a.kind == "F"] == [0, 1, 2, 3]


def test_without_a_pipeline_forward_and_backward_alternate(pool, no_dropout, tmp_path):
    timeline = traced(pool, no_dropout, tmp_path, dict(dp_shard=2))
    own = [Action(kind, 0, i) for i in range(MICROBATCHES // 2) for kind in "FB"]
    assert [[span.action for span in spans] for spans in timeline.ranks] == [own] * 2


def test_a_trace_reads_back(tmp_path):
    config = ParallelConfig(pp=2, dp_shard=1, schedule="ZBVZeroBubble", virtual_stages=2)
    timeline = simulate(schedule_order(config, 4), lambda *_: 0.25)
    write_trace(tmp_path / "trace.json", timeline)
    assert read_trace(tmp_path / "trace.json").ranks == timeline.ranks
