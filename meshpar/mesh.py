"""The process group and the device mesh: pp outermost, tp innermost (neighbouring ranks)."""

from __future__ import annotations

import atexit
import os
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from . import failure
from .config import ParallelConfig

T = TypeVar("T")
_start = 0
DEFAULT_TIMEOUT = timedelta(minutes=10)


def default_device() -> torch.device:
    """This rank's CUDA device where there is one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    return torch.device("cpu")


def init_distributed(
    device: torch.device | str | None = None, timeout: timedelta | float = DEFAULT_TIMEOUT
) -> torch.device:
    """Start the process group from torchrun's environment and return this rank's device.

    The backend is nccl on CUDA, else gloo. Without torchrun's environment it is a world of one. ``timeout`` (a
    timedelta or seconds) bounds every collective. Does nothing when a process group exists.
    """
    device = torch.device(device) if device is not None else default_device()
    if device.type == "cuda":
        device = default_device() if device.index is None else device
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        timeout = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            dist.init_process_group(backend, timeout=timeout, **_store_of_this_start(timeout))
        else:
            store = dist.HashStore()
            dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
    atexit.unregister(_let_threads_go)
    atexit.register(_let_threads_go)
    return device


def _let_threads_go() -> None:
    """Pause before Python is taken apart, so that gloo's threads let go of the last tensors, which takes Python's lock.

    Later it is the end of the process, by SIGABRT: a run that was done would count as failed (torch's pull request
    179291 describes it).
    """
    time.sleep(0.2)


def _store_of_this_start(timeout: timedelta) -> dict[str, Any]:
    """Where torchrun keeps the store, a part of it for each start of the workers.

    torch 2.13 uses one store for all of them, and gloo then finds the addresses of processes that are gone.
    """
    global _start
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False, timeout=timeout, wait_for_workers=False)
    _start = _number_of_this_start(store, rank)
    return {"store": dist.PrefixStore(f"start-{_start}", store), "rank": rank, "world_size": world_size}


def _number_of_this_start(store: dist.Store, rank: int) -> int:
    """The same on every rank: TORCHELASTIC_RESTART_COUNT is each machine's own, which may restart uncounted."""
    if rank == 0:
        return store.add("starts", 1)
    while True:
        store.wait(["starts"])
        number = int(store.get("starts"))
        if store.add(f"joined/{number}/{rank}", 1) == 1:
            return number
        time.sleep(0.1)  # an earlier start's: rank 0 is not there yet


def this_start() -> int:
    """Counts torchrun's starts of the workers, this one included; 0 without torchrun."""
    return _start


def world_timeout() -> timedelta:
    """How long a collective of all ranks waits for a peer."""
    if dist.get_backend() == "fake":  # nobody waits
        return DEFAULT_TIMEOUT
    world = dist.group.WORLD
    return world._get_backend(world._device_types[0]).options._timeout


