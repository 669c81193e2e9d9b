"""Worker processes kept for a whole test session, forked from one that has imported torch and transformers.

A job is a module-level function; it runs on ranks 0 to n - 1 of a fresh process group and its results come back in rank
order. A job that hangs or kills a worker becomes a failure, and the pool starts anew.
"""

from __future__ import annotations

import multiprocessing as mp
import pickle
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait

import torch.distributed as dist

COLLECTIVE_TIMEOUT = timedelta(seconds=60)
START_TIMEOUT_SECONDS = 240.0


class JobFailed(AssertionError):
    """At least one rank raised, died, or did not answer in time; the message holds every rank's traceback."""


class WorkerPool:
    """Up to ``size`` worker processes, started when first needed."""

    def __init__(self, size: int = 8) -> None:
        self.size = size
        self._workers: list[tuple[mp.process.BaseProcess, mp.connection.Connection]] = []
        # Ranks find each other here. In a file they would look for each other every 10 ms, once a group.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._jobs = 0

    def run(self, world_size: int, fn: Callable, *args, timeout: float = 120.0, **kwargs) -> list:
        """``fn(*args, **kwargs)`` on ``world_size`` ranks; the list of what each returned."""
        self._start(world_size)
        self._jobs += 1
        # Pickled here: multiprocessing's own would put each tensor into a shared file of its own.
        job = pickle.dumps((fn, args, kwargs))
        for rank in range(world_size):
            connection = self._workers[rank][1]
            connection.send((f"job-{self._jobs}", rank, world_size))
            connection.send_bytes(job)
        replies = self._collect(world_size, time.monotonic() + timeout)
        errors = [f"rank {r}: {value}" for r, (ok, value) in replies.items() if not ok]
        if errors:
            raise JobFailed("\n".join(errors))
        return [replies[r][1] for r in range(world_size)]

    def close(self) -> None:
        """End every worker this pool started."""
        for process, connection in self._workers:
            connection.close()
            process.kill()
            process.join()
        self._workers = []

    def _start(self, count: int) -> None:
        context, starting = mp.get_context("forkserver"), []
        context.set_forkserver_preload(["meshpar.model"])
        while len(self._workers) < count:
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, self._store.port), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))
            starting.append(ours)
        # A job sent to a worker that is still importing would spend its collectives' timeout on the import.
        for connection in starting:
            if not connection.poll(START_TIMEOUT_SECONDS):
                raise JobFailed(f"a worker did not start within {START_TIMEOUT_SECONDS} s")
            connection.recv()

    def _collect(self, world_size: int, deadline: float) -> dict[int, tuple[bool, object]]:
        ranks = {self._workers[r][1]: r for r in range(world_size)}
        replies: dict[int, tuple[bool, object]] = {}
        while len(replies) < world_size:
            waiting = [c for c, r in ranks.items() if r not in replies]
            ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            for connection in ready:
                try:
                    replies[ranks[connection]] = pickle.loads(connection.recv_bytes())
                except (EOFError, OSError):
                    replies[ranks[connection]] = (False, "the worker process died")
            if not ready or any(not ok for ok, _ in replies.values()):
                return self._give_up(ranks, replies)
        return replies

    def _give_up(self, ranks, replies):
        """A failed rank leaves its peers in a collective: give them a moment to answer, then replace the pool."""
        silent = False
        for connection, rank in ranks.items():
            if rank not in replies:
                if connection.poll(5.0):
                    try:
                        replies[rank] = pickle.loads(connection.recv_bytes())
                        continue
                    except (EOFError, OSError):
                        pass
                replies[rank], silent = (False, "no answer in time"), True
        if silent or any(value == "the worker process died" for _, value in replies.values()):
            self.close()
        return replies


def _serve(connection, port: int) -> None:
    import gc

    import torch
    from torch.distributed.device_mesh import DeviceMesh

    import meshpar.model  # noqa: F401 - the slow imports, before the first job

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
