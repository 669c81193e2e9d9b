"""How much memory this process holds, now and at most: resident memory, and the bytes of its tensors on the CPU."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import resource
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


_MMAP_THRESHOLD = -3  # of mallopt, in malloc.h


def settle() -> None:
    """Give freed memory back to the system, or what follows would take it up without growing (glibc only)."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@contextlib.contextmanager
def own_pages() -> Iterator[None]:
    """While it lasts, blocks from 64 KiB on get pages of their own, which go back when they are freed (glibc only).

    From the heap, the peak of a step of 415 MiB of tensors was 740 MiB of resident memory.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", lambda option, value: 0)
    set_option(_MMAP_THRESHOLD, 64 << 10)
    try:
        yield
    finally:
        set_option(_MMAP_THRESHOLD, 32 << 20)  # where glibc's own, which follows what is freed, ends up


def resident() -> int:
    """Bytes in memory now."""
    return _status("VmRSS")


def restart_peak() -> None:
    """Have `peak_resident` count from now on, where the system lets a process do that (Linux, proc(5))."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_resident() -> int:
    """Most bytes in memory at one time since `restart_peak`, or in the process's life where that cannot be had."""
    return _status("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    return 0


def peak_of_tensors(run: Callable[[], object], times: int = 3) -> int:
    """Most bytes that tensors made in ``run`` took at one time: every allocation and release that torch records.

    What a thread of gloo happens to let go of is not recorded, and would be counted on: the least of ``times`` runs.
    """
    return min(_recorded_peak(run) for _ in range(times))


def _recorded_peak(run: Callable[[], object]) -> int:
    from torch.autograd.profiler import profile

    with profile(use_cpu=True, profile_memory=True) as recorded:
        run()
    events = (e for e in recorded.kineto_results.events() if e.name() == "[memory]")
    now = peak = 0
    for _, nbytes in sorted(((e.start_ns(), e.nbytes()) for e in events), key=lambda event: event[0]):
        now += nbytes
        peak = max(peak, now)
    return peak


def bytes_of_tensors(tensors: Iterable[Tensor]) -> int:
    """Bytes of ``tensors``, those that are the same memory counted once; of a DTensor, its local part."""
    from torch.distributed.tensor import DTensor

    local = (t._local_tensor if isinstance(t, DTensor) else t for t in tensors)
    return sum({t.data_ptr(): t.nbytes for t in local}.values())
