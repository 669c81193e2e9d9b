"""The pool of workers itself: what it makes of a worker that dies."""

import os
import signal
from pathlib import Path

import pytest

from tests.pool import JobFailed, WorkerPool


@pytest.fixture
def own_pool():
    pool = WorkerPool()
    yield pool
    pool.close()


def crash_once(seen: Path) -> str:
    """Die by SIGSEGV the first time."""
    if not seen.exists():
        seen.touch()
        os.kill(os.getpid(), signal.SIGSEGV)
    return "done"


def crash(*how: int) -> None:
    """Die by a signal, or end."""
    os.kill(os.getpid(), *how) if how else os._exit(3)


def test_a_job_whose_worker_crashed_runs_a_second_time_and_its_stack_is_shown(own_pool, tmp_path):
    with pytest.warns(UserWarning, match=r"(?s)crash_once runs a second time: rank 0: .*SIGSEGV.* in crash_once\n"):
        assert own_pool.run(1, crash_once, tmp_path / "seen") == ["done"]


def test_a_worker_that_dies_fails_its_job_and_is_replaced(own_pool, tmp_path):
    with pytest.raises(JobFailed, match="died: SIGKILL"), pytest.warns(UserWarning, match="SIGKILL"):
        own_pool.run(1, crash, signal.SIGKILL)
    with pytest.raises(JobFailed, match="died: exit status 3"):
        own_pool.run(1, crash)
    (tmp_path / "seen").touch()
    assert own_pool.run(1, crash_once, tmp_path / "seen") == ["done"]
