"""Ranks killed at random moments of a run, which must lose no more than the steps since its last checkpoint.

    python -m tests.faults [--count 50] [--seed 0]     # `make faults`

Each case trains a tiny model on two ranks and ends one of them by SIGKILL, in a phase and after a delay that the seed
draws. The other must end soon after torchrun's SIGTERM, no checkpoint may be damaged, and the same command, given
again, must come to the end with the losses, gradient norms and weights of a run that nobody disturbed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from safetensors.torch import load_file

from meshpar.checkpoint_files import check_contents, read_manifest
from meshpar.progress import HERE
from meshpar.progress import PHASES as ORDER
from tests.workspace import make_workspace, recipe

RANKS, STEPS = 2, 6
MESHES = [{"dp_shard": 2}, {"dp_shard": 1, "tp": 2}, {"dp_shard": 1, "pp": 2}]
# "write": while a checkpoint's directory is not yet complete, in the background or not.
PHASES = ["load", "data", "forward", "backward", "optimizer", "save", "write", "export"]
LATEST_SECONDS = {"export": 0.005}  # after the phase has begun; others: 0.05
ENDS_WITHIN, TIMEOUT = 30.0, 120.0
SETTINGS = {"train__steps": STEPS, "train__deterministic": True, "checkpoint__every": 2, "checkpoint__keep": 2}
COMPARED = ("step", "loss", "grad_norm", "lr", "tokens")

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["meshpar.train.loop", "transformers.models.llama.modeling_llama"])


@dataclass(frozen=True)
class Fault:
    """SIGKILL to ``rank``, ``delay`` seconds after it has come to ``phase`` of ``step``."""

    mesh: int
    asynchronous: bool
    rank: int
    phase: str
    step: int
    delay: float

    @classmethod
    def draw(cls, number: int, seed: int) -> Fault:
        """Fault ``number`` of a seed; any eight in a row have every phase."""
        draw = random.Random(f"{seed}:{number}")
        phase = PHASES[number % len(PHASES)]
        step = draw.choice([2, 4, 6]) if phase in ("save", "write") else draw.randint(1, STEPS)
        return cls(
            draw.randrange(len(MESHES)),
            draw.random() < 0.5,
            draw.randrange(RANKS),
            phase,
            {"load": 0, "export": STEPS}.get(phase, step),
            draw.uniform(0, LATEST_SECONDS.get(phase, 0.05)),
        )

    def has_come(self, checkpoints: Path) -> bool:
        """Whether this process is where the fault is to happen."""
        if self.phase == "write":
            return (checkpoints / f"step-{self.step}.tmp").exists()
        at = HERE.position()
        return (at.step, ORDER.index(at.phase)) >= (self.step, ORDER.index(self.phase))


@dataclass
class Workplace:
    """A tiny model, its data, and what undisturbed runs on each mesh leave."""

    directory: Path
    references: dict[int, Path]

    @classmethod
    def make(cls, directory: Path) -> Workplace:
        """Write the model and the data; a mesh's undisturbed run is made when it is first asked for."""
        return cls(make_workspace(directory, dropout=0.1), {})

    def reference(self, mesh: int) -> Path:
        """Where the undisturbed run on ``MESHES[mesh]`` left its output."""
        if mesh not in self.references:
            out = self.directory / f"undisturbed-{mesh}"
            raw = recipe(self.directory, out, MESHES[mesh], **SETTINGS)
            exits = run(raw, out)
            assert exits == [0] * RANKS, f"the undisturbed run ended with {exits}"
            self.references[mesh] = out
        return self.references[mesh]


def inflict(fault: Fault, place: Workplace) -> None:
    """One case; AssertionError where anything is lost, damaged, or does not end."""
    out = place.directory / "disturbed"
    shutil.rmtree(out, ignore_errors=True)
    raw = recipe(place.directory, out, MESHES[fault.mesh], **SETTINGS | {"checkpoint__async": fault.asynchronous})
    reference = place.reference(fault.mesh)
    exits = run(raw, out, fault)
    assert exits[fault.rank] == -signal.SIGKILL, f"the moment of {fault} did not come: {exits}"
    survivor = exits[1 - fault.rank]
    assert survivor == 1 or (survivor == 0 and fault.phase == "export"), f"the other rank ended with {survivor}"
    kept = complete_steps(out)
    rows = metrics(out)
    assert not rows or len(rows) - max(kept, default=0) <= 3, f"{len(rows)} steps were done, and {kept} are kept"
    assert run(raw, out) == [0] * RANKS, "the run did not go on"
    assert metrics(out) == metrics(reference)
    ours, theirs = (load_file(path / "model" / "model.safetensors") for path in (out, reference))
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(theirs[name]) for name in ours)
    assert complete_steps(out) == [4, 6]
    assert {path.name for path in (out / "checkpoints").iterdir()} == {"step-4", "step-6"}


