"""Where ranks sit: the mesh over nodes in torchrun's rank order, groups that span nodes, and how a job is launched.

torchrun numbers ranks node by node, and the mesh is laid over them with pp outermost and tp innermost.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from ..config import ParallelConfig
from .communication import Microbatches
from .costs import Place
from .devices import Device
from .links import Network, Reach
from .timing import forecast
from .work import ModelWork

PORT = 29500


@dataclass(frozen=True)
class Span:
    """Groups of a mesh dimension that have ranks on several nodes.

    ``extra_seconds``: what a step takes longer than if nodes were large enough to hold each of them.
    """

    dim: str
    reach: Reach
    extra_seconds: float

    def __str__(self) -> str:
        return (
            f"groups of {self.dim}={self.reach.ranks} span {self.reach.nodes} nodes: "
            f"{self.extra_seconds:.3g} s a step more than inside one"
        )


def mesh_dims(config: ParallelConfig) -> dict[str, int]:
    """Sizes of the mesh by dimension, outermost first."""
    dp = {"dp": config.dp}
    if config.dp_replicate > 1:
        dp = {"dp_replicate": config.dp_replicate, "dp_shard": config.dp_shard}
    return {"pp": config.pp, **dp, "tp": config.tp}


def groups(config: ParallelConfig, dim: str) -> list[list[int]]:
    """Global ranks of every group of a mesh dimension; of "dp", replicas and shards together."""
    sizes = {"pp": config.pp, "dp": config.dp, "tp": config.tp} if dim == "dp" else mesh_dims(config)
    names = list(sizes)
    strides = {name: math.prod(list(sizes.values())[i + 1 :]) for i, name in enumerate(names)}
    others = [name for name in names if name != dim]
    starts = [
        sum(at * strides[name] for at, name in zip(place, others, strict=True))
        for place in product(*(range(sizes[name]) for name in others))
    ]
    return [[start + i * strides[dim] for i in range(sizes[dim])] for start in starts]


def node_of(rank: int, per_node: int) -> int:
    """The node of a global rank."""
    return rank // per_node


def coordinates(config: ParallelConfig, rank: int) -> dict[str, int]:
    """The place of a global rank in the mesh."""
    found = {}
    for dim, size in reversed(mesh_dims(config).items()):
        rank, found[dim] = divmod(rank, size)
    return dict(reversed(found.items()))


def spans(
    work: ModelWork,
    config: ParallelConfig,
    batch: Microbatches,
    stage_layers: Sequence[int],
    device: Device,
    network: Network,
    dims: Sequence[str] | None = None,
) -> list[Span]:
    """The mesh dimensions (of ``dims``, else all) whose groups do not fit into nodes, and what that costs; tp first."""
    place = Place(config, device, network)
    spread = [d for d in reversed(mesh_dims(config)) if place.reach(d).nodes > 1 and (dims is None or d in dims)]
    as_is = forecast(work, config, batch, stage_layers, device, network).step_seconds if spread else 0.0

    def without(dim: str) -> float:
        inside = replace(network, whole=frozenset({dim}))
        return forecast(work, config, batch, stage_layers, device, inside).step_seconds

    return [Span(dim, place.reach(dim), as_is - without(dim)) for dim in spread]


def launch_lines(config: ParallelConfig, per_node: int, *recipe: str) -> str:
    """How to start the job: on one node, or on each of several, and the same under SLURM.

    ``recipe``: its name, and any `key=value` laid over it.
    """
    world = config.world_size
    nodes, here = -(-world // per_node), min(world, per_node)
    job = f"-m meshpar train {shlex.join(recipe)}"
    if nodes == 1:
        return f"torchrun --standalone --nproc-per-node {here} {job}\n"
    if world % per_node:
        return f"# {world} processes do not fill {nodes} nodes of {per_node}: torchrun needs the same number on each\n"
    rendezvous = f"--nnodes {nodes} --nproc-per-node {here} --rdzv-backend c10d"
    return f"""\
# On each of the {nodes} nodes, the first of which is $HEAD:
torchrun {rendezvous} --rdzv-id meshpar --rdzv-endpoint $HEAD:{PORT} {job}

# Under SLURM: sbatch this script.
#!/bin/bash
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={here}
#SBATCH --exclusive
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun torchrun {rendezvous} --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$head:{PORT}" {job}
"""


ADVICE = """\
Leave NCCL_PROTO, NCCL_ALGO, NCCL_BUFFSIZE and NCCL_P2P_LEVEL unset: NCCL chooses by message and topology, and LL128
forced where it is not supported can corrupt data.
A collective's timeout is the process group's: distributed.timeout_seconds in the recipe, in Python
init_process_group(timeout=...). There is no NCCL_TIMEOUT; torch's watchdog has the variables TORCH_NCCL_*.
Where a node has several network interfaces, NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME name the one between nodes.
"""
