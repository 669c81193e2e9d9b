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
