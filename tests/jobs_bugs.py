"""What the workers run for the tests of bug reports; models come as Hugging Face folders."""

from __future__ import annotations

import ctypes
import gc
import random
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM, LlamaConfig

import meshpar
from meshpar.grads import local
from tests import bug_models
from tests.jobs import make, rows_of_rank


def own_rows(model, batch: dict) -> dict:
    return rows_of_rank(batch, model.mesh)


def stage_norm(model) -> float:
    """2-norm of the gradients stored on this rank: its stage's where dp and tp are 1."""
    return torch.stack([local(p.grad).norm() for p in model.parameters()]).norm().item()


def train(config: dict, folder: str, batches: list[dict]) -> dict:
    """Losses and norms of accumulated calls, whole gradients on rank 0, then the norms after clipping to 1."""
    model = make(config, source=folder)
    losses, norms = [], []
    for batch in batches:
        losses.append(model.forward_backward(own_rows(model, batch)).item())
        norms.append(model.grad_norm().item())
    grads = dict(model.full_tensors("grad"))
    reported = model.clip_grad_norm_(1.0).item()
    return {
        "losses": losses,
        "norms": norms,
        "grads": grads,
        "reported": reported,
        "stage_norm": stage_norm(model),
        "norm_after": model.grad_norm().item(),
        "names": [n for n, _ in model.named_parameters()],
        "layers": len(model._runner.own_layers()),
    }


def train_routed(config: dict, changes: dict, pieces: list[dict]) -> dict:
    """One step of a mixture of experts whose rows come as a list of batches."""
    model = make(config, source=bug_models.one_process("mixtral", **changes))
    losses = [model.forward_backward([own_rows(model, piece) for piece in pieces]).item()]
    return {"losses": losses, "grads": dict(model.full_tensors("grad"))}


def train_in_pieces(config: dict, folder: str, batch: dict, pieces: int) -> dict:
    """One step whose rows come as a list of ``pieces`` batches: gradient accumulation."""
    model = make(config, source=folder)
    own = own_rows(model, batch)
    parts = [{k: v.chunk(pieces)[i] for k, v in own.items()} for i in range(pieces)]
    return {"losses": [model.forward_backward(parts).item()], "grads": dict(model.full_tensors("grad"))}


def step_by_step(config: dict, folder: str, batches: list[dict], held_out: dict | None = None) -> list[dict]:
    """Loss and gradients of each batch by itself, without an update; an evaluation between them if asked for."""
    model = make(config, source=folder)
    steps = []
    for batch in batches:
        loss = model.forward_backward(own_rows(model, batch)).item()
        evaluated = None if held_out is None else model.eval_loss(own_rows(model, held_out)).item()
        steps.append({"loss": loss, "grads": dict(model.full_tensors("grad")), "eval": evaluated})
        for p in model.parameters():
            p.grad = None
    return steps


def optimize(config: dict, folder: str, batches: list[dict], optimizer: str, lr: float) -> dict:
    """A training loop; after each step what this rank stores of the norms and of the tied pair."""
    model = make(config, source=folder)
    optim = getattr(torch.optim, optimizer)(model.parameters(), lr=lr)
    losses, norm_weights, norm_grads, ends, first_grads = [], [], [], [], None
    for batch in batches:
        losses.append(model.forward_backward(own_rows(model, batch)).item())
        first_grads = first_grads or dict(model.full_tensors("grad"))
        params = dict(model.named_parameters(remove_duplicate=False))
        norm_grads.append({n: local(p.grad).clone() for n, p in params.items() if "norm" in n})
        optim.step()
        optim.zero_grad()
        norm_weights.append({n: local(p).detach().clone() for n, p in params.items() if "norm" in n})
        ends.append([local(p).detach().clone() for n, p in params.items() if "embed_tokens" in n or "lm_head" in n])
    return {
        "losses": losses,
        "first_grads": first_grads,
        "norm_weights": norm_weights,
        "norm_grads": norm_grads,
        "ends": ends,
        "params": dict(model.full_tensors("param")),
        "distinct": len(list(model.parameters())),
        "state_dtypes": {s.dtype for state in optim.state.values() for k, s in state.items() if "exp_avg" in k},
    }


def logits(config: dict, folder: str, inputs: list[dict]) -> list[torch.Tensor]:
    """Whole logits [rows, seq, vocabulary] of each of ``inputs``."""
    model = make(config, source=folder)
    with torch.no_grad():
        return [model(**own_rows(model, one)).logits for one in inputs]


def losses_of_rows(config: dict, folder: str, batch: dict) -> list[float]:
    """Evaluation loss of each row by itself."""
    model = make(config, source=folder)
    rows = batch["input_ids"].shape[0]
    return [model.eval_loss({k: v[i : i + 1] for k, v in batch.items()}).item() for i in range(rows)]


