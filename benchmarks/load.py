"""Loading a directory of safetensors onto a mesh: meshpar beside what a user would pick instead.

    python -m benchmarks.load          # prints the table that `make bench` writes to benchmarks/RESULTS.md

The directory is written once and stays in the page cache. Each load runs in fresh processes, forked from one that has
imported everything; its time is that between two barriers, with the process group up before. A load's memory is the
process's own (anonymous) memory, sampled every `SAMPLED` seconds; pages of the mapped files, which the kernel can take
back, are told apart. Bytes read are what the safetensors library was asked for, counted around its `safe_open`.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path

MODEL = dict(
    hidden_size=2048,
    intermediate_size=5632,
    num_hidden_layers=8,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=32000,
    tie_word_embeddings=False,
)
MESHES = {"tp=2": {"tp": 2}, "tp=4": {"tp": 4}, "dp_shard=2": {"dp_shard": 2}}
ROUNDS = 2
SAMPLED = 0.002
TIMEOUT = 120
THEIRS = "transformers from_pretrained"
PRELOADED = ["meshpar.model", "transformers.models.llama.modeling_llama", "torch.distributed.checkpoint"]


def main() -> None:
    """Print the table."""
    print(table())


def table(rounds: int = ROUNDS) -> str:
    """The Markdown of all ways on all meshes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as directory:
        in_fresh_processes(context, write_model, [(directory,)])
        lines = [
            f"{_size(directory) / 1e9:.2f} GB of bfloat16 in {len(list(Path(directory).glob('*.safetensors')))} files "
            f"(Llama, {MODEL['num_hidden_layers']} layers, hidden {MODEL['hidden_size']}) to float32 parameters; "
            f"{rounds} rounds in turn; the slowest, or largest, rank. Memory is above that before the load: the "
            "process's own, and in brackets with the pages of the files that it maps.",
            "",
            "| mesh | way | time (s) | of from_pretrained's | processor time (s) | memory (MiB) | memory / shard | "
            "bytes read / shard |",
            "| --- | --- | --- | --- | --- | --- | --- | --- |",
        ]
        for mesh in MESHES:
            lines += _rows(mesh, _measure(context, mesh, directory, rounds))
        shard = Shard.of(directory, "tp", 2)
    goals = (
        "Goals: at most 0.7 of from_pretrained's time; memory at most 1.15 of the rank's float32 shard and its part of "
        f"the largest tensor, which here is {1.15 + shard.largest / shard.elements:.2f} of the shard; at most 1.02 of "
        "the shard's bytes in the files read."
    )
    return "\n".join([*lines, "", goals, ""])


def _size(directory: str) -> int:
    return sum(file.stat().st_size for file in Path(directory).glob("*.safetensors"))


def _measure(context: ForkServerContext, mesh: str, directory: str, rounds: int) -> dict[str, list[dict] | str]:
    """What each way took in each round, or why it does not run here."""
    results: dict[str, list[dict] | str] = {way: [] for way in WAYS}
    world = next(iter(MESHES[mesh].values()))
    for turn in range(rounds):
        for way, runs in results.items():
            if isinstance(runs, str):
                continue
            with tempfile.TemporaryDirectory() as meeting:
                calls = [(way, mesh, directory, f"{meeting}/store", rank) for rank in range(world)]
                try:
                    ranks = in_fresh_processes(context, run_worker, calls)
                except Exception as error:  # theirs may not run here; a table says so
                    if way == "meshpar":
                        raise
                    results[way] = f"{type(error).__name__}: {error}".splitlines()[0]
                    continue
            runs.append({key: max(rank[key] for rank in ranks) for key in ranks[0]})
            print(f"round {turn + 1}: {mesh}, {way}: {runs[-1]['seconds']:.2f} s", file=sys.stderr, flush=True)
    return results


def in_fresh_processes(context: ForkServerContext, work: Callable, calls: list[tuple]) -> list:
    """What ``work`` returns for each of ``calls``, one process each, all at once."""
    with context.Pool(len(calls)) as pool:
        results = pool.starmap_async(work, calls, chunksize=1).get(TIMEOUT)
        pool.close()
        pool.join()
        return results


def _rows(mesh: str, results: dict[str, list[dict] | str]) -> list[str]:
    def median(way: str, key: str) -> float:
        return statistics.median(run[key] for run in results[way])

    rows = []
    for way, runs in results.items():
        if isinstance(runs, str):
            rows.append(f"| {mesh} | {way} | {runs} | | | | | |")
            continue
        seconds, busy, own, mapped = (median(way, key) for key in ("seconds", "busy", "own", "with_mapped"))
        ratio = "" if isinstance(results[THEIRS], str) else f"{seconds / median(THEIRS, 'seconds'):.2f}"
        rows.append(
            f"| {mesh} | {way} | {seconds:.2f} | {ratio} | {busy:.2f} | {own / 2**20:.0f} ({mapped / 2**20:.0f}) | "
            f"{own / median(way, 'shard'):.2f} | {median(way, 'read_over_shard'):.3f} |"
        )
    return rows


