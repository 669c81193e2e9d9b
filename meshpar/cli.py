"""The command line. Each command is one function; torch is imported inside those that need it."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from . import failure, progress
from .config import ConfigError, ParallelConfig
from .failure import BAD_USAGE, FAILED, exit_status, one_message, place, print_error
from .recipe import Recipe, find_recipe, load_recipe, shipped_recipes

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0 success, 1 a failed run or check, 2 bad usage or a bad recipe."""
    args = _parse(argv)
    try:
        return int(args.run(args))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception as error:
        print_error(error, "" if isinstance(error, ConfigError) else "error: ")
        return exit_status(error)


def train(args: argparse.Namespace) -> int:
    """Train from a recipe: as a worker under torchrun, else by starting the workers."""

    def run(recipe: Recipe) -> int:
        import torch

        from . import watch
        from .mesh import init_distributed
        from .train.loop import run as run_training

        timeout = recipe.distributed.timeout_seconds
        # nccl's own watchdog aborts its process at the timeout: the watch, which says why, comes first.
        init_distributed(timeout=timeout + (60 if torch.cuda.is_available() else 0))
        watcher = watch.begin(recipe.parallel_config(int(os.environ["WORLD_SIZE"])), timeout)
        run_training(recipe)
        watcher.close()
        return 0

    return _work(args, run) if _is_worker() else _start_workers(args)


def verify(args: argparse.Namespace) -> int:
    """Compare the recipe's mesh with one process, like `train` inside torchrun or outside."""

    def run(recipe: Recipe) -> int:
        from .parity import run_recipe

        return 0 if run_recipe(recipe) else FAILED

    return _work(args, run) if _is_worker() else _start_workers(args)


def show(args: argparse.Namespace) -> int:
    """Print the resolved plan of a model; no weights are loaded."""
    names = ("pp", "dp_replicate", "dp_shard", "tp", "sequence_parallel", "schedule", "virtual_stages", "stage_layers")
    config = ParallelConfig(**{name: getattr(args, name) for name in names})
    from .show import show as show_plan

    try:
        print(show_plan(args.model, config, args.trust_remote_code))
    except ValueError as error:  # a model that cannot be read, or not be laid out so, is bad usage
        raise ConfigError(str(error)) from error
    return 0


def families(args: argparse.Namespace) -> int:
    """Print what is supported of every causal model type of transformers."""
    from .families import as_text, read_families

    table = read_families()
    unknown = [name for name in args.types if name not in table]
    if unknown:
        raise ConfigError(f"{unknown[0]} is no causal model type of transformers that meshpar knows.")
    print(as_text({name: family for name, family in table.items() if not args.types or name in args.types}))
    return 0


def plan(args: argparse.Namespace) -> int:
    """Forecast memory, communication, bubble and time of a mesh, or search for the fastest one; nothing is run."""
    from .planner.command import run

    return run(args)


def export(args: argparse.Namespace) -> int:
    """Write a training checkpoint as a Hugging Face directory."""
    from .checkpoint import export as export_checkpoint
    from .checkpoint_files import CheckpointError

    try:
        export_checkpoint(args.checkpoint, args.out_dir, trust_remote_code=args.trust_remote_code)
    except CheckpointError as problem:
        raise ConfigError(f"{problem}.") from None
    return 0


def list_recipes(args: argparse.Namespace) -> int:
    """Print each shipped recipe's name and the first line of its header."""
    recipes = shipped_recipes()
    width = max(map(len, recipes))
    for name, file in recipes.items():
        print(f"{name:{width}}  {file.read_text(encoding='utf-8').splitlines()[0].lstrip('# ')}")
    return 0


def cat_recipe(args: argparse.Namespace) -> int:
    """Print a recipe."""
    print(find_recipe(args.name).read_text(encoding="utf-8"), end="")
    return 0


