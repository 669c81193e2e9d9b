"""What the workers run for the tests of the public surface and of what is refused."""

from __future__ import annotations

import copy
import io
import logging
import os
import sys
from unittest import mock

import torch
import torch.distributed as dist
from accelerate import ParallelismConfig
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import meshpar
from meshpar.demo import docstring_pairs
from meshpar.mesh import on_first_rank
from tests import models
from tests.jobs import make, rows_of_rank


def demo_pairs() -> list[dict[str, str]]:
    """The demo's instruction pairs, in a process whose strings hash as those of no process but the workers do."""
    with mock.patch("sys.excepthook", sys.__excepthook__):  # which a process group replaces
        return list(docstring_pairs())


def call_of_a_pipeline(config: dict, batch: dict) -> list[str]:
    """What a model with pp > 1 says when it is called, with labels and without."""
    model, messages = make(config), []
    for inputs in (batch, {"input_ids": batch["input_ids"]}):
        try:
            model(**inputs)
        except RuntimeError as error:
            messages.append(str(error))
    return messages


def of_accelerate(sizes: dict, batch: dict) -> dict:
    """A step by an accelerate config, and one by the `ParallelConfig` of the same sizes."""
    results = {}
    for name, config in (
        ("accelerate", ParallelismConfig(**{f"{k}_size": v for k, v in sizes.items()})),
        ("meshpar", meshpar.ParallelConfig(**sizes)),
    ):
        model = meshpar.parallelize_model(models.tiny_model(), config)
        loss = model.forward_backward(rows_of_rank(batch, model.mesh)).item()
        results[name] = (loss, model.grad_norm().item(), model.mesh.mesh_dim_names, tuple(model.mesh.shape))
    return results


def by_default(batch: dict) -> dict:
    """A model without a config."""
    model = meshpar.parallelize_model(models.tiny_model())
    losses = [model.eval_loss(rows_of_rank(batch, model.mesh)).item()]
    return {"config": model.parallel_config, "shape": tuple(model.mesh.shape), "losses": losses}


def stored_as(config: dict, dtype) -> dict:
    """Dtypes of parameters, gradients and moments with ``dtype=``, and the whole weights."""
    given = None if config is None else meshpar.ParallelConfig(**config)
    model = meshpar.parallelize_model(models.tiny_model(), given, dtype=dtype)
    weights = dict(model.full_tensors())
    optimizer = torch.optim.AdamW(model.parameters())
    model.forward_backward(rows_of_rank(models.make_batch(), model.mesh))
    optimizer.step()
    return {
        "weights": weights,
        "parameters": {p.dtype for p in model.parameters()},
        "gradients": {p.grad.dtype for p in model.parameters()},
        "moments": {state["exp_avg"].dtype for state in optimizer.state.values()},
        "config": model.parallel_config.param_dtype,
    }


def without_torchrun(batch: dict, started: bool) -> dict:
    """A step in a process that nobody made a group for, or that called `init_distributed` itself."""
    dist.destroy_process_group()
    assert not {"RANK", "WORLD_SIZE"} & set(os.environ), "as outside torchrun"
    device = meshpar.init_distributed(timeout=20) if started else None
    again = meshpar.init_distributed() if started else None
    model = meshpar.parallelize_model(models.tiny_model(), meshpar.ParallelConfig(compute_dtype="float32"))
    return {
        "devices": (device, again),
        "world": (dist.get_world_size(), dist.get_rank(), dist.get_backend()),
        "loss": model.forward_backward(batch).item(),
    }


def of_a_rank_of_another_world(rank: int, world_size: int, llama: dict, config: dict) -> dict:
    """A Llama on the meta device, set up as one rank of a world of which torch's fake process group shows no other."""
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    model = meshpar.parallelize_model(LlamaConfig(**llama), meshpar.ParallelConfig(**config), device="meta")
    return {
        "coordinate": list(model.mesh.get_coordinate()),
        "shapes": {n: [list(p.shape), list(p.to_local().shape)] for n, p in model.named_parameters()},
        "devices": {p.to_local().device.type for p in model.parameters()},
    }


