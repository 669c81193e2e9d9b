"""What stops one rank of a training run stops all, soon, with one message that says which rank, where and how."""

import socket
import time
from pathlib import Path

import pytest
import yaml

from meshpar import failure, rollcall, watch
from meshpar.config import ParallelConfig
from tests.workspace import recipe, run_python

# On one rank, in the second step, in one place.
BROKEN_RUN = """
import os, signal, sys, time
from pathlib import Path
import torch
import meshpar.checkpoint
import meshpar.step_loss
from meshpar.cli import main
from meshpar.train.data import GlobalBatches

place, kind, rank, recipe, broken_at = sys.argv[1:]
steps = []

def row_is_broken():
    raise ValueError("row 5 is broken")

def sleep_for_ever():
    time.sleep(1000)

faults = {
    "raise": row_is_broken,
    "hang": sleep_for_ever,
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSTOP": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}

def break_in(here, owner, name):
    function = getattr(owner, name)

    def breaking(*args, **kwargs):
        if here == "data":
            steps.append(1)
        if here == place and os.environ["RANK"] == rank and len(steps) == 2:
            Path(broken_at).write_text(str(time.time()))
            faults[kind]()
        return function(*args, **kwargs)

    setattr(owner, name, breaking)

break_in("data", GlobalBatches, "next")
break_in("forward", meshpar.step_loss, "cross_entropy_sum")
break_in("optimizer", torch.optim.AdamW, "step")
break_in("save", meshpar.checkpoint, "save")
sys.exit(main(["train", recipe]))
"""

DIED = "the process died; the machine may have run out of memory"
STOPPED = "the process does not answer; it is stopped, or its machine is gone"
HANGS = "no progress while other ranks wait for it; it is in sleep_for_ever (script.py:17)"
BROKEN = "ValueError: row 5 is broken"


@pytest.mark.parametrize(
    ("place", "kind", "sizes", "rank", "coordinates", "reason"),
    [
        ("data", "raise", (2, 1, 2), 3, "pp=1, dp=0, tp=1", BROKEN),
        ("forward", "raise", (2, 1, 1), 1, "pp=1, dp=0, tp=0", BROKEN),
        ("save", "SIGKILL", (1, 2, 1), 0, "pp=0, dp=0, tp=0", DIED),
        ("forward", "hang", (2, 1, 1), 1, "pp=1, dp=0, tp=0", HANGS),
        ("optimizer", "SIGSTOP", (1, 1, 2), 0, "pp=0, dp=0, tp=0", STOPPED),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isalpha() else None,
)
def test_what_ends_one_rank_ends_all_with_one_message(
    workspace, tmp_path, place, kind, sizes, rank, coordinates, reason
):
    """T14C: peers that wait for the failed rank, in a pipeline's receive or in a sum over tp, do not wait long."""
    pp, dp, tp = sizes
    file, script, broken_at = (tmp_path / name for name in ("recipe.yaml", "script.py", "broken_at"))
    raw = recipe(workspace, tmp_path / "run", dict(pp=pp, dp_shard=dp, tp=tp), checkpoint__every=2)
    raw["distributed"] = {"timeout_seconds": 10.0}
    file.write_text(yaml.safe_dump(raw))
    script.write_text(BROKEN_RUN)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(pp * dp * tp)]
    done = run_python(*torchrun, str(script), place, kind, str(rank), str(file), str(broken_at))
    seconds = time.time() - float(broken_at.read_text())
    assert done.returncode == 1
    messages = [line for line in done.stderr.splitlines() if line.startswith("meshpar: ")]
    subject = f"rank {rank} ({coordinates}, host {socket.gethostname()})"
    assert messages == [f"meshpar: error on {subject} at step 2 in {place}: {reason}"]
    assert "Traceback" not in before_the_summary(done.stderr)
    assert seconds < (8 if kind in ("raise", "SIGKILL") else 20)
    steps = len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert steps == (2 if place == "save" else 1)


def before_the_summary(stderr: str) -> str:
    """What the workers said; torchrun's own traceback follows its log line on the first failure."""
    return stderr.partition("failed (exitcode")[0]


@pytest.fixture
def record(tmp_path, monkeypatch):
    """The directories that torchrun makes for two workers; this process is the first of them."""
    for local_rank in "01":
        (tmp_path / "attempt_0" / local_rank).mkdir(parents=True)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "attempt_0" / "0" / "error.json"))
    for name, value in (("RANK", "6"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    return tmp_path / "attempt_0" / "1" / "progress"


LEAVES_A_RECORD = """
import os, sys
os.environ["LOCAL_RANK"] = "1"
from meshpar.progress import HERE
HERE.share()
HERE.mark("backward", 17)
if sys.argv[1] == "end":
    HERE.mark("end")
os.kill(os.getpid(), 9) if sys.argv[1] == "die" else None
"""


def test_where_a_process_was_can_be_read_when_it_is_dead(record: Path):
    from meshpar.progress import has_died, neighbours, position_of

    assert neighbours() == {6: 0, 7: 1}
    assert position_of(1) is None
    assert not has_died(1), "it has not begun"
    run_python("-c", LEAVES_A_RECORD, "die")
    assert str(position_of(1)) == "at step 17 in backward"
    assert has_died(1)
    run_python("-c", LEAVES_A_RECORD, "end")
    assert not has_died(1), "it came to its end"


class Notes(dict):
    """A board of one process; ``lost`` is when its keeper is gone."""

    lost = False

    def claim(self, key: str, value: str) -> bool:
        return self.setdefault(key, value) == value

    def set(self, key: str, value: str) -> None:
        self[key] = value


def test_ranks_that_fail_apart_end_with_the_message_of_the_first(monkeypatch):
    """On two machines, each of which prints what its rank ends with."""
    monkeypatch.setattr(rollcall.dist, "get_world_size", lambda: 2)
    board, ranks = Notes(), []
    for rank in range(2):
        monkeypatch.setattr(rollcall.dist, "get_rank", lambda rank=rank: rank)
        one = watch.Watch.__new__(watch.Watch)
        one._rank, one._roll_call = rank, rollcall.RollCall(board, ParallelConfig(dp_shard=2))
        ranks.append(one)
    assert ranks[1].tell("error on rank 1", failure.BAD_USAGE) == ("error on rank 1", failure.BAD_USAGE)
    assert ranks[0].tell("error on rank 0", failure.FAILED) == ("error on rank 1", failure.BAD_USAGE)
    monkeypatch.setattr(watch.progress, "attempt_directory", lambda: Path("of the other machine"))
    verdict = rollcall.Cause("a peer was lost")
    assert ranks[0]._end_with(verdict) == ("error on rank 1", failure.BAD_USAGE)
