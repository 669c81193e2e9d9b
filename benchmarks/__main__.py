"""All benchmarks, one command: `make bench` writes benchmarks/RESULTS.md, a table as soon as it is there."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path

import torch

from . import demo_step, gpu, growth, load, loss, pipeline, set_up, step

OUT = Path(__file__).parent / "RESULTS.md"
TABLES = {
    "The demo's model on meshes": demo_step.table,
    "Training step": step.tables,
    "Head and loss": loss.table,
    "Pipeline schedules": pipeline.table,
    "Loading": load.table,
    "Setting up": set_up.table,
    "Growth": growth.table,
}


def main() -> None:
    """Run all and write the report."""
    packages = ", ".join(f"{p} {version(p)}" for p in ("torch", "transformers", "accelerate"))
    text = (
        "# Benchmark results\n\n"
        "`make bench` wrote this file. A table comes from runs in turn on one machine, and its ratios are of medians. "
        "Other tables may have met it busier.\n\n"
        f"{os.cpu_count()} cores of {platform.machine()} ({platform.system()}), gloo, {packages}.\n"
    )
    failures = 0
    tables = TABLES | ({"bfloat16 on CUDA": gpu.table} if torch.cuda.is_available() else {})
    for title, table in tables.items():
        try:
            body = table().strip()
        except (Exception, SystemExit) as error:  # a pipeline on a torch that has none, say
            body, failures = f"Does not run here: {str(error).strip().splitlines()[-1]}", failures + 1
        text += f"\n## {title}\n\n{body}\n"
        OUT.write_text(text)
        print(f"wrote {title!r} to {OUT}", flush=True)
    if failures:
        raise SystemExit(f"{failures} of {len(tables)} tables could not be made")


if __name__ == "__main__":
    main()