def copy_recipe(args: argparse.Namespace) -> int:
    """Copy a recipe to a file that does not exist yet."""
    text = find_recipe(args.name).read_text(encoding="utf-8")
    try:
        with open(args.file, "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{args.file} exists already; give a new file name.") from None
    except OSError as error:
        raise ConfigError(f"{args.file} cannot be written: {error.strerror}.") from None
    return 0


def launch(processes: int, arguments: Sequence[str]) -> int:
    """Start `python -m meshpar ARGUMENTS` in this many processes of this machine through torchrun.

    Returns the exit status. torchrun's log lines and failure summary are kept back: the rank that failed has said why.

    Raises:
        ConfigError: when this machine has fewer GPUs than that.
    """
    import torch
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    _check_devices(processes, torch.cuda.device_count() if torch.cuda.is_available() else None)
    if processes > 1:
        # One thread a process, as torchrun would set with a warning; processes share the cores.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    _quiet_torchrun()
    options = ["--standalone", f"--nproc-per-node={processes}", "--signals-to-handle=SIGHUP,SIGQUIT"]
    with tempfile.TemporaryDirectory(prefix="meshpar_") as logs:
        try:
            with _signals_passed_on():
                torchrun.run(torchrun.parse_args([*options, "--log-dir", logs, "-m", "meshpar", *arguments]))
        except ChildFailedError as error:
            # A failure names its error file only where its own rank has written one.
            return _status_of_workers(error, attempt=next(Path(logs).glob("*/attempt_*")))
        except SignalException as error:
            return 128 + int(error.sigval)
    return 0


@contextmanager
def _signals_passed_on() -> Iterator[None]:
    """SIGINT and SIGTERM are for the workers, which save and end; torchrun would kill them after half a minute."""
    import psutil

    def pass_on(number: int, frame: FrameType | None) -> None:
        workers = psutil.Process().children()
        if not workers:
            raise SystemExit(128 + number)
        for worker in workers:
            worker.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_worker() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def _start_workers(args: argparse.Namespace) -> int:
    recipe = load_recipe(args.recipe, args.overrides)
    processes = recipe.world_size()
    recipe.check(processes)
    return launch(processes, [args.command, args.recipe, *args.overrides])


def _work(args: argparse.Namespace, run: Callable[[Recipe], int]) -> int:
    # Python's handler waits for a collective to return, which may be never; the default one ends the process.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with one_message(rank):
        recipe = load_recipe(args.recipe, args.overrides)
        recipe.check(world_size)
    with one_message(rank, place(rank, recipe.parallel_config(world_size)), recipe.output_dir):
        # On an error the schedule logs itself in full on every rank; the traceback file has what matters of it.
        logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)
        return run(recipe)


