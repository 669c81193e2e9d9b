"""What is measured of a machine takes the place of data sheets."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshpar.cli import main
from meshpar.planner import calibrate
from meshpar.planner.devices import device_named
from meshpar.planner.links import Network, Reach
from tests import models

CPU = torch.device("cpu")


def test_rates_are_arithmetic_over_seconds(monkeypatch):
    monkeypatch.setattr(calibrate, "_seconds_each", lambda run, device: 0.5)
    assert calibrate.measure_matmul(CPU, torch.float32) == 2 * 1024**3 / 0.5
    assert calibrate.measure_attention(CPU, torch.float32) == 2 * 8 * 64 * 512**2 / 0.5
    assert calibrate.measure_memory(CPU, torch.float32) == 3 * 2**20 * 4 / 0.5
    assert calibrate.measure_launch(CPU) == 0.5 / 4


def test_a_link_takes_what_was_measured_of_it(monkeypatch):
    seconds = {1 << 10: 120e-6, 1 << 24: 9e-3}
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        taken = iter(seconds.values())
        monkeypatch.setattr(calibrate, "_seconds_of", lambda run, device, calls: next(taken))
        link = calibrate.measure_link(CPU)
    finally:
        dist.destroy_process_group()
    network = Network(link, link, 8)
    for size, measured in seconds.items():
        forecast = network.seconds("all_reduce", 2 * 3 / 4 * size, Reach(4, 1, 4))
        assert forecast == pytest.approx(measured, rel=0.02)


def test_what_was_measured_replaces_the_data_sheet():
    known = device_named("h100-80gb")
    device = calibrate.Calibration("bfloat16", 600e12, 300e12, 2.5e12, 5e-6).device(known)
    assert device.matmul_rate("bfloat16") == pytest.approx(600e12)
    assert device.attention_rate("bfloat16") == pytest.approx(300e12)
    assert (device.memory_rate, device.launch, device.inside) == (2.5e12, 5e-6, known.inside)
    assert device.peak["bfloat16"] == known.peak["bfloat16"]  # what an MFU is of
    assert (device.memory, device.source) == (known.memory, "measured")


def test_a_rank_that_cannot_measure_is_named_in_one_sentence():
    with pytest.raises(RuntimeError, match=r"^rank [01] could not measure this machine: .*no_such_type'?$"):
        calibrate.calibrate_machine(2, "no_such_type")


def test_the_command_measures_this_machine(tmp_path, capsys):
    models.tiny_config().save_pretrained(tmp_path)
    options = ["--world-size", "2", "--calibrate", "--tp", "2", "--seq-len", "64"]
    assert main(["plan", str(tmp_path), "parallel.compute_dtype=float32", *options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["device"]["name"] == "cpu"
    assert 0 < found["step_seconds"] < math.inf
    assert 0 < found["mfu"] < 1
