"""What an expert would write by hand for one model: a Llama for a dp x tp mesh, Megatron style (arXiv 1909.08053).

Column- and row-parallel linears, a vocabulary-parallel embedding, head and loss, plain `dist.all_reduce` between them,
and `fully_shard` around it. It knows no other model and no sizes that do not divide: the bar for speed, not a product.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.contiguous()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class _CrossEntropy(torch.autograd.Function):
    """Sum over tokens of the cross entropy of logits [tokens, vocab / tp] that start at ``start``."""

    @staticmethod
    def forward(ctx, logits, targets, start, group):
        top = logits.amax(-1, keepdim=True)
        dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
        logits = logits - top
        own = (targets >= start) & (targets < start + logits.shape[-1])
        at = (targets - start).masked_fill(~own, 0).unsqueeze(-1)
        hit = logits.gather(-1, at).masked_fill(~own.unsqueeze(-1), 0)
        exp = logits.exp()
        sums = torch.cat((exp.sum(-1, keepdim=True), hit), -1)
        dist.all_reduce(sums, group=group)
        ctx.save_for_backward(exp.div_(sums[:, :1]), own, at)
        return (sums[:, 0].log() - sums[:, 1]).sum()

    @staticmethod
    def backward(ctx, grad):
        softmax, own, at = ctx.saved_tensors
        softmax.scatter_add_(-1, at, -own.unsqueeze(-1).to(softmax.dtype))
        return softmax.mul_(grad), None, None, None


class _Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class _Layer(nn.Module):
    def __init__(self, config: LlamaConfig, group: dist.ProcessGroup) -> None:
        super().__init__()
        h, d, tp = config.hidden_size, config.head_dim, group.size()
        heads, kv_heads, ffn = (
            config.num_attention_heads // tp,
            config.num_key_value_heads // tp,
            config.intermediate_size,
        )
        self.head_dim, self.group = d, group
        self.q_proj = nn.Linear(h, heads * d, bias=False)
        self.k_proj = nn.Linear(h, kv_heads * d, bias=False)
        self.v_proj = nn.Linear(h, kv_heads * d, bias=False)
        self.o_proj = nn.Linear(heads * d, h, bias=False)
        self.gate_proj = nn.Linear(h, ffn // tp, bias=False)
        self.up_proj = nn.Linear(h, ffn // tp, bias=False)
        self.down_proj = nn.Linear(ffn // tp, h, bias=False)
        self.input_layernorm = _Norm(h, config.rms_norm_eps)
        self.post_attention_layernorm = _Norm(h, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, s, _ = x.shape
        y = _Copy.apply(self.input_layernorm(x), self.group)
        q, k, v = (p(y).view(b, s, -1, self.head_dim).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        x = x + _Reduce.apply(self.o_proj(y.transpose(1, 2).reshape(b, s, -1)), self.group)
        y = _Copy.apply(self.post_attention_layernorm(x), self.group)
        return x + _Reduce.apply(self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y)), self.group)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class Twin(nn.Module):
    """The whole model on one rank of ``mesh`` (dimensions dp and tp), with a reference model's weights."""

    def __init__(self, config: LlamaConfig, mesh: DeviceMesh) -> None:
        super().__init__()
        self.group = mesh["tp"].get_group()
        self.own = config.vocab_size // self.group.size()
        self.start = self.own * self.group.rank()
        self.embed_tokens = nn.Embedding(self.own, config.hidden_size)
        self.layers = nn.ModuleList(_Layer(config, self.group) for _ in range(config.num_hidden_layers))
        self.norm = _Norm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, self.own, bias=False)
        self.inverse = config.rope_parameters["rope_theta"] ** -(
            torch.arange(0, config.head_dim, 2).float() / config.head_dim
        )

    def load(self, whole: dict[str, Tensor]) -> None:
        """This rank's slices of a Hugging Face Llama's state dict."""
        size, rank = self.group.size(), self.group.rank()
        for name, param in self.named_parameters():
            known = name.replace("q_proj", "self_attn.q_proj") if "q_proj" in name else name
            for part, owner in (("k_proj", "self_attn"), ("v_proj", "self_attn"), ("o_proj", "self_attn")):
                known = known.replace(part, f"{owner}.{part}")
            for part in ("gate_proj", "up_proj", "down_proj"):
                known = known.replace(part, f"mlp.{part}")
            value = whole[known if known.startswith("lm_head") else f"model.{known}"]
            dim = next((d for d in range(value.ndim) if value.shape[d] != param.shape[d]), None)
            param.data.copy_(value if dim is None else value.chunk(size, dim)[rank])

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Sum over this rank's tokens of the loss."""
        mine = (ids >= self.start) & (ids < self.start + self.own)
        x = self.embed_tokens((ids - self.start).masked_fill(~mine, 0)).masked_fill(~mine.unsqueeze(-1), 0)
        x = _Reduce.apply(x, self.group)
        angles = torch.arange(ids.shape[1]).float().outer(self.inverse).repeat(1, 2)
        for layer in self.layers:
            x = layer(x, angles.cos(), angles.sin())
        x = _Copy.apply(self.norm(x), self.group)[:, :-1].flatten(0, 1)
        return _CrossEntropy.apply(self.lm_head(x), labels[:, 1:].flatten(), self.start, self.group)


def make_twin(config: LlamaConfig, mesh: DeviceMesh, whole: dict[str, Tensor]) -> Twin:
    """The twin on ``mesh`` with its slices of ``whole``, in `fully_shard` over dp."""
    twin = Twin(config, mesh)
    twin.load(whole)
    for module in (*twin.layers, twin):
        fully_shard(module, mesh=mesh["dp"])
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    return twin
