"""One pool of worker processes for the whole session."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest

from tests.pool import WorkerPool
from tests.workspace import make_workspace


@pytest.fixture(scope="session")
def pool():
    """Runs module-level functions on ranks of a real gloo process group: `pool.run(world_size, fn, ...)`."""
    workers = WorkerPool()
    yield workers
    workers.close()


@pytest.fixture(scope="session")
def workspace(tmp_path_factory):
    """A directory to train in (see `make_workspace`); tests write beside it, not into it."""
    return make_workspace(tmp_path_factory.mktemp("workspace"), dropout=0.1)


@pytest.fixture(scope="session")
def no_dropout(tmp_path_factory):
    """The same workspace, for tests that compare different meshes: dropout draws differ there."""
    return make_workspace(tmp_path_factory.mktemp("no-dropout"), dropout=0.0)
