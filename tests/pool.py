"""Worker processes kept for a whole test session, forked from one that has imported torch and transformers.

A job is a module-level function; it runs on ranks 0 to n - 1 of a fresh process group and its results come back in rank
order. A job that hangs or ends a worker becomes a failure, and the pool starts anew. Where a signal ended the worker,
which no job does, the job runs a second time, and a warning says what is known of the first: once in tens of thousands
of jobs, torch 2.13 was seen to crash in a thread of gloo's, where malloc found its heap corrupted.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

COLLECTIVE_TIMEOUT = timedelta(seconds=60)
START_TIMEOUT_SECONDS = 240.0
SILENT = "no answer in time"


class JobFailed(AssertionError):
    """At least one rank raised, died, or did not answer in time; the message holds every rank's traceback."""


class WorkerKilled(JobFailed):
    """A signal ended a worker."""


class Worker(NamedTuple):
    process: mp.process.BaseProcess
    connection: Connection
    errors: Path  # what it writes to standard error, the stacks of a crash among it

    def killed(self) -> bool:
        return (self.process.exitcode or 0) < 0

    def how_it_died(self) -> str:
        self.process.join(5.0)
        code = self.process.exitcode
        how = signal.Signals(-code).name if code is not None and self.killed() else f"exit status {code}"
        last = self.errors.read_text(errors="replace").splitlines()[-60:]
        return "\n".join([f"the worker process died: {how}", *last])


class WorkerPool:
    """Up to ``size`` worker processes, started when first needed."""

    def __init__(self, size: int = 8) -> None:
        self.size = size
        self._workers: list[Worker] = []
        self._started = 0
        self._errors = tempfile.TemporaryDirectory(prefix="workers-")
        # Ranks find each other here. In a file they would look for each other every 10 ms, once a group.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._jobs = 0

    def run(self, world_size: int, fn: Callable, *args, timeout: float = 120.0, **kwargs) -> list:
        """``fn(*args, **kwargs)`` on ``world_size`` ranks; the list of what each returned."""
        try:
            return self._run(world_size, fn, args, kwargs, timeout)
        except WorkerKilled as error:
            warnings.warn(f"{fn.__name__} runs a second time: {error}", stacklevel=2)
            return self._run(world_size, fn, args, kwargs, timeout)

    def _run(self, world_size: int, fn: Callable, args: tuple, kwargs: dict, timeout: float) -> list:
        self._start(world_size)
        self._jobs += 1
        # Pickled here: multiprocessing's own would put each tensor into a shared file of its own.
        job = pickle.dumps((fn, args, kwargs))
        for rank in range(world_size):
            connection = self._workers[rank].connection
            connection.send((f"job-{self._jobs}", rank, world_size))
            connection.send_bytes(job)
        replies = self._collect(world_size, time.monotonic() + timeout)
        errors = [f"rank {r}: {value}" for r, (ok, value) in replies.items() if not ok]
        if errors:
            failure = WorkerKilled if any(worker.killed() for worker in self._workers) else JobFailed
            if (False, SILENT) in replies.values() or not all(worker.process.is_alive() for worker in self._workers):
                self.close()
            raise failure("\n".join(errors))
        return [replies[r][1] for r in range(world_size)]

    def close(self) -> None:
        """End every worker this pool started."""
        for process, connection, _ in self._workers:
            connection.close()
            process.kill()
            process.join()
        self._workers = []

    def _start(self, count: int) -> None:
        context, starting = mp.get_context("forkserver"), []
        context.set_forkserver_preload(["meshpar.model"])
        while len(self._workers) < count:
            ours, theirs = context.Pipe()
            errors = Path(self._errors.name, f"{self._started}")
            self._started += 1
            process = context.Process(target=_serve, args=(theirs, self._store.port, errors), daemon=True)
            process.start()
            theirs.close()
            self._workers.append(Worker(process, ours, errors))
            starting.append(ours)
        # A job sent to a worker that is still importing would spend its collectives' timeout on the import.
        for connection in starting:
            if not connection.poll(START_TIMEOUT_SECONDS):
                raise JobFailed(f"a worker did not start within {START_TIMEOUT_SECONDS} s")
            connection.recv()

    def _collect(self, world_size: int, deadline: float) -> dict[int, tuple[bool, object]]:
        ranks = {self._workers[r].connection: r for r in range(world_size)}
        replies: dict[int, tuple[bool, object]] = {}
        while len(replies) < world_size:
            waiting = [c for c, r in ranks.items() if r not in replies]
            ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            for connection in ready:
                replies[ranks[connection]] = self._reply(ranks[connection])
            if not ready or any(not ok for ok, _ in replies.values()):
                return self._give_up(ranks, replies)
        return replies

    def _give_up(self, ranks, replies):
        """A failed rank leaves its peers in a collective: give them a moment to answer."""
        for connection, rank in ranks.items():
            if rank not in replies:
                replies[rank] = self._reply(rank) if connection.poll(5.0) else (False, SILENT)
        return replies

    def _reply(self, rank: int) -> tuple[bool, object]:
        """What a rank has sent, or how it died."""
        try:
            return pickle.loads(self._workers[rank].connection.recv_bytes())
        except (EOFError, OSError):
            return False, self._workers[rank].how_it_died()


def _serve(connection, port: int, errors: Path) -> None:
    import faulthandler
    import gc

    import torch
    from torch.distributed.device_mesh import DeviceMesh

    import meshpar.model  # noqa: F401 - the slow imports, before the first job

    with errors.open("ab") as file:
        os.dup2(file.fileno(), 2)
    faulthandler.enable(2)
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=COLLECTIVE_TIMEOUT)
    gc.freeze()  # what the imports left, a third of a million objects, is not walked through after every job
    connection.send("ready")
    while True:
        try:
            name, rank, world_size = connection.recv()
            job = connection.recv_bytes()
        except (EOFError, ConnectionResetError):
            return
        try:
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore(name, store),
                rank=rank,
                world_size=world_size,
                timeout=COLLECTIVE_TIMEOUT,
            )
            dist.barrier()  # a job may end on one rank while its peers are still connecting
            fn, args, kwargs = pickle.loads(job)
            reply = pickle.dumps((True, fn(*args, **kwargs)))
        except BaseException:
            reply = pickle.dumps((False, traceback.format_exc()))
        # What refers to a group keeps its threads, which poll: a model, which is full of cycles, and the meshes in
        # DTensor's caches. Before the groups are destroyed: the last reference to one must not go in a collection,
        # which holds the lock its threads want.
        for mesh in [o for o in gc.get_objects() if type(o) is DeviceMesh]:
            mesh._pg_registry.clear()
        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()
        connection.send_bytes(reply)
