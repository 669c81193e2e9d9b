"""Training step of one Llama on one mesh: meshpar beside what a user would pick instead.

    python -m benchmarks.step          # prints the tables that `make bench` writes to benchmarks/RESULTS.md

All contenders of a mesh live in the same processes, start from the same weights, and step in turn, so that a busy
machine slows all of them; a ratio is one of medians over all rounds. Each one's first loss must be the reference's.
Memory is counted in bytes of tensors, on the rank that needs most, in more steps after the timed ones.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable

from . import memory
from .processes import bind_to_cores, under_torchrun

MODELS = {
    "tiny": dict(
        hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4, intermediate_size=128
    ),
    "small": dict(
        hidden_size=512, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=8, intermediate_size=1536
    ),
}
BATCHES = {"tiny": (2, 32), "small": (2, 256)}  # rows a dp rank, tokens a row
VOCABULARY = {"tiny": 256, "small": 8192}
MESHES = {"tp=2": (1, 2), "dp=2": (2, 1), "dp=2 tp=2": (2, 2)}
STARTS = {"tiny": 3, "small": 1}  # of all processes anew: a start's ratios of tiny steps are up to 0.07 off
ROUNDS = {"tiny": 40, "small": 5}  # each
WARMUP = 2
TWIN = "hand-written twin"


def main() -> None:
    """Run every mesh in fresh processes, or, inside a worker, one of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        run_worker(*args.worker)
    else:
        print(tables())


