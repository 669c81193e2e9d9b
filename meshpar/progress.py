"""Where this process is in its run: step and phase, kept where its peers on this machine can read them when it is dead.

The record is a file in torchrun's directory of this rank, mapped into memory: a mark is a write of 24 bytes, without a
call into the system, and it is there after a SIGKILL. A lock on the file tells whether its process lives.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path

PHASES = ("start", "load", "data", "forward", "backward", "p2p", "optimizer", "evaluation", "save", "export", "end")

_RECORD = struct.Struct("<qiiq")  # marks so far, step, index of the phase, process id


@dataclass(frozen=True)
class Position:
    """``step`` is the one being done, 0 before the first; ``marks`` grows with each mark."""

    marks: int
    step: int
    phase: str
    pid: int

    def __str__(self) -> str:
        if self.phase == "start":
            return ""
        return f"at step {self.step} in {self.phase}" if self.step else f"in {self.phase}"


class Progress:
    """This process's own record; in plain memory until `share`."""

    def __init__(self) -> None:
        self._record: bytearray | mmap.mmap = bytearray(_RECORD.size)
        self._marks, self._step, self._pid = 0, 0, os.getpid()

    def mark(self, phase: str, step: int | None = None) -> None:
        """Say what comes next. Cheap enough for every microbatch."""
        self._marks += 1
        self._step = self._step if step is None else step
        _RECORD.pack_into(self._record, 0, self._marks, self._step, PHASES.index(phase), self._pid)

    def position(self) -> Position:
        """The last mark."""
        return _unpack(self._record)

    def share(self) -> None:
        """Keep the record in torchrun's directory of this rank from here on, where there is one."""
        path = _record_path()
        if path is None:
            return
        self._file = path.open("w+b")  # open for as long as the process lives, for the lock
        self._file.truncate(_RECORD.size)
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        shared = mmap.mmap(self._file.fileno(), _RECORD.size)
        shared[:] = bytes(self._record)
        self._record = shared
        self.mark("start")


HERE = Progress()
mark = HERE.mark


def attempt_directory() -> Path | None:
    """What torchrun makes anew for every start of this machine's workers, with a directory for each of them."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(path).parent.parent if path and path != os.devnull else None


def neighbours() -> dict[int, int]:
    """Global rank -> local rank of the workers of this machine, this one included."""
    rank, local, count = (int(os.environ.get(name, 0)) for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    return {rank - local + i: i for i in range(count)}


def position_of(local_rank: int, directory: Path | None = None) -> Position | None:
    """The last mark of a worker of this machine, alive or dead; None where it has no record."""
    if directory is None and str(local_rank) == os.environ.get("LOCAL_RANK"):
        return HERE.position()  # to open and close the file would give up the lock on it
    path = _record_path(local_rank, directory)
    try:
        return _unpack(path.read_bytes()) if path is not None else None
    except (OSError, struct.error):
        return None


def has_died(local_rank: int) -> bool:
    """Whether a worker of this machine had begun and is gone without having come to its end."""
    path, position = _record_path(local_rank), position_of(local_rank)
    if path is None or position is None or position.pid in (0, os.getpid()) or position.phase == "end":
        return False
    with path.open("rb") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return False
    return True


def _record_path(local_rank: int | None = None, directory: Path | None = None) -> Path | None:
    directory = directory or attempt_directory()
    local = os.environ.get("LOCAL_RANK") if local_rank is None else local_rank
    return directory / str(local) / "progress" if directory is not None else None


def _unpack(record: bytes | bytearray | mmap.mmap) -> Position:
    marks, step, phase, pid = _RECORD.unpack_from(record)
    return Position(marks, step, PHASES[phase], pid)
