"""What the workers run to see what a rank sends."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from meshpar import comm
from tests.jobs import make, rows_of_rank
from tests.traffic import TrafficCounter, count_traffic

FLOATS = 64


def sent_in_a_step(config: dict, batch: dict, changes: dict | None = None) -> dict:
    """This rank's place, and what it sends in a step and in clipping.

    A pipeline's first step on batches of a shape also agrees on them: the second is counted.
    """
    model = make(config, model_changes=changes)
    own = rows_of_rank(batch, model.mesh)
    model.forward_backward(own)
    with count_traffic(model) as step:
        model.forward_backward(own)
    with count_traffic(model) as clip:
        model.clip_grad_norm_(1.0)
    mesh = model._mesh
    return {
        "pp": mesh.rank("pp"),
        "shard": mesh.rank(mesh.dp_dims[-1]),
        "step": step.sent(),
        "clip": clip.sent(),
    }


def known_calls() -> dict[str, dict]:
    """What a counter makes of calls whose bytes are plain: `FLOATS` float32 numbers go in, or come out, whole."""
    world, size, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    following, previous = (rank + 1) % size, (rank - 1) % size
    whole, part = torch.ones(FLOATS), torch.ones(FLOATS // size)
    parts = list(torch.ones(FLOATS).chunk(size))
    linear = fully_shard(nn.Linear(8, FLOATS // 8, bias=False))

    def swap() -> None:
        ops = [dist.P2POp(dist.isend, whole, following), dist.P2POp(dist.irecv, torch.empty(FLOATS), previous)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    def pass_on() -> None:
        work = dist.isend(whole, following)
        dist.recv(torch.empty(FLOATS), previous)
        work.wait()

    def backward(fn) -> None:
        fn(torch.ones(1, FLOATS // size, requires_grad=True)).sum().backward()

    calls = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_reduce, functional": lambda: comm.all_reduce(whole, world),
        "all_gather": lambda: dist.all_gather(parts, part),
        "all_gather, one tensor": lambda: dist.all_gather_into_tensor(torch.empty(FLOATS), part),
        "all_gather, functional": lambda: comm.all_gather_dim1(part.view(1, -1), world),
        "reduce_scatter": lambda: dist.reduce_scatter(torch.empty(FLOATS // size), parts),
        "reduce_scatter, one tensor": lambda: dist.reduce_scatter_tensor(torch.empty(FLOATS // size), whole),
        "reduce_scatter, functional": lambda: comm.reduce_scatter_dim1(whole.view(1, -1), world),
        "p2p": pass_on,
        "p2p, batched": swap,
        "fully_shard": lambda: linear(torch.ones(1, 8)).sum().backward(),
        "backward": lambda: backward(lambda x: comm.gather_sequence(x, world, FLOATS)),
        "checkpointed": lambda: (
            torch.utils.checkpoint.checkpoint(
                lambda x: comm.reduce_from(x, world).exp(), torch.ones(FLOATS, requires_grad=True), use_reentrant=False
            )
            .sum()
            .backward()
        ),
    }
    found = {}
    for name, call in calls.items():
        with TrafficCounter({"world": world}) as counter:
            call()
        found[name] = counter.sent()
    return found


def unknown_call() -> None:
    with TrafficCounter({"world": dist.group.WORLD}):
        dist.broadcast(torch.ones(1), 0)
