"""What stops one rank of a training run stops all of them, soon, and with one message."""

import time

import pytest
import yaml

from tests.workspace import recipe, run_python

# On one rank, in the second step.
BROKEN_RUN = """
import os, sys, time
from pathlib import Path
import meshpar.model
from meshpar.cli import main
from meshpar.train.data import GlobalBatches

place, rank, recipe, raised_at = sys.argv[1:]
steps, take, loss_sum = [], GlobalBatches.next, meshpar.model.cross_entropy_sum

def fail_in(here):
    if here == place and os.environ["RANK"] == rank and len(steps) == 2:
        Path(raised_at).write_text(str(time.time()))
        raise ValueError("row 5 is broken")

def next_rows(batches, *where):
    steps.append(1)
    fail_in("loader")
    return take(batches, *where)

def loss(*args):
    fail_in("loss")
    return loss_sum(*args)

GlobalBatches.next, meshpar.model.cross_entropy_sum = next_rows, loss
sys.exit(main(["train", recipe]))
"""


@pytest.mark.parametrize(
    ("place", "sizes", "rank", "coordinates"),
    [("loader", (2, 1, 2), 3, "pp=1, dp=0, tp=1"), ("loss", (2, 1, 1), 1, "pp=1, dp=0, tp=0")],
    ids=["loader-2x1x2", "loss-2x1x1"],
)
def test_an_exception_on_one_rank_ends_all_with_its_message(workspace, tmp_path, place, sizes, rank, coordinates):
    """T14C: peers that wait for the failed rank, in a pipeline's receive or in a sum over tp, do not wait long."""
    pp, dp, tp = sizes
    file, script, raised_at = (tmp_path / name for name in ("recipe.yaml", "script.py", "raised_at"))
    file.write_text(yaml.safe_dump(recipe(workspace, tmp_path / "run", dict(pp=pp, dp_shard=dp, tp=tp))))
    script.write_text(BROKEN_RUN)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(pp * dp * tp)]
    done = run_python(*torchrun, str(script), place, str(rank), str(file), str(raised_at))
    seconds = time.time() - float(raised_at.read_text())
    assert done.returncode != 0
    messages = [line for line in done.stderr.splitlines() if line.startswith("meshpar: ")]
    assert messages == [f"meshpar: error on rank {rank} ({coordinates}): ValueError: row 5 is broken"]
    assert seconds < 30
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 1, "the first step was done"
