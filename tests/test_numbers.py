"""Steps whose numbers go wrong: seen before the optimizer runs, by all ranks, and traced to where it began."""

import json
from pathlib import Path

import pytest

from meshpar.recipe import parse_recipe
from tests import jobs_numbers as jobs
from tests.jobs_numbers import Fault
from tests.workspace import recipe

ONE, DP2, TP2, PP2 = {"dp_shard": 1}, {"dp_shard": 2}, {"dp_shard": 1, "tp": 2}, {"dp_shard": 1, "pp": 2}
PP2_TP2 = {"dp_shard": 1, "pp": 2, "tp": 2}
ZBV_TP2 = {**PP2_TP2, "schedule": "ZBVZeroBubble", "virtual_stages": 2}
HSDP = {"dp_replicate": 2, "dp_shard": 1}
SKIPPED_THIRD = [(1, "none", True), (2, "none", True), (3, "skip", False), (4, "none", True)]


def rows(out: Path) -> list[dict]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in (out / "metrics.jsonl").read_text().splitlines()]


def numbers(out: Path) -> list[dict]:
    """What must not depend on how a run came to a step."""
    return [{k: row[k] for k in ("step", "loss", "grad_norm", "lr", "tokens")} for row in rows(out) if "loss" in row]


def guarded(workspace: Path, out: Path, parallel: dict, guard: dict, **changes) -> dict:
    return {**recipe(workspace, out, parallel, **{"train__steps": 4, **changes}), "guard": guard}


def run(pool, raw: dict, fault: Fault | None = None, pass_over: int = 0) -> dict:
    """What rank 0 tells of a run, which must be what every rank tells; whether a step changed anything on any rank."""
    results = pool.run(parse_recipe(raw).world_size(), jobs.train, raw, fault, pass_over)
    first = results[0]
    for other in results:
        assert other["error"] == first["error"]
        assert [step[:3] for step in other["steps"]] == [step[:3] for step in first["steps"]]
    changed = [any(result["steps"][i][3] for result in results) for i in range(len(first["steps"]))]
    return {**first, "steps": [(*step[:2], new) for step, new in zip(first["steps"], changed, strict=True)]}


