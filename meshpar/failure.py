"""How a failed run ends: one short message from one rank, its traceback in a file, and a quick exit of all."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn, Protocol

from . import progress
from .config import ConfigError, ParallelConfig

FAILED, BAD_USAGE = 1, 2

# A rank that only lost its peer stays silent this long: the rank that failed first gets to say why, and torchrun
# ends the others meanwhile.
PEER_GRACE_SECONDS = 3.0

_REPORTED = "reported"
_ending = threading.Lock()

_LOST_PEER = re.compile(r"gloo|nccl|connection (closed|reset|refused)|broken pipe|timed? ?out|socket", re.IGNORECASE)


class AllRanksFailed(Exception):
    """Raised by every rank alike: its message says what to blame, and no rank is named for raising it."""


class Peers(Protocol):
    """The other ranks, once this one is in touch with them."""

    def tell(self, message: str, status: int) -> tuple[str, int]:
        """Let them end with this rank's message and status, or this rank with those of one that was first."""

    def find_cause(self, own: str) -> tuple[str, int]:
        """Message and status that a rank which lost a peer ends with; ``own``: what it would say by itself."""


peers: Peers | None = None

_own: tuple[int, str] | None = None  # this process's rank and place, while `one_message` guards it


@contextmanager
def one_message(rank: int, place: str = "", output_dir: str | os.PathLike[str] | None = None) -> Iterator[None]:
    """End this worker process when the body raises, so that all ranks together show one short message.

    The traceback goes to `output_dir/errors/rank-R.txt`, and to stderr too with MESHPAR_DEBUG=1. The exit status is 2
    for a `ConfigError` and 1 for any other exception.

    Args:
        rank: global rank of this process.
        place: its coordinates in the mesh, for the message: "pp=0, dp=1, tp=0".
        output_dir: the run's directory, once the recipe is known.
    """
    global _own
    before, _own = _own, (rank, place)
    try:
        yield
    except Exception as error:
        _end_process(error, rank, output_dir)
    finally:
        _own = before


def describe(error: BaseException) -> str:
    """The error in one short text: a setting that cannot work speaks for itself, others give their type."""
    if isinstance(error, ConfigError):
        lines = str(error).splitlines()
        return lines[0] if len(lines) == 1 else "\n  ".join(["the recipe cannot run:", *lines])
    if isinstance(error, AllRanksFailed):
        return str(error)
    # torch appends its C++ stack to the message.
    text = re.split(r"\nException raised from ", str(error))[0].strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def exit_status(error: BaseException) -> int:
    """2 for a setting that cannot work, 1 for anything else."""
    return BAD_USAGE if isinstance(error, ConfigError) else FAILED


def print_error(error: BaseException, subject: str = "") -> None:
    """Print `meshpar: <subject>: <error>` to stderr, and the traceback with MESHPAR_DEBUG=1."""
    if os.environ.get("MESHPAR_DEBUG") == "1":
        traceback.print_exception(error)
    print(f"meshpar: {subject}{describe(error)}", file=sys.stderr, flush=True)


def place(rank: int, config: ParallelConfig) -> str:
    """A rank's coordinates: tp is the innermost dimension of the mesh, pp the outermost."""
    dp_rank, tp_rank = divmod(rank % (config.dp * config.tp), config.tp)
    return f"pp={rank // (config.dp * config.tp)}, dp={dp_rank}, tp={tp_rank}"


def subject(rank: int, place: str, host: str, where: str) -> str:
    """ "error on rank 3 (pp=1, dp=0, tp=1, host NAME) at step 2 in forward"."""
    known = ", ".join(part for part in (place, f"host {host}" if host else "") if part)
    return f"error on rank {rank}{f' ({known})' if known else ''}{f' {where}' if where else ''}"


def subject_of(error: BaseException) -> str:
    """`subject` of the process that raised ``error``, this one as it is now or another; "" outside `one_message`."""
    elsewhere = getattr(error, "failed_on", "")
    if elsewhere or _own is None:
        return str(elsewhere)
    return subject(*_own, socket.gethostname(), str(progress.HERE.position()))


def raised_by(error: Exception, subject: str) -> Exception:
    """``error`` as another process has sent it with ``subject``, its own `subject_of` it, which is to be named."""
    error.failed_on = subject  # type: ignore[attr-defined]
    return error