def _check_devices(processes: int, gpus: int | None) -> None:
    if gpus is None or processes <= gpus:
        return
    nodes = -(-processes // gpus)
    command = f"torchrun --nnodes {nodes} --nproc-per-node {gpus} --rdzv-backend c10d --rdzv-endpoint HOST:29500"
    raise ConfigError(
        f"parallel asks for {processes} processes and this machine has {gpus} GPUs; run this on each of {nodes} such "
        f"machines: {command} -m meshpar ..."
    )


def _quiet_torchrun() -> None:
    # torchrun gives each of its loggers a level of its own, so the parent's does not count.
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed.elastic", "torch.distributed.launcher", "torch.distributed.run")):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _status_of_workers(error: ChildFailedError, attempt: Path) -> int:
    # Failures come in the order they were seen; after the first, torchrun ends the others with SIGTERM.
    failures = {rank: f for rank, f in error.failures.items() if f.exitcode != -signal.SIGTERM} or error.failures
    rank, first = next(iter(failures.items()))
    status = failure.reported(attempt)
    if status is not None:
        return status
    if first.exitcode in (-signal.SIGINT, -signal.SIGTERM):
        print(f"meshpar: {first.signal_name()} ended the run before it began", file=sys.stderr)
        return 128 - first.exitcode
    if first.exitcode not in (FAILED, BAD_USAGE):
        how = f"was ended by {first.signal_name()}" if first.exitcode < 0 else f"exited with status {first.exitcode}"
        reason = "; the machine may have run out of memory" if first.exitcode == -signal.SIGKILL else ""
        where = progress.position_of(first.local_rank, attempt)
        about = failure.subject(rank, "", socket.gethostname(), str(where or ""))
        print(f"meshpar: {about}: the process {how}{reason}", file=sys.stderr)
    return BAD_USAGE if first.exitcode == BAD_USAGE else FAILED


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """argparse takes positional arguments from one place only, but overrides may stand behind options, too."""
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    if rest:
        if not hasattr(args, "overrides") or any(argument.startswith("-") for argument in rest):
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        args.overrides = [*args.overrides, *rest]
    return args


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="meshpar", description="Train a Hugging Face model on a pp x dp x tp mesh.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, run in (("train", train), ("verify", verify)):
        job = _command(commands, name, run)
        job.add_argument("recipe", metavar="RECIPE", help="a YAML file, or the name of a shipped recipe")
        job.add_argument("overrides", metavar="key=value", nargs="*", help="e.g. parallel.tp=2 optim.lr=1e-5")
    _add_show(_command(commands, "show", show))
    _add_plan(_command(commands, "plan", plan))
    _command(commands, "families", families).add_argument(
        "types", metavar="TYPE", nargs="*", help="model types, e.g. llama; all of them unless given"
    )
    _add_recipes(_command(commands, "recipes", list_recipes))
    exporter = _command(commands, "export", export)
    exporter.add_argument("checkpoint", metavar="CHECKPOINT", type=Path, help="output_dir/checkpoints/step-N")
    exporter.add_argument("out_dir", metavar="OUT_DIR", type=Path)
    _add_trust(exporter)
    return parser


def _command(commands: Any, name: str, run: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
    text = (run.__doc__ or "").splitlines()[0]
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    parser.set_defaults(run=run)
    return parser


def _add_show(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a directory or a hub id")
    for option, default in (("pp", 1), ("dp-replicate", 1), ("dp-shard", 1), ("tp", 2), ("virtual-stages", 1)):
        parser.add_argument(f"--{option}", type=int, default=default, metavar="N", help=f"default {default}")
    parser.add_argument("--sequence-parallel", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--schedule", default="1F1B", metavar="NAME")
    _add_trust(parser)
    parser.add_argument("--stage-layers", type=int, nargs="+", metavar="N", help="decoder layers of each stage")


def _add_trust(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code that comes with the model")


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("subject", metavar="RECIPE_OR_MODEL", help="a recipe's file or name, a directory or a hub id")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="of the recipe, e.g. data.seq_len=4096")
    parser.add_argument("--world-size", type=int, required=True, metavar="N", help="how many devices there are")
    parser.add_argument("--device", metavar="NAME", help="e.g. h100-80gb; with --calibrate, the one of this machine")
    parser.add_argument("--gpus-per-node", type=int, default=8, metavar="N", help="default 8")
    parser.add_argument("--across", metavar="LINK", help="what joins nodes; default infiniband-ndr")
    parser.add_argument("--search", action="store_true", help="rank every legal setting; what is given below is fixed")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write a recipe with the mesh, or the best one")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it: a .html or .png file")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="a trace.json, drawn beside the forecast")
    parser.add_argument("--calibrate", action="store_true", help="measure this machine, in place of data sheets")
    for option in ("pp", "dp-replicate", "dp-shard", "tp", "virtual-stages", "micro-size", "seq-len", "global-size"):
        parser.add_argument(f"--{option}", type=int, metavar="N")
    parser.add_argument("--schedule", metavar="NAME")
    parser.add_argument("--activation-checkpoint", metavar="MODE")


def _add_recipes(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(metavar="ACTION")
    copy = _command(actions, "cp", copy_recipe)
    copy.add_argument("name", metavar="NAME")
    copy.add_argument("file", metavar="FILE")
    _command(actions, "cat", cat_recipe).add_argument("name", metavar="NAME")