def complete_steps(out: Path) -> list[int]:
    """Steps of the checkpoints that look complete, each of which must be."""
    steps = []
    for path in (out / "checkpoints").glob("step-*"):
        if path.suffix != ".tmp":
            check_contents(path, read_manifest(path)["files"])
            steps.append(int(path.name.removeprefix("step-")))
    return sorted(steps)


def metrics(out: Path) -> list[dict]:
    """What each step reported, without what depends on the machine."""
    file = out / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [{key: row[key] for key in COMPARED} for row in map(json.loads, lines)]


def run(raw: dict, out: Path, fault: Fault | None = None) -> list[int]:
    """Train by the recipe ``raw`` on all ranks, as torchrun's agent starts them; their exit statuses."""
    from torch.distributed import TCPStore

    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=TIMEOUT))
    with tempfile.TemporaryDirectory() as attempt:
        calls = [(raw, rank, store.port, attempt, fault) for rank in range(RANKS)]
        ranks = [_processes.Process(target=train, args=call) for call in calls]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + TIMEOUT
        try:
            wait(lambda: any(p.exitcode is not None for p in ranks), deadline, "no rank has ended")
            if fault is not None:
                deadline = time.monotonic() + ENDS_WITHIN
                for process in ranks:  # as torchrun does
                    process.terminate()
            wait(lambda: all(p.exitcode is not None for p in ranks), deadline, "a rank goes on after another's end")
        finally:
            for process in ranks:
                process.kill()
                process.join()
    return [process.exitcode for process in ranks]


def wait(until: Callable[[], bool], deadline: float, problem: str) -> None:
    """Return when ``until()``; AssertionError with the ``problem`` after the deadline."""
    while not until():
        assert time.monotonic() < deadline, problem
        time.sleep(0.02)


def train(raw: dict, rank: int, port: int, attempt: str, fault: Fault | None) -> None:
    """One rank, in a process of its own."""
    import torch
    import yaml

    from meshpar.cli import main

    error_file = Path(attempt) / str(rank) / "error.json"
    error_file.parent.mkdir()
    file = error_file.parent / "recipe.yaml"
    file.write_text(yaml.safe_dump(raw))
    where = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=RANKS, LOCAL_WORLD_SIZE=RANKS, TORCHELASTIC_RESTART_COUNT=0)
    os.environ.update({name: str(value) for name, value in where.items()})
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    os.environ.update(TORCHELASTIC_ERROR_FILE=str(error_file), HF_HUB_OFFLINE="1")
    torch.set_num_threads(1)
    output = os.open(error_file.parent / "output.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    if fault is not None and fault.rank == rank:
        threading.Thread(target=strike, args=(fault, Path(raw["output_dir"]) / "checkpoints"), daemon=True).start()
    os._exit(main(["train", str(file)]))


def strike(fault: Fault, checkpoints: Path) -> None:
    """Wait for the fault's moment and end this process as the kernel would."""
    while not fault.has_come(checkpoints):
        time.sleep(0.0005)
    time.sleep(fault.delay)
    os.kill(os.getpid(), signal.SIGKILL)


def main(arguments: list[str] | None = None) -> int:
    """Inflict ``--count`` faults; 1 where one of them did harm."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    harmed = 0
    with tempfile.TemporaryDirectory() as directory:
        place = Workplace.make(Path(directory))
        for number in range(args.count):
            fault, start = Fault.draw(number, args.seed), time.perf_counter()
            try:
                inflict(fault, place)
                outcome = "ok"
            except Exception as error:
                outcome, harmed = f"{type(error).__name__}: {error}", harmed + 1
            print(f"{number + 1:3} {time.perf_counter() - start:5.1f} s  {fault}: {outcome}", flush=True)
    print(f"{args.count - harmed} of {args.count} runs went on as if nothing had happened")
    return 1 if harmed else 0


if __name__ == "__main__":
    sys.exit(main())