def report(message: str, status: int) -> NoReturn:
    """End all ranks with this one's message."""
    end_process(message, status, tell=True)


def end_process(message: str, status: int, tell: bool = False) -> NoReturn:
    """Print ``message``, unless another rank of this machine has said why, and end at once; ``tell`` the others."""
    _ending.acquire()  # for good: of two threads that end the process, one finishes what it says
    try:
        if tell and peers is not None:
            message, status = peers.tell(message, status)
        if message and _first_to_report(status):
            print(f"meshpar: {message}", file=sys.stderr, flush=True)
            _tell_torchrun(f"meshpar: {message}")
        sys.stdout.flush()
        sys.stderr.flush()
    finally:  # a full disk, or a closed terminal, too
        # Not sys.exit: threads and process groups that wait for a peer would keep this process, and all of them, alive.
        os._exit(status)


def _end_process(error: Exception, rank: int, output_dir: str | os.PathLike[str] | None) -> NoReturn:
    cause = _without_wrappers(error)
    if output_dir is not None and not isinstance(cause, ConfigError):
        _save_traceback(error, Path(output_dir) / "errors" / f"rank-{rank}.txt")
    if os.environ.get("MESHPAR_DEBUG") == "1":
        traceback.print_exception(cause)
    about = f"{subject_of(cause)}: "
    if isinstance(cause, ConfigError | AllRanksFailed):
        report(describe(cause), exit_status(cause))
    collective = _lost_peer(error)
    if collective is None:
        report(about + describe(cause), exit_status(cause))
    own = f"{about}a peer was lost in {collective}: {describe(cause)}"
    if peers is not None:
        end_process(*peers.find_cause(own))
    time.sleep(PEER_GRACE_SECONDS)
    report(own, FAILED)


def _without_wrappers(error: BaseException) -> BaseException:
    # torch's pipeline wraps what a stage raised in a RuntimeError that describes the stage's inputs.
    while error.__cause__ is not None and _raised_in(error).startswith("torch.distributed.pipelining"):
        error = error.__cause__
    return error


def _raised_in(error: BaseException) -> str:
    frames = list(traceback.walk_tb(error.__traceback__))
    return str(frames[-1][0].f_globals.get("__name__", "")) if frames else ""


def _lost_peer(error: BaseException | None) -> str | None:
    """The collective in which a peer was lost, where that is what happened."""
    while error is not None:
        distributed = type(error).__module__ == "torch.distributed"
        if distributed or (isinstance(error, RuntimeError | OSError) and _LOST_PEER.search(str(error))):
            return _innermost_collective(error)
        error = error.__cause__ or error.__context__
    return None


def _innermost_collective(error: BaseException) -> str:
    name = "a collective"
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = str(frame.f_globals.get("__name__", ""))
        if module.startswith("torch.distributed") and not module.endswith("c10d_logger"):
            name = frame.f_code.co_name
    return name


def _save_traceback(error: Exception, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
    except OSError as failure:
        # A full disk may be the very error being reported.
        print(f"meshpar: could not write {path}: {failure}", file=sys.stderr)


def reported(attempt: Path | None = None) -> int | None:
    """The exit status that a rank of this machine has reported for this attempt, or the one in ``attempt``."""
    directory = attempt or progress.attempt_directory()
    try:
        text = (directory / _REPORTED).read_text(encoding="utf-8") if directory is not None else ""
    except OSError:
        return None
    return int(text) if text else None


def _first_to_report(status: int) -> bool:
    """Whether no other rank of this machine has reported: the first one to create a file in torchrun's directory."""
    directory = progress.attempt_directory()  # made anew for every start of the workers
    if directory is None:
        return True
    try:
        with (directory / _REPORTED).open("x", encoding="utf-8") as file:
            file.write(str(status))
    except FileExistsError:
        return False
    except OSError:
        return True
    return True


def _tell_torchrun(message: str) -> None:
    """Give torchrun the message for its own summary, in the form it reads."""
    if progress.attempt_directory() is not None:
        error_file = Path(os.environ["TORCHELASTIC_ERROR_FILE"])
        extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
        error_file.write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}), encoding="utf-8")
