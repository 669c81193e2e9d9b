"""Each rank's thread beside training: it hears signals, feels a peer's pulse, and ends the process when a rank failed.

A rank's pulse is the number of its progress marks. Its neighbour calls the roll when the pulse stands still, as does
every rank that lost a peer in a collective.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time

import torch.distributed as dist

from . import failure, progress
from .config import ParallelConfig
from .failure import FAILED
from .progress import HERE
from .rollcall import Board, Cause, RollCall

INTERVAL_SECONDS = 1.0
ANSWER_SECONDS = 4.0
# Launchers pass on signals that the workers have received, too: within this time it is the same one.
SAME_SIGNAL_SECONDS = 1.0

_TIMED_PHASES = ("data", "forward", "backward", "p2p", "optimizer")  # others may take any time
_AT_END = "end"


class Watch(threading.Thread):
    """Every rank of a torchrun job starts it after its process group."""

    def __init__(self, config: ParallelConfig, timeout_seconds: float) -> None:
        super().__init__(name="watch", daemon=True)
        self.stop_requested = False
        self._timeout, self._closing = timeout_seconds, False
        self._rank, world = dist.get_rank(), dist.get_world_size()
        self._neighbour = (self._rank + 1) % world
        self._board = Board(timeout_seconds)
        self._roll_call = RollCall(self._board, config)
        self._first_step, self._ticks = 0, 0
        self._pulse_felt, self._felt_at = "", time.monotonic()
        self._signalled_at: float | None = None
        self._wakeups, self._waker = socket.socketpair()

    def start(self) -> None:
        """From here on signals are heard, and what ends one rank ends all."""
        HERE.share()
        self._waker.setblocking(False)
        # Python's own handlers wait for the main thread, which may be in a collective; this thread is woken at once.
        signal.set_wakeup_fd(self._waker.fileno())
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        self._board.set(f"pulse/{self._rank}", self._pulse())
        self._board.wait(f"pulse/{self._neighbour}")
        failure.peers = self
        super().start()

    def close(self) -> None:
        """The run has come to its end."""
        HERE.mark("end")
        self._closing = True
        signal.set_wakeup_fd(-1)
        self._waker.send(b"\0")
        self.join(ANSWER_SECONDS)

    def started_at(self) -> int | None:
        """The step at which an earlier attempt of this run began to train, where torchrun has restarted it."""
        step = self._board.get("started_at", run=True)
        return None if step is None else int(step)

    def set_started_at(self, step: int) -> None:
        """Keep it for later attempts; the first one's stands."""
        self._board.claim("started_at", str(step), run=True)

    # What failure.py asks of it

    def tell(self, message: str, status: int) -> tuple[str, int]:
        """This rank failed: let the others end with its message, or it with theirs."""
        ending = self._roll_call.publish(Cause(message, status))
        return ending.message or message, ending.status

    def find_cause(self, own: str) -> tuple[str, int]:
        """Message and exit status of a rank that lost a peer, or sees one that stands still; ``own``: what it knows."""
        self._roll_call.lost_peer |= threading.current_thread() is threading.main_thread()
        judges = self._roll_call.begin()
        deadline = time.monotonic() + ANSWER_SECONDS * (1 if judges else 2)
        found = None
        while found is None and time.monotonic() < deadline and not (judges and self._roll_call.complete()):
            time.sleep(0.1)
            found = self._roll_call.verdict() or self._roll_call.death_here()
        if found is None and judges:
            found = self._roll_call.verdict() or self._roll_call.judge()
        return self._end_with(found or Cause(own, FAILED))

    def _end_with(self, verdict: Cause) -> tuple[str, int]:
        ending, here = self._roll_call.publish(verdict), progress.neighbours()
        for rank in {*verdict.silent, *ending.silent}:
            at = progress.position_of(here[rank]) if rank in here else None
            # A stopped process hears no SIGTERM, and torchrun would wait half a minute for it.
            if at is not None and not progress.has_died(here[rank]):
                os.kill(at.pid, signal.SIGKILL)
        # Ranks of a machine see in torchrun's directory who has printed it. Without one, a single rank does.
        speaks = ending.by == self._rank or progress.attempt_directory() is not None
        return ending.message if speaks else "", ending.status

    # The thread

    def run(self) -> None:
        while not self._closing:
            if select.select([self._wakeups], [], [], INTERVAL_SECONDS)[0]:
                for number in self._wakeups.recv(64):
                    self._hear(number)
            verdict = self._roll_call.verdict()
            if verdict is not None:
                failure.end_process(*self._end_with(verdict))
            self._board.set(f"pulse/{self._rank}", _AT_END if self._closing else self._pulse())
            self._feel_pulse()

    def _hear(self, number: int) -> None:
        if number not in (signal.SIGINT, signal.SIGTERM):
            return
        name, now = signal.Signals(number).name, time.monotonic()
        at = HERE.position()
        if self._signalled_at is not None:
            if now - self._signalled_at > SAME_SIGNAL_SECONDS:
                failure.report(f"a second {name} ended the run {at}", 128 + number)
            return
        self._signalled_at = now
        if failure.reported() is not None or self._roll_call.death_here() is not None:
            # It is torchrun that ends what is left of a failed run.
            failure.end_process(*self.find_cause(f"{name} ended the run {at}"))
        elif at.step == 0:
            failure.report(f"{name} ended the run before its first step; nothing to save", 128 + number)
        else:
            self.stop_requested = True

    def _pulse(self) -> str:
        """Stands still where this rank makes no progress and should; a first step may compile for any time."""
        at = HERE.position()
        self._first_step = self._first_step or at.step
        if at.phase not in _TIMED_PHASES or at.step == self._first_step:
            self._ticks += 1
        return f"{at.marks}.{self._ticks}"

    def _feel_pulse(self) -> None:
        pulse, now = self._board.get(f"pulse/{self._neighbour}"), time.monotonic()
        if pulse is None or pulse == _AT_END:
            return
        if pulse != self._pulse_felt:
            self._pulse_felt, self._felt_at = pulse, now
        elif now - self._felt_at > self._timeout:
            subject = self._roll_call.subject(self._neighbour)
            failure.end_process(*self.find_cause(f"{subject}: no progress for {self._timeout:g} s"))


_current: Watch | None = None


def begin(config: ParallelConfig, timeout_seconds: float) -> Watch:
    """Start this process's watch."""
    global _current
    _current = Watch(config, timeout_seconds)
    _current.start()
    return _current


def current() -> Watch | None:
    """This process's watch; None outside of the command line's jobs."""
    return _current
