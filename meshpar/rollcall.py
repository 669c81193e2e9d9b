"""Which rank failed, and how: the ranks answer where they are, and one judges by the answers and by who gives none."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import PrefixStore, TCPStore

from . import failure, progress
from .config import ParallelConfig
from .failure import FAILED
from .mesh import this_start
from .progress import HERE

T = TypeVar("T")


class Board:
    """What the ranks tell each other, in torchrun's store; silent once its keeper (torchrun, or rank 0) is gone."""

    def __init__(self, timeout_seconds: float) -> None:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._run = PrefixStore("meshpar", TCPStore(address, port, is_master=False, wait_for_workers=False))
        self._attempt = PrefixStore(str(this_start()), self._run)
        self._timeout, self.lost = timedelta(seconds=timeout_seconds), False

    def get(self, key: str, run: bool = False) -> str | None:
        """What was set, if anything; ``run``: by an earlier start of the workers, too."""
        store = self._run if run else self._attempt
        return self._ask(lambda: store.get(key).decode() if store.check([key]) else None)

    def set(self, key: str, value: str) -> None:
        self._ask(lambda: self._attempt.set(key, value))

    def claim(self, key: str, value: str, run: bool = False) -> bool:
        """Set what was not set before; whether ``value`` is what it is now."""
        store = self._run if run else self._attempt
        return self._ask(lambda: store.compare_set(key, "", value).decode() == value) or False

    def wait(self, key: str) -> None:
        """Return when ``key`` is set; raises DistStoreError where that takes too long."""
        self._attempt.wait([key], self._timeout)

    def _ask(self, question: Callable[[], T]) -> T | None:
        try:
            return None if self.lost else question()
        except RuntimeError:
            self.lost = True
            return None


@dataclass(frozen=True)
class Cause:
    """Why the run ends: one message, the exit status, ranks that cannot end by themselves, who has published it."""

    message: str
    status: int = FAILED
    silent: list[int] = field(default_factory=list)
    by: int | None = None  # the rank that has published it


@dataclass(frozen=True)
class Answer:
    """One rank in the roll call; ``waiting`` in a collective, or one that has given it up."""

    step: int
    marks: int
    where: str
    waiting: bool
    doing: str
    dead: dict[str, str]  # rank on the same machine that died -> where


class RollCall:
    """One rank's part in it: it answers, publishes, and judges where it is the one to."""

    def __init__(self, board: Board, config: ParallelConfig) -> None:
        self._board, self._config = board, config
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._answered = False
        self.lost_peer = False
        board.set(f"host/{self._rank}", socket.gethostname())

    def begin(self) -> bool:
        """Call for answers; whether this rank is the one that judges."""
        return self._board.claim("judge", str(self._rank))

    def verdict(self) -> Cause | None:
        """What a rank has published, or only printed on this machine; answers on the way where that is asked for."""
        if not self._answered and self._board.get("judge") is not None:
            self._answered = True
            self._board.set(f"answer/{self._rank}", json.dumps(asdict(self._answer())))
        published = self._board.get("verdict")
        if published is not None:
            return Cause(**json.loads(published))
        status = failure.reported()
        return None if status is None else Cause("", status)

    def publish(self, verdict: Cause) -> Cause:
        """Let all ranks end with it, unless another one was first; returns the one that they end with."""
        own = replace(verdict, by=self._rank)
        self._board.claim("verdict", json.dumps(asdict(own)))
        published = self._board.get("verdict")
        return own if published is None else Cause(**json.loads(published))

    def complete(self) -> bool:
        """Whether all have answered."""
        return all(self._board.get(f"answer/{rank}") is not None for rank in range(self._world))

    def death_here(self) -> Cause | None:
        """A rank of this machine whose process is gone."""
        dead = _dead_here()
        return self._death(dead) if dead else None

    def judge(self) -> Cause | None:
        """Who is to blame by the answers: one that died, one that does not answer, one that others wait for."""
        texts = {rank: self._board.get(f"answer/{rank}") for rank in range(self._world)}
        if self._board.lost:
            return None
        answers = {rank: Answer(**json.loads(text)) for rank, text in texts.items() if text is not None}
        answers.setdefault(self._rank, self._answer())
        dead = {rank: where for answer in answers.values() for rank, where in answer.dead.items()}
        if dead:
            return self._death(dead)
        silent = [rank for rank in range(self._world) if rank not in answers]
        if silent:
            return self._silence(silent)
        busy = {rank: answer for rank, answer in answers.items() if not answer.waiting}
        return self._hang(busy, answers) if busy else None

    def subject(self, rank: int, where: str = "") -> str:
        """ "error on rank 3 (pp=1, dp=0, tp=1, host NAME) at step 2 in forward"."""
        host = self._board.get(f"host/{rank}") or ""
        return failure.subject(rank, failure.place(rank, self._config), host, where)

    def _answer(self) -> Answer:
        at, (doing, waiting) = HERE.position(), activity()
        return Answer(at.step, at.marks, str(at), waiting or self.lost_peer, doing, _dead_here())

    def _death(self, dead: dict[str, str]) -> Cause:
        rank = min(map(int, dead))
        reason = "the process died; the machine may have run out of memory"
        return Cause(f"{self.subject(rank, dead[str(rank)])}: {reason}")

    def _silence(self, silent: list[int]) -> Cause:
        rank, others = silent[0], ", ".join(map(str, silent[1:]))
        local = progress.neighbours().get(rank)
        at = None if local is None else progress.position_of(local)
        reason = f"the process does not answer{f', nor do ranks {others}' if others else ''}"
        reason += "; it is stopped, or its machine is gone"
        return Cause(f"{self.subject(rank, str(at or ''))}: {reason}", silent=silent)

    def _hang(self, busy: dict[int, Answer], answers: dict[int, Answer]) -> Cause:
        rank, answer = min(busy.items(), key=lambda item: (item[1].step, item[1].marks))
        reason = "no progress while other ranks wait for it" if len(busy) < len(answers) else "no progress"
        return Cause(f"{self.subject(rank, answer.where)}: {reason}; it is in {answer.doing}")


def _dead_here() -> dict[str, str]:
    here = progress.neighbours()
    return {str(rank): str(progress.position_of(i)) for rank, i in here.items() if progress.has_died(i)}


def activity() -> tuple[str, bool]:
    """What the main thread is in: a collective that it waits for (True), else its innermost function outside torch."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        module, code = str(frame.f_globals.get("__name__", "")), frame.f_code
        if module.startswith("torch.distributed"):
            return pending_collective() or code.co_name, True
        if module.partition(".")[0] != "torch":
            text = f"{code.co_name} ({os.path.basename(code.co_filename)}:{frame.f_lineno})"
            if module == "meshpar.comm":  # it calls torch's functional collectives itself
                return pending_collective() or text, True
            # On CUDA the host waits for the device anywhere, and the device for its peers.
            pending = pending_collective() if torch.cuda.is_available() else None
            return pending or text, pending is not None
        frame = frame.f_back
    return "", False


def pending_collective() -> str | None:
    """The newest collective under way by torch's flight recorder: "all_reduce over mesh_tp"."""
    names = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
    dumps = [getattr(_distributed_c10d, name) for name in names if hasattr(_distributed_c10d, name)]
    entries = [entry for dump in dumps for entry in json.loads(dump(True, True)).get("entries", [])]
    active = [entry for entry in entries if not entry.get("retired")]
    if not active:
        return None
    return f"{active[-1]['profiling_name'].partition(':')[2]} over {active[-1]['process_group'][1]}"
