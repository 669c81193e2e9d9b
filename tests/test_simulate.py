"""Replayed schedules against the closed forms of their papers."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial

import pytest

from meshpar.config import ConfigError, ParallelConfig
from meshpar.planner.orders import most_in_flight, schedule_order
from meshpar.planner.simulate import Action, simulate
from meshpar.schedules import SCHEDULES, accepts_microbatches

EQUAL = {"F": 1.0, "I": 1.0, "W": 1.0, "B": 2.0}


def timeline(schedule, pp, microbatches, virtual=1, times=EQUAL, latency=0.0):
    config = ParallelConfig(pp=pp, schedule=schedule, virtual_stages=virtual, microbatches=microbatches)
    return simulate(schedule_order(config, microbatches), lambda stage, kind: times[kind], latency)


def runnable():
    """Every schedule on small pipelines, with all its numbers of virtual stages up to 4."""
    for name, pp, microbatches in itertools.product(SCHEDULES, (2, 3, 4, 8), (8, 12, 16)):
        rule = SCHEDULES[name]
        for virtual in range(rule.least_virtual, min(rule.most_virtual or 4, 4) + 1):
            try:
                yield ParallelConfig(pp=pp, schedule=name, virtual_stages=virtual, microbatches=microbatches)
            except ConfigError:
                continue


@pytest.mark.parametrize(
    "config", list(runnable()), ids=lambda c: f"{c.schedule}-{c.pp}x{c.virtual_stages}-{c.microbatches}"
)
def test_every_stage_sees_every_microbatch_once(config):
    order = schedule_order(config, config.microbatches)
    actions = [action for steps in order for step in steps for action in step]
    assert len(set(actions)) == len(actions)
    of_kind = {kind: {a[1:] for a in actions if a.kind == kind} for kind in EQUAL}
    every = set(itertools.product(range(config.num_stages), range(config.microbatches)))
    assert of_kind["F"] == every
    assert of_kind["I"] == of_kind["W"]
    assert bool(of_kind["I"]) == SCHEDULES[config.schedule].splits_backward
    assert of_kind["B"] == every - of_kind["I"]
    spans = simulate(order, lambda stage, kind: EQUAL[kind]).ranks
    assert [s.action for rank in spans for s in rank] == actions
    assert all(a.finish <= b.start for rank in spans for a, b in itertools.pairwise(rank))


def test_what_the_first_rank_holds_has_a_closed_form():
    for config in {replace(config, microbatches=None) for config in runnable()}:
        for microbatches in filter(partial(accepts_microbatches, config), (1, 3, 7, 16, 30)):
            first = timeline(config.schedule, config.pp, microbatches, config.virtual_stages).in_flight[0]
            assert most_in_flight(config, microbatches) == first, (config, microbatches)


@pytest.mark.parametrize(
    ("pp", "microbatches", "virtual", "bubble"),
    [
        (16, 48, 1, 0.3125),
        (16, 48, 2, 0.15625),
        (16, 48, 3, 0.104167),
        (16, 48, 6, 0.052083),
        (4, 8, 1, 0.375),
        (8, 32, 4, 0.0546875),
        (8, 8, 1, 0.875),
        (16, 16, 7, 0.133929),
        (16, 16, 8, 0.117188),
    ],
)
@pytest.mark.parametrize("times", [EQUAL, {"F": 1.0, "B": 3.5}], ids=["equal", "unequal"])
def test_bubble_of_interleaved_schedules(pp, microbatches, virtual, bubble, times):
    """(p - 1) / (m v): arXiv 2104.04473, section 2.2."""
    names = ["GPipe", "1F1B"] if virtual == 1 else ["Interleaved1F1B", "LoopedBFS"]
    for name in names:
        assert timeline(name, pp, microbatches, virtual, times).bubble == pytest.approx(bubble, abs=1e-6)


@pytest.mark.parametrize(("pp", "microbatches", "virtual"), [(2, 8, 2), (4, 8, 2), (4, 16, 3), (8, 32, 4)])
@pytest.mark.parametrize("t_w", [1.0, 0.75])
def test_bubble_with_weight_gradients_put_off(pp, microbatches, virtual, t_w):
    """(p - 1) (T_F + T_I - T_W) on each rank, where v = 1: arXiv 2401.10241, table 2, there ZB-H1."""
    times = {"F": 1.0, "I": 1.0, "W": t_w, "B": 1.0 + t_w}
    bubble = (pp - 1) * (2.0 - t_w) / (microbatches * virtual * (2.0 + t_w))
    assert timeline("InterleavedZeroBubble", pp, microbatches, virtual, times).bubble == pytest.approx(bubble)


@pytest.mark.parametrize(("pp", "microbatches"), [(2, 8), (4, 8), (4, 16), (8, 32)])
def test_v_schedule_has_no_bubble_within_a_rank(pp, microbatches):
    """Where T_F = T_I = T_W; ranks start one forward after another (arXiv 2401.10241, section 6)."""
    found = timeline("ZBVZeroBubble", pp, microbatches, 2)
    for rank, spans in enumerate(found.ranks):
        assert spans[0].start == rank
        assert spans[-1].finish - spans[0].start == 2 * microbatches * 3
    assert timeline("1F1B", pp, microbatches).bubble > 3 * found.bubble


@pytest.mark.parametrize(
    ("pp", "microbatches", "virtual", "in_flight"),
    [
        (16, 48, 1, 16),
        (16, 48, 2, 23.5),
        (16, 48, 3, 21.0),
        (16, 48, 6, 18.5),
        (8, 32, 2, 11.5),
        (8, 32, 4, 9.75),
        (4, 8, 2, 5.5),
        (8, 8, 2, 8.0),
        (4, 4, 8, 4.0),
    ],
)
def test_activations_in_flight_on_the_first_rank(pp, microbatches, virtual, in_flight):
    """In microbatches of a whole rank, of which a stage is 1 / v."""
    name = "1F1B" if virtual == 1 else "Interleaved1F1B"
    assert timeline(name, pp, microbatches, virtual).in_flight[0] / virtual == in_flight


@pytest.mark.parametrize(("pp", "microbatches"), [(2, 8), (4, 8), (4, 16), (8, 16), (8, 64)])
def test_activations_in_flight_on_every_rank(pp, microbatches):
    """(stage, microbatch) pairs: arXiv 2104.04473 for 1F1B, arXiv 2401.10241 for the V (p microbatches of 2 stages)."""
    m, ranks = microbatches, range(pp)
    assert timeline("GPipe", pp, m).in_flight == [m] * pp
    assert timeline("1F1B", pp, m).in_flight == [min(m, pp - i) for i in ranks]
    for v in (2, 3):
        warmup = [2 * (pp - i - 1) + (v - 1) * pp + 1 for i in ranks]
        assert timeline("Interleaved1F1B", pp, m, v).in_flight == [min(m * v, n) for n in warmup]
        assert timeline("InterleavedZeroBubble", pp, m, v).in_flight == [pp * v] * pp
        assert timeline("LoopedBFS", pp, m, v).in_flight == [m * v] * pp
    if m >= 2 * pp:
        assert timeline("ZBVZeroBubble", pp, m, 2).in_flight == [2 * pp] * pp
        assert timeline("DualPipeV", pp, m, 2).in_flight == [2 * pp + 1] * pp


def test_latency_delays_the_first_and_the_last_microbatch():
    pp, m, latency = 4, 8, 0.25
    assert timeline("GPipe", pp, m, latency=latency).makespan == (m + pp - 1) * 3.0 + 2 * (pp - 1) * latency


def test_the_dearest_stage_sets_the_pace():
    config, forward = ParallelConfig(pp=4, schedule="GPipe"), [1.0, 2.0, 5.0, 3.0]
    found = simulate(schedule_order(config, 6), lambda stage, kind: EQUAL[kind] * forward[stage])
    assert found.makespan == 3 * (sum(forward) + 5 * max(forward))
    assert found.bubble == pytest.approx(4 * found.makespan / (3 * 6 * sum(forward)) - 1)


def test_overlapped_actions_are_sent_together():
    both = (Action("F", 0, 1), Action("F", 0, 2))
    found = simulate([[(Action("F", 0, 0),), both], [(Action("F", 1, i),) for i in range(3)]], lambda *_: 1.0)
    assert [span.start for span in found.ranks[0]] == [0, 1, 2]
    assert [span.start for span in found.ranks[1]] == [1, 3, 4]


def test_ranks_that_wait_for_each_other_are_an_error():
    first = [(Action("F", 0, 0),), (Action("B", 0, 0),), (Action("F", 0, 1),), (Action("B", 0, 1),)]
    second = [(Action("F", 1, i),) for i in range(2)] + [(Action("B", 1, i),) for i in range(2)]
    with pytest.raises(ValueError, match=r"cannot run.*rank 0.*stage=1.*rank 1.*stage=0, microbatch=1"):
        simulate([first, second], lambda *_: 1.0)
