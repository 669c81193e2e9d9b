"""How a failed run ends: one short message from one rank, its traceback in a file, and a quick exit of all."""

from __future__ import annotations

import json
import os
import re
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .config import ConfigError

FAILED, BAD_USAGE = 1, 2

# A rank that only lost its peer stays silent this long: the rank that failed first gets to say why, and torchrun
# ends the others meanwhile.
PEER_GRACE_SECONDS = 3.0

_LOST_PEER = re.compile(r"gloo|nccl|connection (closed|reset|refused)|broken pipe|timed? ?out|socket", re.IGNORECASE)


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
    try:
        yield
    except Exception as error:
        _end_process(error, rank, place, output_dir)


def describe(error: BaseException) -> str:
    """The error in one short text: a setting that cannot work speaks for itself, others give their type."""
    if isinstance(error, ConfigError):
        lines = str(error).splitlines()
        return lines[0] if len(lines) == 1 else "\n  ".join(["the recipe cannot run:", *lines])
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


def _end_process(error: Exception, rank: int, place: str, output_dir: str | os.PathLike[str] | None) -> None:
    cause = _without_wrappers(error)
    if output_dir is not None and not isinstance(cause, ConfigError):
        _save_traceback(error, Path(output_dir) / "errors" / f"rank-{rank}.txt")
    if _lost_peer(error):
        time.sleep(PEER_GRACE_SECONDS)
    if _first_to_report():
        subject = "" if isinstance(cause, ConfigError) else f"error on rank {rank}{f' ({place})' if place else ''}: "
        print_error(cause, subject)
        _tell_torchrun(f"meshpar: {subject}{describe(cause)}")
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: threads and process groups that wait for a peer would keep this process, and so all of them, alive.
    os._exit(exit_status(cause))


def _without_wrappers(error: BaseException) -> BaseException:
    # torch's pipeline wraps what a stage raised in a RuntimeError that describes the stage's inputs.
    while error.__cause__ is not None and _raised_in(error).startswith("torch.distributed.pipelining"):
        error = error.__cause__
    return error


def _raised_in(error: BaseException) -> str:
    frames = list(traceback.walk_tb(error.__traceback__))
    return str(frames[-1][0].f_globals.get("__name__", "")) if frames else ""


def _lost_peer(error: BaseException | None) -> bool:
    while error is not None:
        distributed = type(error).__module__ == "torch.distributed"
        if distributed or (isinstance(error, RuntimeError | OSError) and _LOST_PEER.search(str(error))):
            return True
        error = error.__cause__ or error.__context__
    return False


def _save_traceback(error: Exception, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
    except OSError as failure:
        # A full disk may be the very error being reported.
        print(f"meshpar: could not write {path}: {failure}", file=sys.stderr)


def _torchrun_error_file() -> Path | None:
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(path) if path and path != os.devnull else None


def _first_to_report() -> bool:
    """Whether no other rank of this machine has reported: the first one to create a file in torchrun's directory."""
    error_file = _torchrun_error_file()
    if error_file is None:
        return True
    # torchrun makes <run>/attempt_N/<local rank>/error.json anew for every start of the workers.
    try:
        (error_file.parent.parent / "reported").open("x").close()
    except FileExistsError:
        return False
    except OSError:
        return True
    return True


def _tell_torchrun(message: str) -> None:
    """Give torchrun the message for its own summary, in the form it reads."""
    error_file = _torchrun_error_file()
    if error_file is not None:
        extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
        error_file.write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}), encoding="utf-8")
