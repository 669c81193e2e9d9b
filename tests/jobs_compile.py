"""What the workers run on models whose layers are compiled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from unittest import mock

import torch
from torch._dynamo.utils import counters
from torch._inductor.fx_passes import micro_pipeline_tp as tp_pass

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


def async_tp_matches(config: dict, batch: dict) -> list[tuple[list[int], int]]:
    """Of each graph of a compiled step: how many matmuls each all-gather feeds, and how many reduce-scatters it has.

    As inductor's pass for asynchronous tensor parallelism sees them; the first is the forward's, then the backward's.
    """
    found = []

    def look(graph: torch.fx.Graph) -> None:
        gathers = [len(tp_pass._find_consumer_matmuls(g.res_node)) for g in tp_pass.find_all_gather_patterns(graph)]
        scatters = [tp_pass._find_producer_matmul(s.input_node) for s in tp_pass.find_reduce_scatter_patterns(graph)]
        found.append((gathers, sum(matmul is not None for matmul in scatters)))

    with compiler("inductor"), mock.patch("torch._inductor.fx_passes.post_grad.micro_pipeline_tp_pass", look):
        try:
            make(dict(compile=True, async_tp=True, **config)).forward_backward(batch)
        finally:
            torch._inductor.config._micro_pipeline_tp = False
    return found


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
