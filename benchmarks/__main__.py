"""All benchmarks, one command: `make bench` writes benchmarks/RESULTS.md."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path

from . import demo_step, loss, step

OUT = Path(__file__).parent / "RESULTS.md"


def main() -> None:
    """Run all and write the report."""
    packages = ", ".join(f"{p} {version(p)}" for p in ("torch", "transformers", "accelerate"))
    sections = [
        "# Benchmark results",
        "`make bench` wrote this file. A table comes from runs in turn on one machine, and its ratios are of medians."
        " Other tables may have met it busier.",
        f"{os.cpu_count()} cores of {platform.machine()} ({platform.system()}), gloo, {packages}.",
        "## Training step",
        step.__doc__.split("\n\n")[2].replace("\n", " "),
        step.tables(),
        "## Head and loss",
        loss.table(),
        "## The demo's model on meshes",
        demo_step.table(),
    ]
    OUT.write_text("\n\n".join(s.strip() for s in sections) + "\n")
    print(f"wrote {OUT}")


if __name__ == "__main__":
    main()
