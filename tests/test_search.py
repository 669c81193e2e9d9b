"""A search finds what looking at every setting in full would: what it leaves out, it leaves out for good."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from meshpar.config import ConfigError, ParallelConfig
from meshpar.planner import timing
from meshpar.planner.forecast import Job
from meshpar.planner.job import open_job
from meshpar.planner.memory import heaviest
from meshpar.planner.search import Setting, _Search, search
from meshpar.schedules import accepts_microbatches
from tests import models

FIXED = {"dp_replicate": 1}
WIDE = dict(hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=8)
SLIDING = dict(layer_types=["full_attention", "sliding_attention"] * 2, sliding_window=128)


def job_of(family: str, changes: dict, seq_len: int, rows: int, world_size: int = 4) -> Job:
    sizes = {"data.seq_len": seq_len, "batch.global_size": rows}
    return open_job(models.tiny_config(family, **changes), sizes, world_size, "h100-80gb", search=True)


def settings(finder: _Search) -> Iterator[tuple[Setting, Setting]]:
    """Each setting that can run, after its shape."""
    for shape in finder._shapes():
        for schedule, virtual in finder._pipelines(shape.config.pp):
            try:
                config = replace(shape.config, schedule=schedule, virtual_stages=virtual)
            except ConfigError:
                continue
            if accepts_microbatches(config, shape.batch.count):
                yield shape, Setting(config, shape.batch)


def seconds_of(job: Job, config: ParallelConfig, batch) -> float:
    layers = job.study.stage_layers(config)
    return timing.forecast(job.study.work(config), config, batch, layers, job.device, job.network).step_seconds


@pytest.mark.parametrize(
    ("family", "changes", "seq_len", "rows", "fixed"),
    [
        ("llama", WIDE, 64, 8, {"tp": 2}),  # mostly parameters
        ("llama", {}, 2048, 8, {}),  # mostly activations
        ("llama", WIDE, 512, 8, {"pp": 4}),  # several stages on each of several ranks
        ("llama", dict(num_attention_heads=3, num_key_value_heads=3, hidden_size=42), 128, 4, {}),
        ("gemma3_text", SLIDING, 256, 8, {"tp": 1}),
    ],
)
def test_what_is_quick_to_say_is_no_more_than_the_whole_forecast(family, changes, seq_len, rows, fixed):
    job = job_of(family, changes, seq_len, rows)
    finder, slack = _Search(job, FIXED | fixed, 1), 1 + 1e-9
    bounds = finder.bounds
    found = 0
    for shape, setting in settings(finder):
        config, batch = setting
        total = heaviest(job.study.memory(config, batch)).total
        assert bounds.state(config) <= total * slack, setting
        assert bounds.memory(config, batch) <= bounds.memory_in_order(config, batch) * slack, setting
        assert bounds.memory_in_order(config, batch) <= total * slack, setting
        seconds = seconds_of(job, config, batch)
        assert bounds.seconds(*shape) <= seconds * slack, setting
        assert bounds.seconds_of_schedule(config, batch, bounds.of_first_layers(*shape)) <= seconds * slack, setting
        found += 1
    assert found > 20


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_the_first_of_a_search_are_the_first_of_all(mode):
    job = job_of("llama", WIDE, 4096, 64, world_size=8)
    fixed = FIXED | {"activation_checkpoint": mode, "micro_size": 1, "pp": 4}
    every = sorted(seconds_of(job, *setting) for _, setting in settings(_Search(job, dict(fixed), 1)))
    best = search(job, fixed, keep=8).best
    assert [one.time.step_seconds for one in best] == pytest.approx(every[:8])
