"""A plain PyTorch training loop around `meshpar.parallelize_model`: copy it and make it yours.

On four processes, a random model, and this file's own text as the data:

    torchrun --standalone --nproc-per-node 4 docs/train_loop.py --pp 2 --tp 2
    torchrun --standalone --nproc-per-node 4 docs/train_loop.py --tp 2

The second has dp=2: what `--pp` and `--tp` leave of the processes becomes data parallelism. With a model and text of
your own, on the GPUs of one machine:

    torchrun --standalone --nproc-per-node 8 docs/train_loop.py --model path/or/hub-id --text book.txt --pp 2 --tp 2 \\
        --seq-len 2048 --batch-size 32 --lr 1e-5 --steps 200

The losses are the same on every mesh, up to rounding.
"""

import argparse
import math
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoTokenizer, LlamaConfig

import meshpar


def main() -> None:
    args = parse_arguments()
    device = meshpar.init_distributed()  # nccl with CUDA, else gloo
    config = meshpar.ParallelConfig(
        pp=args.pp,
        dp_replicate=args.dp_replicate,
        dp_shard=-1,  # whatever is left of the world size
        tp=args.tp,
        schedule=args.schedule,
        virtual_stages=args.virtual_stages,
        compute_dtype="bfloat16" if device.type == "cuda" else "float32",
    )
    # A path or hub id reads weights, a config draws random ones; the seed and the names decide them, not the mesh.
    model = meshpar.parallelize_model(args.model or tiny_config(args.seq_len), config, seed=args.seed)

    # Ranks of one pp or tp group see the same rows, so only the data-parallel coordinate cuts the data.
    dp = model.mesh["dp"]
    if args.batch_size % dp.size():
        raise SystemExit(f"--batch-size {args.batch_size} does not divide over dp={dp.size()}")
    rows = make_rows(args)
    held_out, rows = rows[: args.batch_size], rows[args.batch_size :]
    if len(rows) < args.batch_size:
        raise SystemExit(f"the text makes {len(rows)} rows after --batch-size {args.batch_size} are held out: too few")
    sampler = DistributedSampler(rows, dp.size(), dp.get_local_rank(), seed=args.seed, drop_last=True)
    loader = DataLoader(rows, args.batch_size // dp.size(), sampler=sampler, collate_fn=make_batch, drop_last=True)
    eval_batch = make_batch(held_out.chunk(dp.size())[dp.get_local_rank()])

    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1, betas=(0.9, 0.95))
    schedule = LambdaLR(optimizer, lambda step: lr_factor(step, args.warmup_steps, args.steps))

    report(f"step 0/{args.steps}  eval loss {model.eval_loss(eval_batch):.4f}")
    for step, batch in enumerate(islice(epochs(loader, sampler), args.steps), 1):
        # Forward and backward of the global batch, on any mesh. At pp=1 `model(**batch).loss.backward()` does the same.
        loss = model.forward_backward(batch)
        grad_norm = model.clip_grad_norm_(args.max_grad_norm)
        lr = schedule.get_last_lr()[0]
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        report(f"step {step}/{args.steps}  loss {loss:.4f}  grad norm {grad_norm:.3f}  lr {lr:.1e}")
        if step % args.eval_every == 0 or step == args.steps:
            report(f"step {step}/{args.steps}  eval loss {model.eval_loss(eval_batch):.4f}")

    model.save_pretrained(args.output)  # opens with AutoModelForCausalLM.from_pretrained
    report(f"saved {args.output}")
    dist.destroy_process_group()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a causal language model on a pp x dp x tp mesh.")
    parser.add_argument("--model", help="a Hugging Face directory or hub id; a tiny random Llama unless given")
    parser.add_argument("--text", type=Path, default=Path(__file__), help="a text file to train on")
    parser.add_argument("--output", default="out/train_loop", help="directory for the trained model")
    parser.add_argument("--pp", type=int, default=1, help="pipeline ranks")
    parser.add_argument("--dp-replicate", type=int, default=1, help="whole copies of the parameters (HSDP)")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--schedule", default="1F1B", help="a pipeline schedule of torch, where pp > 1")
    parser.add_argument("--virtual-stages", type=int, default=1, help="stages a rank, for interleaved schedules")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=8, help="rows a step, over all ranks")
    parser.add_argument("--seq-len", type=int, default=64, help="tokens a row")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--warmup-steps", type=int, default=2)
    parser.add_argument("--max-grad-norm", type=float, default=1.0)
    parser.add_argument("--eval-every", type=int, default=10, help="steps between evaluations")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def tiny_config(seq_len: int) -> LlamaConfig:
    """A Llama small enough for a laptop; its tokens are bytes."""
    return LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=seq_len,
        bos_token_id=None,
        eos_token_id=None,
    )


def make_rows(args: argparse.Namespace) -> Tensor:
    """The text as rows of tokens [rows, seq]; a last row that is not full is dropped."""
    text = args.text.read_text(encoding="utf-8")
    ids = AutoTokenizer.from_pretrained(args.model)(text)["input_ids"] if args.model else list(text.encode())
    whole = len(ids) // args.seq_len
    return torch.tensor(ids[: whole * args.seq_len]).view(whole, args.seq_len)


def make_batch(rows: list[Tensor] | Tensor) -> dict[str, Tensor]:
    """Rows as Hugging Face names them: labels are unshifted, and -100 would mark tokens that do not count."""
    ids = torch.stack(tuple(rows))
    return {"input_ids": ids, "labels": ids.clone()}


def epochs(loader: DataLoader, sampler: DistributedSampler) -> Iterator[dict[str, Tensor]]:
    """Batches without end, in another order every epoch."""
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def lr_factor(step: int, warmup_steps: int, steps: int) -> float:
    """A linear warmup, then a cosine down to a tenth."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    done = (step - warmup_steps) / max(1, steps - warmup_steps)
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done))


def report(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


if __name__ == "__main__":
    main()
