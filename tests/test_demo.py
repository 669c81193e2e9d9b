"""The demo's two ends: data that are the same everywhere, and the reference that a finished run is checked against."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest
import yaml

from meshpar.demo import ANSWER_CHARS, first_step_in_one_process
from tests import jobs_surface, jobs_train
from tests.workspace import recipe, run_python

# Where this Python, the tests and the user are; a directory at the root, as /usr is, may well be in a docstring.
PLACES = [place for place in (sys.prefix, sys.base_prefix, os.getcwd(), str(Path.home())) if place.count("/") > 1]


def test_pairs_are_the_same_in_every_process_and_say_nothing_of_this_machine(pool):
    [one] = pool.run(1, jobs_surface.demo_pairs)
    done = run_python("-c", "import json; from meshpar import demo; print(json.dumps([*demo.docstring_pairs()]))")
    assert one == json.loads(done.stdout), done.stderr
    assert len(one) > 3000
    assert len({pair["response"] for pair in one}) == len(one)
    for pair in one:
        assert re.match(r"Write the docstring of the Python (class|function|method|property) `[\w.]+", pair["prompt"])
        assert len(pair["response"]) in ANSWER_CHARS
        assert " at 0x" not in pair["prompt"]
        assert not [place for place in PLACES if place in pair["prompt"] + pair["response"]]


@pytest.mark.parametrize("pack", [True, False], ids=["packed", "padded"])
def test_the_first_step_in_one_process_is_that_of_the_run(pool, no_dropout, tmp_path, pack):
    parallel = dict(dp_shard=1, tp=2)
    raw = recipe(no_dropout, tmp_path, parallel, train__steps=2, train__seed=3, data__pack=pack)
    pool.run(2, jobs_train.train, raw)
    loss, grad_norm = first_step_in_one_process(yaml.safe_load((tmp_path / "recipe.yaml").read_text()))
    row = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    assert row["loss"] == pytest.approx(loss, abs=1e-6)
    assert row["grad_norm"] == pytest.approx(grad_norm, rel=1e-5)
    assert grad_norm > 1.5 * raw["optim"].get("max_grad_norm", 1.0), "before clipping"
