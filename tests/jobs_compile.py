"""What the workers run on models whose layers are compiled."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.utils import counters
from torch._inductor.fx_passes import micro_pipeline_tp
from torch.distributed._symmetric_memory import _test_mode

from tests.jobs import gradients, make, rows_of_rank
from tests.jobs_dropout import slope
from tests.jobs_memory import gradients_of_two_backwards
from tests.jobs_verify import verify


@contextmanager
def compiler(backend: str) -> Iterator[None]:
    """Forget earlier graphs; inductor, or ``backend`` in its place."""
    torch._dynamo.reset()
    counters.clear()
    if backend == "inductor":
        yield
        return
    run = lookup_backend(backend)
    with mock.patch("torch._inductor.compile_fx.compile_fx", lambda graph, inputs, **_: run(graph, inputs)):
        yield


def compiled_gradients(config: dict, batches: list[dict], family: str, model_changes: dict, backend: str) -> dict:
    """As `jobs.gradients`; and how many graphs were made and what broke one."""
    with compiler(backend):
        result = gradients(dict(compile=True, **config), batches, family, model_changes)
    graphs = counters["stats"]["unique_graphs"]
    return {**result, "graphs": graphs, "breaks": dict(counters["graph_break"])}


def fused_for_async_tp(config: dict, batch: dict) -> list[Counter[str]]:
    """What inductor's pass for asynchronous tensor parallelism puts into each graph of a compiled step.

    The first is the forward's, then comes the backward's. The pass works on copies: what it makes runs on GPUs alone.
    """
    found = []

    def look(graph: torch.fx.Graph) -> None:
        copied = copy.deepcopy(graph)
        with _test_mode(), mock.patch("torch.distributed.is_nccl_available", return_value=True):
            micro_pipeline_tp.micro_pipeline_tp_pass(copied)
        targets = (n.target for n in copied.nodes if isinstance(n.target, torch._ops.OpOverload))
        found.append(Counter(t._opname for t in targets if t.namespace == "symm_mem"))

    with (
        compiler("inductor"),
        torch._inductor.config.patch(force_disable_caches=True),  # what is in the cache goes through no pass
        mock.patch("torch._inductor.fx_passes.post_grad.micro_pipeline_tp_pass", look),
        mock.patch("meshpar.compiling._enable_symmetric_memory", return_value=True),
    ):
        make(dict(compile=True, async_tp=True, **config)).forward_backward(batch)
    return found


def two_schedules(batch: dict, backend: str) -> list[dict]:
    """Gradients of a pipeline whose backwards are whole, and then, in the same process, of one whose are split."""
    with compiler(backend):
        layers = dict(num_hidden_layers=4)
        return [
            gradients(
                dict(compile=True, pp=2, schedule=schedule, virtual_stages=2, microbatches=2), [batch], "llama", layers
            )
            for schedule in ("Interleaved1F1B", "ZBVZeroBubble")
        ]


def compiled_gradients_of_two_backwards(config: dict, batch: dict, cache: str) -> tuple[dict, dict]:
    """As `jobs_memory.gradients_of_two_backwards`, by the real compiler, which reuses memory.

    Its ``cache`` on disk has graphs of the same layers by then, that someone else compiled to go through once.
    """
    with compiler("inductor"), mock.patch.dict("os.environ", TORCHINDUCTOR_CACHE_DIR=cache):
        theirs = make(config)
        torch._functorch.config.donated_buffer = True
        for layer in theirs._runner.own_layers():
            layer.forward = torch.compile(layer.forward)
        theirs(**batch).loss.backward()
        torch._dynamo.reset()
        return gradients_of_two_backwards(dict(compile=True, **config), batch)


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