def on_first_rank(action: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Run ``action`` on rank 0; every rank of ``group`` gets what it returned, or raises what it raised.

    What cannot be sent is raised as a RuntimeError on the other ranks.
    """
    if dist.get_backend() == "fake":  # no other rank is there
        return action()
    answer: list = [None, None, ""]
    if dist.get_rank() == 0:
        try:
            answer[0] = action()
            pickle.dumps(answer)
        except Exception as error:
            dist.broadcast_object_list([None, *_sent(error)], src=0, group=group)
            raise
    dist.broadcast_object_list(answer, src=0, group=group)
    value, raised, subject = answer
    if raised is not None:
        raise failure.raised_by(raised, subject)
    return value


def on_every_rank(action: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Run ``action`` on each rank of ``group`` and return its value; all raise what the first rank to fail raised.

    For what may fail on one rank alone: the others do not go on to wait for it.
    """
    if dist.get_backend() == "fake":
        return action()
    own: Exception | None = None
    try:
        value = action()
    except Exception as error:
        own = error
    failures: list[tuple[Exception, str] | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(failures, None if own is None else _sent(own), group=group)
    for rank, failed in enumerate(failures):
        if failed is not None:
            raise own if own is not None and rank == dist.get_rank(group) else failure.raised_by(*failed)
    return value


def _sent(error: Exception) -> tuple[Exception, str]:
    """The error, or one that says the same where it cannot be sent, and the rank to name for it."""
    try:
        portable = pickle.loads(pickle.dumps(error))
    except Exception:
        portable = RuntimeError(f"{type(error).__name__}: {error}")
    return portable, failure.subject_of(error)


@dataclass(frozen=True)
class Mesh:
    """A pp x dp x tp `DeviceMesh` with what the steps ask of it."""

    device_mesh: DeviceMesh
    device: torch.device
    _slices: dict[str | tuple[str, ...], DeviceMesh] = field(default_factory=dict, init=False, repr=False)

    def _slice(self, dims: str | tuple[str, ...]) -> DeviceMesh:
        """``device_mesh[dims]``, which torch builds anew each time it is asked."""
        if dims not in self._slices:
            self._slices[dims] = self.device_mesh[dims]
        return self._slices[dims]

    @property
    def dp_dims(self) -> tuple[str, ...]:
        """Names of the data-parallel dimensions, the one FSDP shards over last."""
        names = self.device_mesh.mesh_dim_names or ()
        return ("dp_replicate", "dp_shard") if "dp_replicate" in names else ("dp",)

    @property
    def fsdp(self) -> DeviceMesh:
        """The mesh `fully_shard` takes: one dimension, or (replicate, shard)."""
        return self._slice(self.dp_dims)

    @property
    def state(self) -> DeviceMesh:
        """The mesh of one stage's parameters: the dp dimensions and tp."""
        return self._slice((*self.dp_dims, "tp"))

    def size(self, dim: str) -> int:
        """Number of ranks along ``dim``; "dp" is the whole of replicate x shard."""
        return self._slice(dim).size()

    def rank(self, dim: str) -> int:
        """This rank's coordinate along ``dim``."""
        return self._slice(dim).get_local_rank()

    def group(self, dim: str) -> dist.ProcessGroup:
        """The process group along ``dim`` that holds this rank."""
        return self._slice(dim).get_group()


def build_mesh(config: ParallelConfig, device: torch.device) -> Mesh:
    """A fresh mesh of ``config``'s sizes over the whole world (see `ParallelConfig.resolve` for what is refused)."""
    sizes: tuple[int, ...] = (config.pp, config.dp, config.tp)
    names: tuple[str, ...] = ("pp", "dp", "tp")
    if config.dp_replicate > 1:
        sizes = (config.pp, config.dp_replicate, config.dp_shard, config.tp)
        names = ("pp", "dp_replicate", "dp_shard", "tp")
    where = "cpu" if device.type == "meta" else device.type  # meta is no place for a process group
    ranks = torch.arange(dist.get_world_size()).view(sizes)
    groups = [_groups_along(ranks, i, names[i]) for i in range(ranks.ndim)]
    device_mesh = DeviceMesh.from_group(groups, where, mesh=ranks, mesh_dim_names=names)
    return adopt_mesh(device_mesh, device)


def _groups_along(ranks: Tensor, dim: int, name: str) -> dist.ProcessGroup:
    """This rank's group along a dimension. torch's `init_device_mesh` would have it wait half an hour for a peer."""
    rows = ranks.movedim(dim, -1).reshape(-1, ranks.shape[dim]).tolist()
    group, _ = dist.new_subgroups_by_enumeration(rows, timeout=world_timeout(), group_desc=f"mesh_{name}")
    return group


def adopt_mesh(device_mesh: DeviceMesh, device: torch.device) -> Mesh:
    """Wrap a caller's mesh, whose dimensions must be pp, dp (or dp_replicate, dp_shard) and tp, in that order."""
    _check_dims(device_mesh)
    if "dp_replicate" in device_mesh.mesh_dim_names:
        flat = device_mesh["dp_replicate", "dp_shard"]._flatten("dp")
        flat.get_group().set_timeout(world_timeout())
    _check_ranks(device_mesh.mesh)
    return Mesh(device_mesh, device)


def _check_dims(device_mesh: DeviceMesh) -> None:
    names = device_mesh.mesh_dim_names
    if names not in (("pp", "dp", "tp"), ("pp", "dp_replicate", "dp_shard", "tp")):
        raise ValueError(
            f"mesh has the dimensions {names}; meshpar needs ('pp', 'dp', 'tp') or "
            "('pp', 'dp_replicate', 'dp_shard', 'tp')"
        )


def _check_ranks(ranks: Tensor) -> None:
    """torch sorts the ranks of a group, so a rank's place in an unsorted one is not its coordinate in the mesh."""
    ascending = all((ranks.diff(dim=d) > 0).all() for d in range(ranks.ndim))
    if ranks.numel() != dist.get_world_size() or not ascending:
        raise ValueError(
            f"mesh must hold all {dist.get_world_size()} ranks, ascending along each dimension; it is {ranks.tolist()}"
        )


def config_for_mesh(config: ParallelConfig, device_mesh: DeviceMesh) -> ParallelConfig:
    """``config`` with the sizes of a caller's mesh, which must agree with every size set in ``config`` itself."""
    _check_dims(device_mesh)
    sizes = {name: device_mesh.size(i) for i, name in enumerate(device_mesh.mesh_dim_names)}
    sizes = {"dp_replicate": 1, **sizes}
    sizes["dp_shard"] = sizes.pop("dp", sizes.get("dp_shard", 1))
    for name in ("pp", "dp_replicate", "dp_shard", "tp"):
        wanted = getattr(config, name)
        if wanted not in (-1, 1, sizes[name]):
            raise ValueError(f"config.{name} is {wanted} but the mesh's {name} dimension has {sizes[name]} ranks")
    return replace(config, **{name: sizes[name] for name in ("pp", "dp_replicate", "dp_shard", "tp")})
