"""Run a benchmark's worker in fresh processes under torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any


def under_torchrun(module: str, processes: int, *arguments: str, threads: int = 1, timeout: float = 900) -> Any:
    """What rank 0 of ``python -m module arguments`` prints last as one line of JSON; SystemExit if it fails.

    ``threads``: torch's, of each process. ``timeout``: seconds.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [*command, "-m", module, *arguments], env=env, stdout=pipe, stderr=pipe, text=True
    ) as process:
        try:
            out, errors = process.communicate(timeout=timeout)
        except BaseException:
            process.terminate()  # torchrun then ends its workers; killed, it would leave them
            raise
    lines = [line for line in out.splitlines() if line.startswith(("{", "["))]
    if process.returncode or not lines:
        raise SystemExit(f"{module} {' '.join(arguments)} failed:\n{errors[-3000:]}")
    return json.loads(lines[-1])


def bind_to_cores(rank: int, world_size: int) -> None:
    """Give this rank cores of its own, where the system can: as many as there are for each, the same each time.

    Left to itself, the scheduler may put two ranks on one core for a while, and what waits for a peer then takes
    longer or shorter by chance: the tiny model's ratios were 1.04 to 1.39 over starts of the same code.
    """
    if not hasattr(os, "sched_setaffinity"):  # macOS
        return
    cores = sorted(os.sched_getaffinity(0))
    each = max(1, len(cores) // world_size)
    first = rank * each % len(cores)
    os.sched_setaffinity(0, cores[first : first + each])
