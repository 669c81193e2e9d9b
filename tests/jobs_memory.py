"""What the workers run to see what a forward keeps."""

from __future__ import annotations

import gc

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshpar.comm import KeepShard, gather_sequence
from tests import models
from tests.jobs import make, rows_of_rank


class Alive(TorchDispatchMode):
    """Remembers the storages that operations made, without keeping them alive."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return out

    def nbytes(self) -> int:
        """Bytes of those that still live."""
        return sum(size for ref, size in self.made.values() if not ref.expired())


def kept_bytes(config: dict, batch: dict) -> tuple[int, int]:
    """Bytes that a forward leaves allocated, as it is and with gathered inputs kept whole."""
    model, found = make(config), []
    model(**batch).loss.backward()  # makes buffers that stay
    for keep_shards in (True, False):
        model._runner.tp.keep_shards = keep_shards
        with Alive() as alive:
            loss = model(**batch).loss
        gc.collect()
        found.append(alive.nbytes())
        loss.backward()
    return found[0], found[1]


def kept_and_computed_again(config: dict, batch: dict) -> dict[str, tuple[int, int]]:
    """By checkpointing mode, bytes that a forward leaves allocated, and products of matrices in its backward."""
    found = {}
    for mode in ("none", "selective", "full"):
        model = make(config | {"activation_checkpoint": mode})
        model(**batch).loss.backward()
        with Alive() as alive:
            loss = model(**batch).loss
        gc.collect()
        kept = alive.nbytes()
        with Products() as products:
            loss.backward()
        found[mode] = kept, products.count
    return found


class Products(TorchDispatchMode):
    """Counts products of matrices."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


def head_is_reduced_early(config: dict, changes: dict) -> bool:
    """Whether this rank has its part of the head's gradient when the last layer's backward begins."""
    model, found = make(config, model_changes=changes), []
    sharded_head = dict(model.named_parameters(remove_duplicate=False))["lm_head.weight"]
    last = model._runner.own_layers()[-1]
    last.register_full_backward_pre_hook(lambda *_: found.append(sharded_head.grad is not None))
    batch = models.make_batch(4)
    model.forward_backward(rows_of_rank(batch, model.mesh))
    (early,) = found
    return early


def gradients_of_two_backwards(config: dict, batch: dict) -> tuple[dict, dict]:
    """This rank's gradients after one backward of a loss, and after a second one."""
    model = make(config)
    loss = model(**batch).loss
    loss.backward(retain_graph=True)
    once = _gradients(model)
    loss.backward()
    return once, _gradients(model)


PRODUCTS = {
    "weight second": lambda x, w, b: x @ w.t(),
    "weight first": lambda x, w, b: (w @ x.transpose(1, 2)).transpose(1, 2),
    "weight first, rows": lambda x, w, b: (w @ x.flatten(0, 1).t()).t(),
    "weight as it is": lambda x, w, b: x @ w,
    "bias": lambda x, w, b: torch.nn.functional.linear(x, w, b),
    "with itself": lambda x, w, b: (x @ w.t()) * x,
}


def gradients_asked_for_apart(seq: int) -> dict[str, list[tuple[float, float]]]:
    """Of each product of a gathered input: its gradients taken one after another, and all at once, as sums of squares.

    [1, seq, seq] inputs and weights: shapes alone do not tell the factors apart.
    """
    group, found = dist.group.WORLD, {}
    shard = torch.randn(1, seq // group.size(), seq, generator=torch.Generator().manual_seed(dist.get_rank()))
    weight, bias = torch.randn(seq, seq, generator=torch.Generator().manual_seed(9)), torch.ones(seq)

    def make_graph(product) -> tuple[Tensor, list[Tensor]]:
        leaves = [t.clone().requires_grad_() for t in (shard, weight, bias)]
        whole = gather_sequence(leaves[0], group, seq)
        with KeepShard(leaves[0], whole, group):
            out = product(whole, *leaves[1:])
        return out.pow(2).sum(), leaves

    for name, product in PRODUCTS.items():
        apart, leaves = make_graph(product)
        one_by_one = [torch.autograd.grad(apart, x, retain_graph=True, allow_unused=True)[0] for x in leaves]
        once, leaves = make_graph(product)
        at_once = torch.autograd.grad(once, leaves, allow_unused=True)
        pairs = zip(one_by_one, at_once, strict=True)
        found[name] = [tuple(g.pow(2).sum().item() for g in pair) for pair in pairs if pair[0] is not None]
    return found


def _gradients(model) -> dict[str, torch.Tensor]:
    return {n: p.grad.to_local().clone() for n, p in model.named_parameters()}