# Each of these is on one rank, in one microbatch of the third step.
FAULTS = {
    "1x1x1": (ONE, Fault("nan", "model.layers.2.mlp.down_proj", 0, 1), "pp=0, dp=0, tp=0"),
    "1x2x1": (DP2, Fault("nan", "model.layers.1.self_attn.q_proj", 1, 1), "pp=0, dp=1, tp=0"),
    "1x1x2-a-rank-s-part-of-a-sum": (
        TP2, Fault("huge before", "model.layers.2.mlp.down_proj", 1, 3), "pp=0, dp=0, tp=1",
    ),
    "2x1x1-head": (PP2, Fault("nan before", "lm_head", 1, 0), "pp=1, dp=0, tp=0"),
    "2x1x2": (PP2_TP2, Fault("nan", "model.layers.3.input_layernorm", 3, 2), "pp=1, dp=0, tp=1"),
    "2x1x2-checkpointed": (
        {**PP2_TP2, "activation_checkpoint": "full"},
        Fault("nan", "model.layers.0.mlp.act_fn", 1, 0),
        "pp=0, dp=0, tp=1",
    ),
    "2x1x2-ZBV": (ZBV_TP2, Fault("nan", "model.layers.3.mlp.up_proj", 1, 2), "pp=0, dp=0, tp=1"),
    "1x2x1-backward": (DP2, Fault("backward", "model.layers.1.mlp.up_proj", 1, 0), "pp=0, dp=1, tp=0"),
    "2x1x1-backward": (PP2, Fault("backward", "model.layers.3.mlp.act_fn", 1, 2), "pp=1, dp=0, tp=0"),
    "2x1x2-ZBV-backward": (
        ZBV_TP2, Fault("backward", "model.layers.2.post_attention_layernorm", 3, 1), "pp=1, dp=0, tp=1",
    ),
    "1x2x1-weight": (DP2, Fault("backward of weight", "model.norm", 1, 1), "pp=0, dp=1, tp=0"),
    # The gradient's copy on rank 1 is in no sum over ranks.
    "1x1x2-weight-copy": (
        {**TP2, "sequence_parallel": False},
        Fault("backward of weight", "model.norm", 1, 1),
        "pp=0, dp=0, tp=1",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("parallel", "fault", "coordinates"), FAULTS.values(), ids=list(FAULTS))
def test_a_step_that_is_not_finite_is_skipped_by_all_ranks_and_traced(
    pool, workspace, tmp_path, parallel, fault, coordinates
):
    told = run(pool, guarded(workspace, tmp_path, parallel, {"on_nonfinite": "skip"}), fault)
    assert told["steps"] == SKIPPED_THIRD
    *numbers_there, event = [row for row in rows(tmp_path) if row["step"] == 3]
    backward = fault.kind.startswith("backward")
    assert (numbers_there[0]["loss"] is None) != backward
    assert numbers_there[0]["grad_norm"] is None
    module, phase = fault.module, "backward" if backward else "forward"
    if fault.kind == "nan before":
        module = "LlamaForCausalLM before lm_head"
    what = "gradient norm" if backward else "loss"
    seen = f"rank {fault.rank} ({coordinates}), microbatch {fault.microbatch}, in {module} ({phase})"
    assert event == {"step": 3, "event": "skip", "reason": f"{what} is nan at step 3: first seen on {seen}"}
    assert told["warnings"] == [f"{event['reason']}; skip 1 of at most 10"]


def test_what_is_not_seen_again_is_no_fault_of_a_module(pool, workspace, tmp_path):
    fault = Fault("nan", "model.layers.3.mlp.up_proj", 1, once=True)
    told = run(pool, guarded(workspace, tmp_path, PP2, {"on_nonfinite": "skip"}), fault)
    assert told["steps"] == SKIPPED_THIRD
    assert "at step 3: not seen again when the step was run again: suspect the hardware" in rows(tmp_path)[3]["reason"]


def test_gradients_that_are_finite_on_each_rank_but_not_in_their_sum(pool, workspace, tmp_path):
    raw = guarded(workspace, tmp_path, DP2, {})
    told = run(pool, raw, Fault("huge backward of weight", "model.norm", microbatch=1))
    seen = "rank 0 (pp=0, dp=0, tp=0), in model.norm.weight (summed over ranks)"
    assert told["error"] == f"gradient norm is inf at step 3: first seen on {seen}"


@pytest.mark.parametrize(
    ("guard", "ends", "steps"),
    [
        ({}, "", 2),
        ({"on_nonfinite": "skip", "max_recoveries": 2}, "; guard.max_recoveries=2 are used up", 4),
        ({"on_nonfinite": "rollback"}, "; there is no checkpoint yet to go back to", 3),
    ],
    ids=["stop", "skips-used-up", "no-checkpoint"],
)
def test_a_run_stops_with_what_went_wrong(pool, workspace, tmp_path, guard, ends, steps):
    """A weight that is not finite makes every step wrong: it is named, and recovering from it has an end."""
    fault = Fault("weight", "model.layers.3.mlp.up_proj.weight", 2)
    raw = guarded(workspace, tmp_path, PP2_TP2, guard, train__steps=8, checkpoint__every=8)
    told = run(pool, raw, fault)
    assert len(told["steps"]) == steps
    seen = "rank 2 (pp=1, dp=0, tp=0), in model.layers.3.mlp.up_proj.weight (before the step)"
    step = 5 if "skip" in guard.values() else 3
    assert told["error"] == f"loss is nan at step {step}: first seen on {seen}{ends}"


@pytest.mark.parametrize(("parallel", "background"), [(HSDP, False), (PP2, True)], ids=["1x2x1-HSDP", "2x1x1-async"])
def test_a_rollback_goes_on_past_the_batches_it_comes_from(pool, workspace, tmp_path, parallel, background):
    """As a run that never saw them; stopped after it and resumed, too."""
    settings = {"train__steps": 6, "checkpoint__async": background, "checkpoint__every": 2}
    fault = Fault("nan", "model.layers.1.mlp.up_proj", 0, 0, batches=(4,))
    guard = {"on_nonfinite": "rollback"}
    told = run(pool, guarded(workspace, tmp_path / "run", parallel, guard, **settings, train__stop_at=4), fault)
    assert [step[:2] for step in told["steps"]] == [
        (1, "none"), (2, "none"), (3, "none"), (4, "rollback"), (3, "none"), (4, "none"),
    ]  # fmt: skip
    run(pool, guarded(workspace, tmp_path / "run", parallel, guard, **settings), fault)
    run(pool, guarded(workspace, tmp_path / "other", parallel, guard, **settings, train__stop_at=2))
    run(pool, guarded(workspace, tmp_path / "other", parallel, guard, **settings), pass_over=2)
    assert numbers(tmp_path / "run") == numbers(tmp_path / "other")
    weights = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("run", "other")]
    assert weights[0] == weights[1]
    (event,) = [row for row in rows(tmp_path / "run") if "event" in row]
    assert (event["step"], event["event"]) == (2, "rollback")
    assert event["reason"].startswith("loss is nan at step 4: first seen on rank 0 ")


@pytest.mark.parametrize(("action", "updates"), [("warn", True), ("skip", False)])
def test_a_spike_of_the_loss(pool, workspace, tmp_path, action, updates):
    guard = {"spike_factor": 1.5, "spike_window": 2, "on_spike": action}
    told = run(pool, guarded(workspace, tmp_path, TP2, guard), Fault("spike", "model.norm", batches=(1, 3)))
    assert told["steps"][2] == (3, action, updates)
    assert [step[1] for step in told["steps"]] == ["none", "none", action, "none"], "the window was not full at step 1"
    loss = {row["step"]: row["loss"] for row in numbers(tmp_path)}
    (event,) = [row for row in rows(tmp_path) if "event" in row]
    usual = (loss[1] + loss[2]) / 2
    assert event["reason"] == (
        f"loss is {loss[3]:.4f} at step 3, more than 1.5 times {usual:.4f}, the median of the last 2 good ones"
    )


def test_a_loop_of_ones_own_finds_the_module_too(pool):
    seen = "rank 2 (pp=1, dp=0, tp=0), microbatch 0, in model.layers.3.mlp (forward)"
    assert pool.run(4, jobs.find_in_own_loop, {"pp": 2, "dp_shard": 2, "microbatches": 2}) == [("None", seen, True)] * 4