def write_model(directory: str) -> None:
    """The model with random weights, as a Hugging Face directory of several files."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**MODEL), dtype=torch.bfloat16)
    model.save_pretrained(directory, max_shard_size="300MB")


def run_worker(way: str, mesh: str, directory: str, meeting: str, rank: int) -> dict[str, float]:
    """Load the directory as one rank of ``mesh``; what it took."""
    import torch
    import torch.distributed as dist
    from transformers.utils.logging import disable_progress_bar

    [(kind, world)] = MESHES[mesh].items()
    torch.set_num_threads(1)
    disable_progress_bar()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    shard = Shard.of(directory, kind, world)
    handed_out = count_reads()
    dist.barrier()
    with PeakMemory() as memory:
        start, busy = time.perf_counter(), time.process_time()
        tensors = WAYS[way](directory, kind, world)
        busy = time.process_time() - busy
        dist.barrier()
        seconds = time.perf_counter() - start
    read = sum(handed_out)
    check(tensors, directory, kind)
    dist.destroy_process_group()
    return {
        "seconds": seconds,
        "busy": busy,
        "own": memory.own,
        "with_mapped": memory.with_mapped,
        "shard": 4 * shard.elements,
        "read_over_shard": read / (2 * shard.elements),
    }


@dataclass
class Shard:
    """Elements of a rank's part of the model, and of the largest tensor's part."""

    elements: int
    largest: int

    @classmethod
    def of(cls, directory: str, kind: str, world: int) -> Shard:
        """That of each rank of a mesh: all divide evenly."""
        sizes = [
            shape.numel() // (1 if split_dim(name, kind) is None else world)
            for name, shape in stored_shapes(directory).items()
        ]
        return cls(sum(sizes), max(sizes))


def stored_shapes(directory: str) -> dict:
    """Name -> shape of what the files hold."""
    import torch

    from meshpar.weights_files import scan

    return {name: torch.Size(stored.shape) for name, stored in scan(Path(directory)).items()}


def split_dim(name: str, kind: str) -> int | None:
    """The dimension of a Llama's tensor that the mesh splits: by rows, by columns, or None."""
    if kind == "dp_shard":
        return 0
    if name.endswith("norm.weight"):
        return None
    return 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0


class PeakMemory:
    """Bytes that this process takes at most within the context above what it had before: own, and with mapped files."""

    def __enter__(self) -> PeakMemory:
        Path("/proc/self/clear_refs").write_text("5")  # the kernel's peak starts anew
        self._before, self._resident, self._done = self._own(), _status("VmRSS"), threading.Event()
        self.own = 0
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self.with_mapped = _status("VmHWM") - self._resident

    def _sample(self) -> None:
        while True:
            self.own = max(self.own, self._own() - self._before)
            if self._done.wait(SAMPLED):
                return

    def _own(self) -> int:
        with open("/proc/self/statm") as file:
            _, resident, shared, *_ = map(int, file.read().split())
        return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def count_reads() -> list[int]:
    """A list that gets the bytes of each part of a tensor that safetensors hands out from now on."""
    import safetensors
    import transformers.modeling_utils

    import meshpar.weights_in

    handed_out: list[int] = []
    safe_open = safetensors.safe_open

    class Slice:
        def __init__(self, real) -> None:
            self._real = real

        def __getattr__(self, name: str):
            return getattr(self._real, name)

        def __getitem__(self, index):
            part = self._real[index]
            handed_out.append(part.nbytes)
            return part

    class File:
        def __init__(self, *args, **kwargs) -> None:
            self._real = safe_open(*args, **kwargs)

        def __getattr__(self, name: str):
            return getattr(self._real, name)

        def __enter__(self):
            return self

        def __exit__(self, *args: object) -> None:
            self._real.__exit__(*args)

        def get_slice(self, name: str) -> Slice:
            return Slice(self._real.get_slice(name))

    for module in (safetensors, transformers.modeling_utils, meshpar.weights_in):
        module.safe_open = File
    return handed_out


def check(tensors: dict, directory: str, kind: str) -> None:
    """This rank's part of one tensor of each kind must be the file's."""
    import torch
    import torch.distributed as dist
    from safetensors import safe_open
    from torch.distributed.tensor import DTensor

    from meshpar.weights_files import scan

    stored = scan(Path(directory))
    last = f"model.layers.{MODEL['num_hidden_layers'] - 1}"
    for name in (f"{last}.mlp.down_proj.weight", f"{last}.self_attn.k_proj.weight", "model.norm.weight"):
        with safe_open(stored[name].file, framework="pt") as file:
            wanted, dim = file.get_slice(name)[:].float(), split_dim(name, kind)
        own = tensors[name].to_local() if isinstance(tensors[name], DTensor) else tensors[name]
        if not torch.equal(own, wanted if dim is None else wanted.chunk(dist.get_world_size(), dim)[dist.get_rank()]):
            raise RuntimeError(f"{name} is not what the file holds")


def by_meshpar(directory: str, kind: str, world: int) -> dict:
    """`parallelize_model`."""
    import meshpar

    config = meshpar.ParallelConfig(**{"dp_shard": 1, kind: world}, param_dtype="float32")
    return dict(meshpar.parallelize_model(directory, config).named_parameters())


def by_transformers(directory: str, kind: str, world: int) -> dict:
    """`from_pretrained` with transformers' native tensor parallelism, or FSDP2."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    chosen = DistributedConfig(**{"fsdp_size" if kind == "dp_shard" else "tp_size": world})
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, distributed_config=chosen)
    return dict(model.named_parameters())


def by_dcp(directory: str, kind: str, world: int) -> dict:
    """torch's distributed checkpoint with its Hugging Face reader: no model, only DTensors to fill."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, empty

    mesh = init_device_mesh("cpu", (world,))
    tensors = {}
    for name, shape in stored_shapes(directory).items():
        dim = split_dim(name, kind)
        tensors[name] = empty(
            shape, dtype=torch.float32, device_mesh=mesh, placements=[Replicate() if dim is None else Shard(dim)]
        )
    dcp.load(tensors, storage_reader=dcp.HuggingFaceStorageReader(directory))
    return tensors


WAYS: dict[str, Callable[[str, str, int], dict]] = {
    "meshpar": by_meshpar,
    THEIRS: by_transformers,
    "torch DCP, the load alone": by_dcp,
}


if __name__ == "__main__":
    main()