def full_tensors_of(what: str) -> str:
    """What `full_tensors` says, before anything is iterated over."""
    try:
        make(dict(dp_shard=1)).full_tensors(what)
    except ValueError as error:
        return str(error)
    return "no error"


def messages_of(config: dict, *actions) -> list[str]:
    """What each of ``actions`` on a model and this rank's rows ends in."""
    model, messages = make(config), []
    own = rows_of_rank(models.make_batch(), model.mesh)
    for action in actions:
        try:
            action(model, own)
        except (RuntimeError, ValueError) as error:
            messages.append(str(error))
        else:
            messages.append("no error")
    return messages


def assign_state(model, own: dict) -> None:
    """Parameters in place of the model's own."""
    model.load_state_dict(model.state_dict(), assign=True)


def step_without_gradients(model, own: dict) -> None:
    """A step under no_grad."""
    with torch.no_grad():
        model.forward_backward(own)


def step_with_a_hook(model, own: dict) -> None:
    """An optimizer's step in the backward, as torch's tutorial has it; the hook is removed afterwards."""
    handle = next(model.parameters()).register_post_accumulate_grad_hook(lambda p: p.grad.zero_())
    try:
        model.forward_backward(own)
    finally:
        handle.remove()


def call_with_a_hook(model, own: dict) -> None:
    """The same as a module, and a hook that changes the gradient."""
    handle = next(model.parameters()).register_hook(lambda grad: grad * 0)
    try:
        model(**own)
    finally:
        handle.remove()


def step_with_autocast(model, own: dict) -> None:
    """A step as mixed precision is written without meshpar."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model.forward_backward(own)


def call_with_autocast(model, own: dict) -> None:
    """Logits in the same way."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(own["input_ids"])


def copy_model(model, own: dict) -> None:
    """A copy, as for a moving average of the weights."""
    copy.deepcopy(model)


def pickle_model(model, own: dict) -> None:
    """The whole model in a file."""
    torch.save(model, io.BytesIO())


def step(model, own: dict) -> None:
    """A plain step."""
    model.forward_backward(own)


def set_up_by_a_dict(model, own: dict) -> None:
    """A second model, its config as a recipe has it."""
    try:
        meshpar.parallelize_model(models.tiny_model(), dict(tp=2))
    except TypeError as error:
        raise ValueError(str(error)) from None


def modes_after_an_evaluation(config: dict, batch: dict) -> tuple[set[str], set[str]]:
    """Modules in evaluation mode before an evaluation, and after it."""
    model = make(config)
    model.get_submodule("_runner.model.model.layers.1.mlp").eval()
    before, _, after = _in_eval_mode(model), model.eval_loss(rows_of_rank(batch, model.mesh)), _in_eval_mode(model)
    return before, after


def _in_eval_mode(model) -> set[str]:
    return {name for name, module in model.named_modules() if not module.training}


def first_run_in_inference_mode(config: dict, batch: dict) -> dict:
    """Everything but a step under torch.inference_mode(): set-up, evaluation and, without a pipeline, calls."""
    source = models.tiny_model()
    with torch.inference_mode():
        model = make(config, source=source)
        own = rows_of_rank(batch, model.mesh)
        losses = [model.eval_loss(own).item()]
        if model.parallel_config.pp == 1:
            losses.append(model(**own).loss.item())
            model(own["input_ids"])
    losses.append(model.forward_backward(own).item())
    return {"losses": losses, "grads": dict(model.full_tensors("grad"))}


