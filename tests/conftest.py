"""One pool of worker processes for the whole session."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest

from tests.pool import WorkerPool


@pytest.fixture(scope="session")
def pool():
    """Runs module-level functions on ranks of a real gloo process group: `pool.run(world_size, fn, ...)`."""
    workers = WorkerPool()
    yield workers
    workers.close()
