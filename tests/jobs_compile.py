"""What the workers run on models whose layers are compiled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from unittest import mock

import torch
from torch._dynamo.utils import counters

from tests.jobs import gradients, make, rows_of_rank
from tests.jobs_dropout import slope
from tests.jobs_verify import verify


@contextmanager
def compiler(backend: str) -> Iterator[None]:
    """Forget earlier graphs and have `torch.compile` use ``backend``."""
    torch._dynamo.reset()
    counters.clear()
    donated = torch._functorch.config.donated_buffer
    try:
        with mock.patch("torch.compile", partial(torch.compile, backend=backend)):
            yield
    finally:
        torch._functorch.config.donated_buffer = donated


def compiled_gradients(config: dict, batches: list[dict], family: str, model_changes: dict, backend: str) -> dict:
    """As `jobs.gradients`; and how many graphs were made and what broke one."""
    with compiler(backend):
        result = gradients(dict(compile=True, **config), batches, family, model_changes)
    graphs = counters["stats"]["unique_graphs"]
    return {**result, "graphs": graphs, "breaks": dict(counters["graph_break"])}


def steps(config: dict, batches: list[dict]) -> list[tuple[float, float]]:
    """Evaluation and training loss of each batch, with SGD steps between them."""
    model = make(config)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for batch in batches:
        own = rows_of_rank(batch, model.mesh)
        evaluated = model.eval_loss(own).item()
        losses.append((evaluated, model.forward_backward(own).item()))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def compiled_steps(config: dict, batches: list[dict]) -> list[tuple[float, float]]:
    """As `steps`."""
    with compiler("aot_eager"):
        return steps(dict(compile=True, **config), batches)


def compiled_kept_bytes(config: dict, batch: dict, keep_shards: bool) -> int:
    """Bytes that compiled layers keep for their backward, with shards of what is gathered or without."""
    with compiler("aot_eager"):
        model = make(dict(compile=True, **config))
        model._runner.tp.keep_shards = keep_shards
        loss = model(**batch).loss
        params = {p.data_ptr() for p in model._runner.model.parameters()}
        kept: dict[int, int] = {}
        nodes, seen = [loss.grad_fn], set()
        while nodes:
            node = nodes.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            nodes += [following for following, _ in node.next_functions]
            if node.name() == "CompiledFunctionBackward":
                found = ((t.untyped_storage()) for t in node.saved_tensors)
                kept |= {s.data_ptr(): s.nbytes() for s in found if s.data_ptr() not in params}
        return sum(kept.values())


def compiled_slope(config: dict, folder: str, batch: dict) -> dict:
    """As `jobs_dropout.slope`."""
    with compiler("aot_eager"):
        return slope(dict(compile=True, **config), folder, batch)


def compiled_verify(config: dict, batch: dict, fault: str | None):
    """As `jobs_verify.verify`, of a Llama with biases."""
    with compiler("aot_eager"):
        return verify(dict(compile=True, **config), "llama", dict(attention_bias=True), batch, fault)
