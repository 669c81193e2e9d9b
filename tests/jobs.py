"""What the workers run: module-level functions, so that a fresh process can import them."""

from __future__ import annotations

import torch

import meshpar
from tests import models


def rows_of_rank(batch: dict, mesh) -> dict:
    """This data-parallel rank's rows of a global batch."""
    size, rank = mesh["dp"].size(), mesh["dp"].get_local_rank()
    return {k: v.chunk(size)[rank] for k, v in batch.items()}


def make(config: dict, family: str = "llama", model_changes: dict | None = None, plan="auto", source=None):
    """A tiny float32 model on the mesh of ``config``."""
    config = meshpar.ParallelConfig(**{"compute_dtype": "float32", **config})
    built = source if source is not None else models.tiny_model(family, **(model_changes or {}))
    return meshpar.parallelize_model(built, config, plan=plan)


def gradients(config: dict, batches: list[dict], family="llama", model_changes=None, plan="auto") -> dict:
    """Losses of successive `forward_backward` calls, the clip norm and every whole gradient (rank 0)."""
    model = make(config, family, model_changes, plan)
    losses = [model.forward_backward(rows_of_rank(b, model.mesh)).item() for b in batches]
    norm = model.grad_norm().item()
    return {
        "losses": losses,
        "norm": norm,
        "grads": dict(model.full_tensors("grad")),
        "names": [n for n, _ in model.named_parameters()],
    }


def gradients_of_list(config: dict, batch: dict, pieces: int) -> dict:
    """As `gradients`, with this rank's rows handed over as a list of ``pieces`` batches in one call."""
    model = make(config)
    own = rows_of_rank(batch, model.mesh)
    parts = [{k: v.chunk(pieces)[i] for k, v in own.items()} for i in range(pieces)]
    return {"losses": [model.forward_backward(parts).item()], "grads": dict(model.full_tensors("grad"))}


def plain_loop(config: dict, batches: list[dict], family: str) -> dict:
    """`model(**batch).loss.backward()` for each batch, and the logits of the first beside the unmodified model's."""
    model = make(config, family)
    losses = []
    for batch in batches:
        loss = model(**rows_of_rank(batch, model.mesh)).loss
        loss.backward()
        losses.append(loss.item())
    inputs = {k: v for k, v in rows_of_rank(batches[0], model.mesh).items() if k != "labels"}
    with torch.no_grad():
        logits = model(**inputs).logits
        reference_logits = models.tiny_model(family)(**inputs, use_cache=False).logits
    return {
        "losses": losses,
        "logits": logits,
        "reference_logits": reference_logits,
        "grads": dict(model.full_tensors("grad")),
    }


def train_eval_train(config: dict, train: list[dict], held_out: dict) -> dict:
    """Evaluations before, between and after training steps, on batches of another shape."""
    model = make(config)
    own = rows_of_rank(held_out, model.mesh)
    evals, losses = [model.eval_loss(own).item()], []
    for batch in train:
        losses.append(model.forward_backward(rows_of_rank(batch, model.mesh)).item())
        evals.append(model.eval_loss(own).item())
    return {"evals": evals, "losses": losses, "grads": dict(model.full_tensors("grad"))}


ADAMW = dict(lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-5)
MAX_NORM = 1.0


def adamw_steps(config: dict, batches: list[dict], model_changes: dict | None, family="llama", out=None) -> dict:
    """A user's training loop on the mesh; at its end the model is saved to ``out``, if that is given."""
    model = make(config, family, model_changes)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    losses, norms = [], []
    for batch in batches:
        losses.append(model.forward_backward(rows_of_rank(batch, model.mesh)).item())
        norms.append(model.clip_grad_norm_(MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    if out is not None:
        model.save_pretrained(out)
    return {"losses": losses, "norms": norms, "params": dict(model.full_tensors("param"))}


def adamw_steps_in_one_process(batches: list[dict], model_changes: dict | None, family="llama") -> dict:
    """The same loop on the unmodified model."""
    model = models.tiny_model(family, **(model_changes or {}))
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    losses, norms = [], []
    for batch in batches:
        loss = models.reference_loss(model, batch)
        loss.backward()
        losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "norms": norms, "params": {n: p.detach() for n, p in model.named_parameters()}}


def two_losses_in_one_backward(config: dict, batches: list[dict], family: str) -> dict:
    """Two forwards as a module, their losses summed into one backward."""
    model = make(config, family)
    sum(model(**rows_of_rank(b, model.mesh)).loss for b in batches).backward()
    return {"grads": dict(model.full_tensors("grad"))}


def forward_alone_between_steps(config: dict, batches: list[dict]) -> list[float]:
    """SGD steps with a forward without a backward, and an evaluation, between them."""
    model = make(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for batch in batches:
        own = rows_of_rank(batch, model.mesh)
        losses.append(model.forward_backward(own).item())
        if model.parallel_config.pp == 1:
            with torch.no_grad():
                model(own["input_ids"])
            model(**own)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(model.eval_loss(own).item())
    return losses


def step_after_a_failed_one(config: dict, batch: dict) -> dict:
    """A backward that fails in the second of two microbatches on every rank, caught; then a step."""
    model = make(config)
    own = rows_of_rank(batch, model.mesh)
    model.forward_backward(own)
    loss_fn, calls = model._pipeline.modules[0].loss_fn, []

    def failing(logits, targets):
        calls.append(1)
        if len(calls) == 2:
            raise MemoryError("out of memory")
        return loss_fn(logits, targets)

    model._pipeline.modules[0].loss_fn = failing
    try:
        model.forward_backward(own)
    except MemoryError:
        model._pipeline.modules[0].loss_fn = loss_fn
    for p in model.parameters():
        p.grad = None
    return {"losses": [model.forward_backward(own).item()], "grads": dict(model.full_tensors("grad"))}


def first_step_that_fails(config: dict, batch: dict) -> str:
    """What a rank's first step raises where the first stage fails before it sends anything."""
    model = make(config)
    own = rows_of_rank(batch, model.mesh)

    def failing(*args, **kwargs):
        raise MemoryError("out of memory")

    if model.mesh["pp"].get_local_rank() == 0:
        model._pipeline.modules[0].forward = failing
    try:
        model.forward_backward(own)
    except Exception as error:
        return f"{type(error).__name__}: {error} {error.__cause__}"
    return "no error"


def unfrozen_later(config: dict, batch: dict, family: str, changes: dict) -> dict:
    """A model built with everything frozen, made trainable afterwards."""
    source = models.tiny_model(family, **changes)
    for p in source.parameters():
        p.requires_grad_(False)
    model = make(config, source=source)
    for p in model.parameters():
        p.requires_grad_(True)
    loss = model.forward_backward(rows_of_rank(batch, model.mesh)).item()
    return {"losses": [loss], "grads": dict(model.full_tensors("grad"))}


def refusal(config: dict, lists: list[int]) -> str:
    """What `forward_backward` says when dp ranks give lists of different lengths."""
    model = make(config)
    own = rows_of_rank(models.make_batch(), model.mesh)
    try:
        model.forward_backward([own] * lists[model.mesh["dp"].get_local_rank()])
    except ValueError as error:
        return str(error)
    return ""


def whole_dtensors(config: dict) -> bool:
    """Whether every parameter's DTensor, put together by torch, is the unmodified model's parameter."""
    want = dict(models.tiny_model().named_parameters())
    return all(torch.equal(p.full_tensor(), want[n]) for n, p in make(config).named_parameters())