def refusal(config: dict, source) -> str:
    """The message of the error that building the model ends in on this rank."""
    try:
        make(config, source=source)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def slow_rank_steps(config: dict, folder: str, batch: dict, steps: int) -> list[float]:
    """Steps with a random sleep of up to 50 ms before each on the last rank."""
    model = make(config, source=folder)
    rng = random.Random(0)
    losses = []
    for _ in range(steps):
        if dist.get_rank() == dist.get_world_size() - 1:
            time.sleep(rng.uniform(0, 0.05))
        losses.append(model.forward_backward(batch).item())
    return losses


def initial_weights(config: dict, hf_config: dict) -> dict:
    """Whole weights of a model made from its config."""
    return dict(make(config, source=LlamaConfig(**hf_config)).full_tensors("param"))


def buffers(config: dict, folder: str, batch: dict) -> dict:
    """Every buffer this rank holds, and the loss."""
    model = make(config, source=folder)
    return {
        "buffers": {n: b.clone() for n, b in model.named_buffers()},
        "loss": model.eval_loss(own_rows(model, batch)).item(),
    }


def export(config: dict, folder: str, batch: dict, out: str, dtypes: list[str | None], shard: str, compiled=False):
    """One SGD step, then a directory for each dtype; the whole weights, and the dtypes the training copy has after."""
    model = make(config, source=folder)
    for layer in model._runner.own_layers() if compiled else ():
        layer.compile(backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.forward_backward(own_rows(model, batch))
    optimizer.step()
    for dtype in dtypes:
        model.save_pretrained(Path(out) / str(dtype), dtype and getattr(torch, dtype), max_shard_size=shard)
    return {
        "params": dict(model.full_tensors("param")),
        "dtypes": {p.dtype for p in model.parameters()},
        "names": [n for n, _ in model.named_parameters()],
        "state": list(model.state_dict()),
    }


def train_the_head_only(config: dict, folder: str, batches: list[dict], when: str) -> dict:
    """Three AdamW steps with everything but lm_head frozen, "before" the model is put on the mesh or "after"."""

    def freeze(model):
        for name, p in model.named_parameters():
            p.requires_grad_(name.startswith("lm_head"))
        return model

    source = freeze(AutoModelForCausalLM.from_pretrained(folder)) if when == "before" else folder
    model = freeze(make(config, source=source)) if when == "after" else make(config, source=source)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad] or [torch.zeros(1)], lr=1e-2)
    first = None
    for batch in batches:
        model.forward_backward(own_rows(model, batch))
        first = first or dict(model.full_tensors("grad"))
        optimizer.step()
        optimizer.zero_grad()
    trainable = {n for n, p in model.named_parameters() if p.requires_grad}
    return {"grads": first, "params": dict(model.full_tensors("param")), "trainable": trainable}


def callers_mesh(sizes: tuple[int, int, int], folder: str, batch: dict) -> dict:
    """A model on a mesh that the caller made with tp outermost, where meshpar would have it innermost."""
    ranks = torch.arange(dist.get_world_size()).view(sizes[::-1]).permute(2, 1, 0).contiguous()
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("pp", "dp", "tp"))
    config = meshpar.ParallelConfig(compute_dtype="float32")
    model = meshpar.parallelize_model(folder, config, mesh=mesh)
    return {
        "same": model.mesh is mesh,
        "loss": model.forward_backward(own_rows(model, batch)).item(),
        "grads": dict(model.full_tensors("grad")),
        "sizes": (model.parallel_config.pp, model.parallel_config.dp, model.parallel_config.tp),
    }


def mesh_refused(folder: str, ranks: list, names: tuple[str, ...]) -> str:
    """The message for a mesh that meshpar cannot use."""
    mesh = DeviceMesh("cpu", torch.tensor(ranks), mesh_dim_names=names)
    try:
        meshpar.parallelize_model(folder, mesh=mesh)
    except ValueError as error:
        return str(error)
    return "no error"


def generates(config: dict, folder: str) -> str:
    """What `generate` says."""
    try:
        make(config, source=folder).generate(torch.ones(1, 4, dtype=torch.int64))
    except RuntimeError as error:
        return str(error)
    return "no error"


# Memory


def _anonymous_bytes() -> int:
    """Memory of this process that no file backs: mapped weight files do not count."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("RssAnon"))
    return int(line.split()[1]) << 10


class _PeakSampler(threading.Thread):
    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak, self.done = 0, threading.Event()

    def run(self) -> None:
        while not self.done.is_set():
            self.peak = max(self.peak, _anonymous_bytes())
            time.sleep(0.001)


def memory_while_loading(config: dict, small_folder: str, folder: str) -> dict:
    """Peak of anonymous bytes above the level before loading, and the parameters whose values are not the files'."""
    make(config, source=small_folder)
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before, sampler = _anonymous_bytes(), _PeakSampler()
    sampler.start()
    model = make(config, source=folder)
    sampler.done.set()
    sampler.join()
    source = AutoModelForCausalLM.from_pretrained(folder).state_dict() if dist.get_rank() == 0 else {}
    wrong = [n for n, t in model.full_tensors() if t is not None and not torch.equal(t, source[n])]
    return {"peak": sampler.peak - before, "wrong": wrong}
