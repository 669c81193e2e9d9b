"""A run that is told to end saves and ends, and one that torchrun starts again goes on where it was."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import yaml

from tests import jobs_train as jobs
from tests.workspace import environment, recipe

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ENOUGH = 100_000  # steps; no run gets there


class Run:
    """A job of two ranks in processes of its own."""

    def __init__(self, tmp_path, raw: dict, *command: str) -> None:
        self.out, file = tmp_path / "run", tmp_path / "recipe.yaml"
        file.write_text(yaml.safe_dump(raw))
        command = (sys.executable, *command, "train", str(file))
        streams = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.process = subprocess.Popen(command, env=environment(), **streams)

    def workers(self) -> list[psutil.Process]:
        return sorted(psutil.Process(self.process.pid).children(), key=lambda worker: worker.pid)

    def wait_until(self, what) -> None:
        deadline = time.monotonic() + 120
        while not what() and self.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        assert what(), self.process.communicate()

    def steps(self) -> list[int]:
        file = self.out / "metrics.jsonl"
        return [json.loads(line)["step"] for line in file.read_text().splitlines()] if file.exists() else []

    def end(self) -> tuple[int, list[str], str]:
        """Exit status, meshpar's own messages, and all of stderr."""
        try:
            out, errors = self.process.communicate(timeout=60)
        finally:
            for worker in self.workers() if self.process.poll() is None else ():
                worker.kill()
            self.process.kill()
        return self.process.returncode, [s for s in (out + errors).splitlines() if s.startswith("meshpar: ")], errors


def losses(out) -> list[float]:
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("number", "to", "command"),
    [
        (signal.SIGTERM, "one rank", [*TORCHRUN, "-m", "meshpar"]),
        (signal.SIGTERM, "everything", ["-m", "meshpar"]),  # as SLURM does
        (signal.SIGINT, "the parent", ["-m", "meshpar"]),  # as Ctrl-C does: workers are in sessions of their own
    ],
    ids=["SIGTERM-one-rank", "SIGTERM-everything", "SIGINT-parent"],
)
def test_signal_saves_after_the_step_and_ends_with_0(pool, workspace, tmp_path, number, to, command):
    raw = recipe(workspace, tmp_path / "run", dict(pp=2, dp_shard=1), train__steps=ENOUGH, checkpoint__async=True)
    run = Run(tmp_path, raw, *command)
    run.wait_until(lambda: len(run.steps()) >= 3)
    workers = run.workers()
    for process in {"one rank": workers[1:], "everything": workers, "the parent": []}[to]:
        process.send_signal(number)
    if to != "one rank":
        run.process.send_signal(number)
    status, messages, errors = run.end()
    last = run.steps()[-1]
    assert (status, messages) == (0, [f"meshpar: saved at step {last}"]), errors
    assert [path.name for path in (run.out / "checkpoints").iterdir()] == [f"step-{last}"]
    assert not (run.out / "model").exists()
    if to == "one rank":
        raw["train"]["stop_at"] = last + 2
        pool.run(2, jobs.train, raw)
        whole = recipe(workspace, tmp_path / "whole", dict(pp=2, dp_shard=1), train__steps=ENOUGH)
        whole["train"]["stop_at"] = last + 2
        pool.run(2, jobs.train, whole)
        assert losses(run.out) == losses(tmp_path / "whole")


SLOW_SAVE = """
import sys, time
import meshpar.checkpoint
from meshpar.cli import main

def save(*args):
    sys.stdout.write("saving\\n")  # at once: two ranks write
    sys.stdout.flush()
    time.sleep(1000)

meshpar.checkpoint.save = save
sys.exit(main(sys.argv[1:]))
"""


def test_second_signal_ends_at_once(workspace, tmp_path):
    (tmp_path / "script.py").write_text(SLOW_SAVE)
    raw = recipe(workspace, tmp_path / "run", dict(pp=1, dp_shard=2), train__steps=ENOUGH)
    run = Run(tmp_path, raw, *TORCHRUN, str(tmp_path / "script.py"))
    run.wait_until(lambda: len(run.steps()) >= 3)
    workers = run.workers()
    workers[0].terminate()
    while "saving" not in (line := run.process.stdout.readline()):
        assert line, run.end()
    time.sleep(1.5)
    started = time.monotonic()
    workers[0].terminate()
    status, messages, _ = run.end()
    assert status == 1, "torchrun's own"
    assert messages == [f"meshpar: a second SIGTERM ended the run at step {run.steps()[-1]} in save"]
    assert time.monotonic() - started < 20


@pytest.mark.parametrize(
    ("file", "said"), [(None, "before it began"), ("recipe.yaml", "before its first step; nothing to save")]
)
def test_signal_before_the_first_step_ends_the_run(workspace, tmp_path, file, said):
    raw = recipe(workspace, tmp_path / "run", dict(pp=1, dp_shard=2), train__eval_at_start=True)
    raw["data"]["eval_path"] = raw["data"]["path"]
    run = Run(tmp_path, raw, "-m", "meshpar")
    run.wait_until(lambda: len(run.workers()) == 2 and (file is None or (run.out / file).exists()))
    run.process.terminate()
    status, messages, errors = run.end()
    assert messages == [f"meshpar: SIGTERM ended the run {said}"], errors
    assert status == 128 + signal.SIGTERM


# Ends one rank once, in step 4.
DIES_ONCE = """
import os, signal, sys
from meshpar.cli import main
from meshpar.train.data import GlobalBatches

take, steps = GlobalBatches.next, []

def take_or_die(*args):
    steps.append(1)
    if len(steps) == 4 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return take(*args)

GlobalBatches.next = take_or_die
sys.exit(main(sys.argv[1:]))
"""


def test_torchrun_starts_a_run_again_where_it_was(pool, workspace, tmp_path):
    """`resume: never` is about earlier runs, one of which has left a checkpoint here; it is not taken."""
    whole = recipe(workspace, tmp_path / "whole", dict(pp=1, dp_shard=2))
    pool.run(2, jobs.train, whole)
    raw = recipe(workspace, tmp_path / "run", dict(pp=1, dp_shard=2), checkpoint__every=1)
    pool.run(2, jobs.train, raw)
    raw["checkpoint"]["resume"] = "never"
    (tmp_path / "script.py").write_text(DIES_ONCE)
    run = Run(tmp_path, raw, *TORCHRUN, "--max-restarts", "1", str(tmp_path / "script.py"))
    out, errors = run.process.communicate(timeout=120)
    assert run.process.returncode == 0, errors
    assert f"resumed from {run.out}/checkpoints/step-3" in out
    assert run.steps() == [1, 2, 3, 4, 5, 6]
    assert losses(run.out) == losses(tmp_path / "whole")
    assert os.listdir(run.out / "model") == os.listdir(tmp_path / "whole" / "model")
