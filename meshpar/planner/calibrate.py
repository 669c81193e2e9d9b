"""Measures the machine it runs on: matrix products, attention, memory and, in a process group, its link.

The numbers replace a data sheet's, with nothing taken off: they are what is reached.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.spawn import ProcessException

from ..config import torch_dtype
from ..mesh import default_device
from .devices import Device, device_in_torch, device_named
from .links import Link

_SECONDS = 0.3  # of each measurement
_GPU_SIZES, _CPU_SIZES = (2048, 4096, 8192), (256, 512, 1024)
_LIMIT = 120  # seconds that ranks wait for each other
_SMALL, _LARGE = 1 << 10, 1 << 24  # bytes of the collectives that latency and bandwidth are read off


@dataclass(frozen=True)
class Calibration:
    """What one rank's device reached in ``dtype``, with all ranks of the machine at work: the mean of them.

    ``matmul``, ``attention``: FLOP/s. ``memory``: bytes a second that element-wise operations move. ``launch``: seconds
    in which the host starts one. ``link``: between the ranks, where there are several.
    """

    dtype: str
    matmul: float
    attention: float
    memory: float
    launch: float
    link: Link | None = None

    def device(self, known: Device) -> Device:
        """``known`` with what was measured; the peak of a CPU, which has no data sheet here, is what it reached."""
        peak = self.matmul if known.name == "cpu" else known.peak[self.dtype]
        return replace(
            known,
            peak={**known.peak, self.dtype: peak},
            matmul_efficiency=self.matmul / peak,
            attention_efficiency=self.attention / peak,
            bandwidth=self.memory,
            memory_efficiency=1.0,
            launch=self.launch,
            inside=self.link or known.inside,
            source="measured",
        )


def calibrate(device: torch.device, dtype: str = "bfloat16") -> Calibration:
    """Measure ``device`` in ``dtype``, in a few seconds; every rank of a process group calls it."""
    several = dist.is_initialized() and dist.get_world_size() > 1
    rates = (
        measure_matmul(device, torch_dtype(dtype)),
        measure_attention(device, torch_dtype(dtype)),
        measure_memory(device, torch_dtype(dtype)),
        measure_launch(device),
    )
    if several:
        mean = torch.tensor(rates, device=device) / dist.get_world_size()
        dist.all_reduce(mean)
        rates = tuple(mean.tolist())
    return Calibration(dtype, *rates, link=measure_link(device) if several else None)


def calibrate_machine(processes: int, dtype: str = "bfloat16") -> Calibration:
    """Measure this machine with ``processes`` ranks at work at once, as a job on it has them; starts them."""
    if processes == 1:
        return calibrate(default_device(), dtype)
    with tempfile.TemporaryDirectory() as directory:
        args = (processes, dtype, directory)
        try:
            torch.multiprocessing.spawn(_measure, args, processes)  # type: ignore[attr-defined, no-untyped-call]
        except ProcessException as error:  # with the rank's whole traceback
            lines = str(error).strip().splitlines()
            reason = next((line for line in reversed(lines) if re.match(r"[\w.]+(Error|Exception)\b", line)), lines[-1])
            raise RuntimeError(f"rank {error.error_index} could not measure this machine: {reason}") from error
        found = json.loads((Path(directory) / "found").read_text())
    return Calibration(**found | {"link": Link(**found["link"])})


def _measure(rank: int, processes: int, dtype: str, directory: str) -> None:
    """One of the ranks; the first writes what was found."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    where = f"file://{directory}/store"
    backend, limit = "nccl" if on_gpu else "gloo", timedelta(seconds=_LIMIT)
    dist.init_process_group(backend, where, timeout=limit, rank=rank, world_size=processes)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))  # as torchrun has it
    found = calibrate(device, dtype)
    if rank == 0:
        (Path(directory) / "found").write_text(json.dumps(asdict(found)))
    dist.destroy_process_group()


def device_here(device: torch.device) -> Device:
    """The table's entry for the machine's own device. Raises ConfigError for a GPU that is not in it."""
    if device.type != "cuda":
        return device_named("cpu")
    name = torch.cuda.get_device_name(device)
    return device_in_torch(name) or device_named(name)


def measure_matmul(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of the products of square matrices, at the best of a few sizes that layers have."""

    def rate(size: int) -> float:
        a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        return 2 * size**3 / _seconds_each(lambda: a @ b, device)

    return max(rate(size) for size in (_GPU_SIZES if device.type == "cuda" else _CPU_SIZES))


def measure_attention(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of causal attention's forward, counting half of all pairs of positions."""
    heads, length, size = (32, 4096, 128) if device.type == "cuda" else (8, 512, 64)
    query, key, value = (torch.randn(1, heads, length, size, device=device, dtype=dtype) for _ in range(3))
    seconds = _seconds_each(lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True), device)
    return 2 * heads * size * length**2 / seconds


def measure_memory(device: torch.device, dtype: torch.dtype) -> float:
    """Bytes a second that a sum of two activations reads and writes, at the size of a microbatch's hidden states."""
    elements = 1 << (25 if device.type == "cuda" else 20)
    a, b = (torch.randn(elements, device=device, dtype=dtype) for _ in range(2))
    return 3 * a.numel() * a.element_size() / _seconds_each(lambda: a + b, device)


def measure_launch(device: torch.device) -> float:
    """Seconds in which the host starts an operation of a model: a small layer's forward over its operations."""
    norm, linear = nn.RMSNorm(8, device=device), nn.Linear(8, 8, device=device)
    hidden = torch.randn(1, 1, 8, device=device)

    def operations() -> Tensor:
        return F.silu(linear(norm(hidden))) + hidden  # four, through modules

    return _seconds_each(operations, device) / 4


def measure_link(device: torch.device) -> Link:
    """All-reduces over the whole process group: what a small one takes is latency, what a large one adds is bytes."""
    ranks = dist.get_world_size()

    def seconds(size: int) -> float:
        tensor = torch.zeros(size // 4, device=device)
        taken = torch.tensor(_seconds_of(lambda: dist.all_reduce(tensor), device, 8), device=device)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        return float(taken)

    small, large = seconds(_SMALL), seconds(_LARGE)
    sent = 2 * (ranks - 1) / ranks
    bandwidth = sent * (_LARGE - _SMALL) / max(large - small, 1e-9)
    return Link("measured", bandwidth, small / (2 * (ranks - 1)), "measured", start=0.0, efficiency=1.0)


def _seconds_each(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call: the best of a few rounds, each as many calls as fit in a part of `_SECONDS`."""
    _seconds_of(run, device, 1)
    once = max(_seconds_of(run, device, 1), 1e-7)
    calls = max(1, min(2000, int(_SECONDS / 3 / once)))
    return min(_seconds_of(run, device, calls) for _ in range(3))


def _seconds_of(run: Callable[[], object], device: torch.device, calls: int) -> float:
    _wait(device)
    start = time.perf_counter()
    for _ in range(calls):
        run()
    _wait(device)
    return (time.perf_counter() - start) / calls


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