def tables() -> str:
    """The Markdown of every model and mesh."""
    lines = [
        "All contenders of a mesh live in the same processes, start from the same weights, and step in turn, in an "
        "order drawn anew for each round; each rank is bound to cores of its own, and the tiny model's rounds are of "
        "three starts. The twin is one model, by hand in Megatron's style, in `fully_shard`. "
        "The first loss of each is the reference's. accelerate shards on accelerators only, and was made to here. "
        "Memory is of tensors, on the worst rank: parameters, buffers and AdamW's states between steps, and what a "
        "step takes on top at its peak.",
        "",
    ]
    for model, sizes in MODELS.items():
        rows, seq_len = BATCHES[model]
        lines += [
            f"### {model}: {sizes['num_hidden_layers']} layers, hidden {sizes['hidden_size']}, "
            f"{rows} x {seq_len} tokens a dp rank",
            "",
            "| mesh | contender | forward + backward (ms) | ratio to the twin | with AdamW (ms) | meshpar takes |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
        measured = {mesh: launch(model, mesh) for mesh in MESHES}
        for mesh, results in measured.items():
            lines += _rows(mesh, results)
        lines += [
            "",
            "| mesh | contender | held between steps (MiB) | peak above it in a step (MiB) | sum | meshpar takes |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
        for mesh, results in measured.items():
            lines += _memory_rows(mesh, results)
        lines.append("")
    return "\n".join(lines)


def _rows(mesh: str, results: dict[str, dict]) -> list[str]:
    times = {
        n: [statistics.median(r[k]) * 1e3 for k in ("backward", "step")] for n, r in results.items() if "step" in r
    }
    rows = []
    for name, result in results.items():
        if name not in times:
            rows.append(f"| {mesh} | {name} | {result['failed']} | | | |")
            continue
        backward, step = times[name]
        ratio = backward / times[TWIN][0]
        share = "" if name == "meshpar" else f"{times['meshpar'][1] / step:.2f} of it"
        rows.append(f"| {mesh} | {name} | {backward:.1f} | {ratio:.2f} | {step:.1f} | {share} |")
    return rows


def _memory_rows(mesh: str, results: dict[str, dict]) -> list[str]:
    rows = []
    for name, result in results.items():
        if "held" not in result:
            continue
        held, peak = result["held"] / 2**20, result["peak"] / 2**20
        own = (results["meshpar"]["held"] + results["meshpar"]["peak"]) / 2**20
        share = "" if name == "meshpar" else f"{own / (held + peak):.2f} of it"
        rows.append(f"| {mesh} | {name} | {held:.1f} | {peak:.1f} | {held + peak:.1f} | {share} |")
    return rows


def launch(model: str, mesh: str) -> dict[str, dict]:
    """What rank 0 reports of all contenders on one mesh, the seconds of all starts together."""
    dp, tp = MESHES[mesh]
    starts = [under_torchrun("benchmarks.step", dp * tp, "--worker", model, mesh) for _ in range(STARTS[model])]
    results = starts[0]
    for name, result in results.items():
        for seconds in ("backward", "step") if "step" in result else ():
            result[seconds] = [s for start in starts for s in start[name].get(seconds, ())]
    return results


def run_worker(model: str, mesh: str) -> None:
    """Build all contenders, step them in turn, print their seconds on rank 0."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import AutoModelForCausalLM, LlamaConfig

    bind_to_cores(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))  # before threads start, which inherit it
    dist.init_process_group("gloo")
    dp, tp = MESHES[mesh]
    device_mesh = init_device_mesh("cpu", (1, dp, tp), mesh_dim_names=("pp", "dp", "tp"))
    config = LlamaConfig(**MODELS[model], vocab_size=VOCABULARY[model], tie_word_embeddings=False)
    torch.manual_seed(0)
    whole = AutoModelForCausalLM.from_config(config)
    rows, seq_len = BATCHES[model]
    ids = torch.randint(0, config.vocab_size, (rows * dp, seq_len), generator=torch.Generator().manual_seed(1))
    own = ids.chunk(dp)[device_mesh["dp"].get_local_rank()]
    expected = whole(input_ids=ids, labels=ids, use_cache=False).loss.item()
    tokens = ids[:, 1:].numel()
    with tempfile.TemporaryDirectory() as directory:
        paths = [directory if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(paths)
        if dist.get_rank() == 0:
            whole.save_pretrained(paths[0])
        dist.barrier()
        built = {}
        for name, make in contenders(dp, tp).items():
            try:
                built[name] = Contender(*make(whole, paths[0], device_mesh, own, tokens))
                built[name].check(expected, device_mesh)
            except Exception as error:  # theirs may not run here; a table says so
                if name == "meshpar":
                    raise
                built[name] = None
                print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
            dist.barrier()
    running = [contender for contender in built.values() if contender]
    for turn in range(WARMUP + ROUNDS[model]):
        for contender in random.Random(turn).sample(running, len(running)):  # no one always behind the same other
            dist.barrier()
            contender.step(keep=turn >= WARMUP)
    results = {n: {**c.seconds, **c.most_memory()} if c else {"failed": "does not run here"} for n, c in built.items()}
    if dist.get_rank() == 0:
        print(json.dumps(results), flush=True)
    dist.destroy_process_group()


class Contender:
    """One way to train: ``run`` does forward and backward and returns this rank's part of the loss."""

    def __init__(self, model, run: Callable[[], object], whole_loss: bool = False) -> None:
        import torch

        self.model, self.run, self.whole_loss = model, run, whole_loss
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
        self.seconds: dict[str, list[float]] = {"backward": [], "step": []}

    def check(self, expected: float, mesh) -> None:
        """The loss of the whole batch must be the reference's."""
        import torch.distributed as dist

        loss = self.run().detach().float().clone()
        if not self.whole_loss:
            dist.all_reduce(loss, group=mesh["dp"].get_group())
        self.optimizer.zero_grad()
        if abs(loss.item() - expected) > 1e-4 * expected:
            raise RuntimeError(f"loss {loss.item()}, reference {expected}")

    def step(self, keep: bool) -> None:
        """One training step, timed."""
        start = time.perf_counter()
        self.run()
        middle = time.perf_counter()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if keep:
            self.seconds["backward"].append(middle - start)
            self.seconds["step"].append(time.perf_counter() - start)

    def most_memory(self) -> dict[str, int]:
        """Bytes of parameters, buffers and optimizer states, and a step's peak above them, on the worst rank."""
        import torch.distributed as dist

        states = (s for state in self.optimizer.state.values() for s in state.values())
        held = memory.bytes_of_tensors((*self.model.parameters(), *self.model.buffers(), *states))
        dist.barrier()
        peak = memory.peak_of_tensors(lambda: self.step(keep=False))
        everyone = [(0, 0)] * dist.get_world_size()
        dist.all_gather_object(everyone, (held, peak))
        return dict(zip(("held", "peak"), max(everyone, key=sum), strict=True))


def contenders(dp: int, tp: int) -> dict[str, Callable]:
    """Name -> maker, for a mesh; each gets (reference model, directory, mesh, own ids, tokens of the global batch)."""
    chosen: dict[str, Callable] = {"meshpar": of_meshpar}
    if tp > 1:
        chosen["meshpar, sequence parallel"] = of_meshpar_sequence_parallel
    chosen[TWIN] = of_twin
    if tp > 1:
        chosen["torch's ParallelStyles + fully_shard"] = of_stock
    chosen["transformers DistributedConfig"] = of_transformers
    if tp == 1:
        chosen["accelerate FSDP2"] = of_accelerate
    return chosen


def of_meshpar(whole, directory, mesh, own, tokens, sequence_parallel=False):
    """`parallelize_model` and `forward_backward`."""
    import meshpar

    config = meshpar.ParallelConfig(
        dp_shard=mesh["dp"].size(), tp=mesh["tp"].size(), compute_dtype="float32", sequence_parallel=sequence_parallel
    )
    model = meshpar.parallelize_model(directory, config)
    batch = {"input_ids": own, "labels": own}
    return model, lambda: model.forward_backward(batch), True


def of_meshpar_sequence_parallel(*args):
    """The same with hidden states in shards between blocks, meshpar's own choice."""
    return of_meshpar(*args, sequence_parallel=True)


def of_twin(whole, directory, mesh, own, tokens):
    """`benchmarks.twin`."""
    from benchmarks.twin import make_twin

    twin = make_twin(whole.config, mesh, whole.state_dict())

    def run():
        loss = twin(own, own) / tokens
        loss.backward()
        return loss

    return twin, run


def of_stock(whole, directory, mesh, own, tokens):
    """The same split by torch's own styles, which compute on DTensors, with `loss_parallel` and `fully_shard`."""
    import copy

    import torch.nn.functional as F
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        loss_parallel,
        parallelize_module,
    )

    model = copy.deepcopy(whole)
    columns, rows = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
    layer = {f"self_attn.{n}": ColwiseParallel() for n in columns} | {f"mlp.{n}": ColwiseParallel() for n in rows}
    layer |= {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    plan = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    plan |= {f"model.layers.{i}.{n}": s for i in range(whole.config.num_hidden_layers) for n, s in layer.items()}
    parallelize_module(model, mesh["tp"], plan)
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh["dp"])
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)

    def run():
        with loss_parallel():
            logits = model(input_ids=own, use_cache=False).logits[:, :-1].flatten(0, 1)
            loss = F.cross_entropy(logits, own[:, 1:].flatten(), reduction="sum") / tokens
            loss.backward()
        return loss.full_tensor() if hasattr(loss, "full_tensor") else loss

    return model, run


def of_transformers(whole, directory, mesh, own, tokens):
    """transformers' native tensor parallelism and FSDP2."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    chosen = DistributedConfig(tp_size=mesh["tp"].size(), fsdp_size=mesh["dp"].size())
    model = AutoModelForCausalLM.from_pretrained(directory, distributed_config=chosen)
    dp = mesh["dp"].size()

    def run():
        loss = model(input_ids=own, labels=own, use_cache=False).loss
        loss.backward()
        return loss / dp

    return model.train(), run


def of_accelerate(whole, directory, mesh, own, tokens):
    """accelerate's FSDP2, which it has for accelerators only: on a CPU it would run DDP, and has to be told."""
    import copy

    import torch
    from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
    from torch.distributed.tensor import DTensor

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False,
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
    model = copy.deepcopy(whole)
    model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    if not all(isinstance(p, DTensor) for p in model.parameters()):
        raise RuntimeError("accelerate did not shard the model")
    dp = mesh["dp"].size()

    def run():
        loss = model(input_ids=own, labels=own, use_cache=False).loss
        accelerator.backward(loss)
        return loss / dp

    return model, run


if __name__ == "__main__":
    main()
