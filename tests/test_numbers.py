"""Steps whose numbers go wrong: seen before the optimizer, on all ranks, and traced to where it began."""

import json
import math
from pathlib import Path

import pytest
import torch

from meshpar.recipe import parse_recipe
from tests import jobs_numbers as jobs
from tests.jobs_numbers import Fault
from tests.workspace import recipe

ONE, DP2, TP2, PP2 = {"dp_shard": 1}, {"dp_shard": 2}, {"dp_shard": 1, "tp": 2}, {"dp_shard": 1, "pp": 2}
PP2_TP2 = {"dp_shard": 1, "pp": 2, "tp": 2}
ZBV_TP2 = {**PP2_TP2, "schedule": "ZBVZeroBubble", "virtual_stages": 2}


def rows(out: Path) -> list[dict]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in (out / "metrics.jsonl").read_text().splitlines()]


def numbers(out: Path, *steps: int) -> list[dict]:
    return [{k: row[k] for k in ("step", "loss", "grad_norm", "lr", "tokens")} for row in rows(out) if "loss" in row]


def run(pool, raw: dict, fault: Fault | None = None) -> dict:
    """What rank 0 tells of a run, which must be what every rank tells; whether a step changed anything on any rank."""
    results = pool.run(parse_recipe(raw).world_size(), jobs.train, raw, fault)
    first = results[0]
    for other in results:
        assert other["error"] == first["error"]
        assert [step[:3] for step in other["steps"]] == [step[:3] for step in first["steps"]]
    changed = [any(result["steps"][i][3] for result in results) for i in range(len(first["steps"]))]
    return {**first, "steps": [(*step[:2], new) for step, new in zip(first["steps"], changed, strict=True)]}


@pytest.mark.parametrize(
    ("parallel", "fault", "place"),
    [
        (ONE, Fault("nan", "model.layers.2.mlp.down_proj", 0, 1), "pp=0, dp=0, tp=0"),
        (DP2, Fault("nan", "model.layers.1.self_attn.q_proj", 1, 1), "pp=0, dp=1, tp=0"),
        (TP2, Fault("nan", "model.layers.3.mlp.up_proj", 1, 3), "pp=0, dp=0, tp=1"),
        (PP2_TP2, Fault("nan", "model.layers.3.input_layernorm", 3, 2), "pp=1, dp=0, tp=1"),
        (
            {**PP2_TP2, "activation_checkpoint": "full"},
            Fault("nan", "model.layers.0.mlp.act_fn", 1, 0),
            "pp=0, dp=0, tp=1",
        ),
        (ZBV_TP2, Fault("nan", "model.layers.3.mlp.up_proj", 1, 2), "pp=0, dp=0, tp=1"),
        (DP2, Fault("backward", "model.layers.1.mlp.up_proj", 1, 0), "pp=0, dp=1, tp=0"),
        (PP2, Fault("backward", "model.layers.3.mlp.act_fn", 1, 2), "pp=1, dp=0, tp=0"),
        (ZBV_TP2, Fault("backward", "model.layers.2.post_attention_layernorm", 3, 1), "pp=1, dp=0, tp=1"),
        (DP2, Fault("backward of weight", "model.norm", 1, 1), "pp=0, dp=1, tp=0"),
        (PP2, Fault("nan", "model.norm", 1, 0), "pp=1, dp=0, tp=0"),
    ],
    ids=lambda value: value.kind if isinstance(value, Fault) else None,
)
def test_a_step_that_is_not_finite_is_skipped_and_traced(pool, workspace, tmp_path, parallel, fault, place):
    raw = recipe(workspace, tmp_path, parallel, train__steps=4)
    told = run(pool, {**raw, "guard": {"on_nonfinite": "skip"}}, fault)
    assert told["steps"] == [(1, "none", True), (2, "none", True), (3, "skip", False), (4, "none", True)]
    print("XX", fault, place, told["warnings"])