def hybrid_mesh_of_the_caller(sizes: tuple[int, int, int, int], config: dict, batch: dict) -> dict:
    """Gradients on a caller's mesh of pp x dp_replicate x dp_shard x tp."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("pp", "dp_replicate", "dp_shard", "tp"))
    model = meshpar.parallelize_model(models.tiny_model(), meshpar.ParallelConfig(**config), mesh=mesh)
    parallel = model.parallel_config
    return {
        "same": model.mesh is mesh,
        "sizes": (parallel.pp, parallel.dp_replicate, parallel.dp_shard, parallel.tp),
        "dp": (mesh["dp"].size(), mesh["dp"].get_local_rank()),
        "loss": model.forward_backward(rows_of_rank(batch, mesh)).item(),
        "norm": model.grad_norm().item(),
        "grads": dict(model.full_tensors("grad")),
    }


# Models that meshpar must refuse


class AddsWeights(LlamaDecoderLayer):
    """A layer whose own code uses a weight of its attention, of which tp leaves a part."""

    def forward(self, hidden_states, **kwargs):
        return super().forward(hidden_states, **kwargs) + self.self_attn.q_proj.weight.mean(1)


class AddsQueries(LlamaDecoderLayer):
    """The same of a projection, as a mean, which fits whatever it is taken over."""

    def forward(self, hidden_states, **kwargs):
        queries = self.self_attn.q_proj(hidden_states)
        return super().forward(hidden_states, **kwargs) + queries.mean(-1, keepdim=True)


def adds_weights():
    return _with_second_layer(AddsWeights)


def adds_queries():
    return _with_second_layer(AddsQueries)


def _with_second_layer(kind: type):
    model = models.tiny_model()
    model.model.layers[1].__class__ = kind
    return model


def shares_a_matrix():
    """One matrix as the query projection of a layer and the output projection of the next."""
    model = models.tiny_model()
    model.model.layers[1].self_attn.o_proj.weight = model.model.layers[0].self_attn.q_proj.weight
    return model


def refusal_of(build, config: dict, plan="auto") -> str:
    """The message of the error that putting the model on the mesh ends in on this rank, or the loss's error."""
    source, batch = build(), models.make_batch()
    want = models.reference_loss(source, batch).item()
    try:
        model = make(config, source=source, plan=plan)
    except ValueError as error:
        return str(error)
    off = abs(model.forward_backward(rows_of_rank(batch, model.mesh)).item() - want)
    return "no error" if off <= 1e-6 else f"off by {off}"


class Unsendable(ValueError):
    """An error that holds what cannot be sent to another process."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.held = lambda: None


def found_on_first_rank(error: type[Exception] | None) -> tuple:
    """How often this rank looked, and what `on_first_rank` gave or raised here."""
    looked = []

    def find() -> str:
        looked.append(dist.get_rank())
        if error is not None:
            raise error("tp is 3")
        return f"of rank {dist.get_rank()}"

    try:
        return len(looked), on_first_rank(find), len(looked)
    except Exception as raised:
        return type(raised).__name__, str(raised), len(looked)


def other_overrides() -> str:
    """The refusal where rank 1 was given another plan."""
    plan = {"model.layers.*.mlp.*": "replicate"} if dist.get_rank() else "auto"
    try:
        meshpar.parallelize_model(models.tiny_model(), meshpar.ParallelConfig(tp=2, dp_shard=1), plan=plan)
    except RuntimeError as error:
        return str(error)
    return "no error"


def of_directory(directory: str, config: dict, device: str) -> tuple[dict, str]:
    """Name -> shapes, device and dtype of this rank's parameters, and the last line logged."""
    lines: list[str] = []
    log, handler = logging.getLogger("meshpar"), logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    level = log.level
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    try:
        model = meshpar.parallelize_model(directory, meshpar.ParallelConfig(**config), device=device)
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    params = {
        n: (tuple(p.shape), tuple(p.to_local().shape), p.placements, p.dtype) for n, p in model.named_parameters()
    }
    assert all(p.to_local().device.type == device for p in model.parameters())
    return params, lines[-1]
