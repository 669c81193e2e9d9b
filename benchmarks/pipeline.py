"""Pipeline schedules: the step time of meshpar's pipeline beside the schedule's own bound, and its bubble beside the
planner's.

    python -m benchmarks.pipeline      # prints the table that `make bench` writes to benchmarks/RESULTS.md

Every decoder layer is a stage, and sleeps instead of computing, so that ranks may outnumber cores. The bound replays
the schedule's actions with the same times and free communication; what a step takes beyond it is meshpar's, torch's
runtime's and gloo's. All models of a pipeline live in the same processes and step in turn.

The planner's bubble replays the same actions with what they took (a sleep is longer where the machine is busy) and what
a send took, so that it tells whether the replay is right, not whether the machine is quiet.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .processes import under_torchrun

if TYPE_CHECKING:
    from meshpar.planner.simulate import Span, Timeline

SECONDS = {"F": 0.06, "I": 0.06, "W": 0.06}  # forward, input gradients and weight gradients of one stage
PIPELINES = (2, 4)
MICROBATCHES = (8, 16)
ROUNDS = 2
SEQ_LEN, VOCABULARY = 16, 64


def main() -> None:
    """Run every pipeline in fresh processes, or, inside a worker, one of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        run_worker(args.worker)
    else:
        print(table())


def table() -> str:
    """The Markdown of all schedules."""
    times = ", ".join(f"{kind} {seconds * 1e3:.0f}" for kind, seconds in SECONDS.items())
    lines = [
        f"Stages that sleep (ms: {times}): forward (F), input gradients (I) and weight gradients (W) of a microbatch; "
        f"a whole backward takes I and W. Median of {ROUNDS} steps of `forward_backward`. The bound replays the "
        "schedule's actions with these times and free communication. Bubble: the part of a step that ranks wait, in "
        "the fastest step; simulated with the mean times of its actions and the median time of a send.",
        "",
        "| schedule | pp | stages a rank | microbatches | bound (ms) | measured (ms) | measured / bound "
        "| bubble, simulated | bubble, measured |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for pp in PIPELINES:
        for row in under_torchrun("benchmarks.pipeline", pp, "--worker", str(pp)):
            bound, measured = row["bound"], statistics.median(row["seconds"])
            lines.append(
                f"| {row['schedule']} | {pp} | {row['virtual']} | {row['microbatches']} | {bound * 1e3:.0f} | "
                f"{measured * 1e3:.0f} | {measured / bound:.3f} | {row['simulated']:.3f} | {row['bubble']:.3f} |"
            )
    return "\n".join([*lines, "", "Goals: at most 1.10 of the bound; both bubbles within 0.05.", ""])


class Sleeps:
    """What a stage does instead of computing: sleep, and count."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(SECONDS, 0.0)
        self.counts: Counter[str] = Counter()

    def __call__(self, kind: str) -> None:
        self.counts[kind] += 1
        time.sleep(self.seconds[kind])


class SleepingInput(torch.autograd.Function):
    """Returns its input; sleeps in the forward and where the input's gradient is computed."""

    @staticmethod
    def forward(ctx, hidden: Tensor, sleeps: Sleeps) -> Tensor:
        ctx.sleeps = sleeps
        sleeps("F")
        return hidden.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        ctx.sleeps("I")
        return grad, None


class SleepingWeight(torch.autograd.Function):
    """Zeros for a weight; sleeps where the weight's gradient is computed, which no input's gradient needs."""

    @staticmethod
    def forward(ctx, weight: Tensor, sleeps: Sleeps) -> Tensor:
        ctx.sleeps = sleeps
        return torch.zeros_like(weight)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        ctx.sleeps("W")
        return torch.zeros_like(grad), None


def put_to_sleep(layer: nn.Module, sleeps: Sleeps) -> None:
    """Have a decoder layer sleep instead of computing; one of its weights gets gradients, which are zeros."""

    def forward(hidden: Tensor, *args, **kwargs) -> Tensor:
        return SleepingInput.apply(hidden, sleeps) + SleepingWeight.apply(layer.input_layernorm.weight, sleeps)

    layer.forward = forward


def run_worker(pp: int) -> None:
    """Build the model once a schedule and number of microbatches, step all in turn, print seconds on rank 0."""
    import torch.distributed as dist

    from meshpar.config import ParallelConfig
    from meshpar.schedules import SCHEDULES

    dist.init_process_group("gloo")
    contenders = []
    for name, schedule in SCHEDULES.items():
        for microbatches in MICROBATCHES:
            config = ParallelConfig(
                pp=pp,
                schedule=name,
                virtual_stages=schedule.least_virtual,
                microbatches=microbatches,
                compute_dtype="float32",
            )
            contenders.append(Contender(config))
    for _ in range(ROUNDS):
        for contender in contenders:
            dist.barrier()
            contender.step()
    reports = [contender.report() for contender in contenders]
    if dist.get_rank() == 0:
        print(json.dumps(reports), flush=True)
    dist.destroy_process_group()


class Contender:
    """A model of sleeping layers, one a stage, on one schedule."""

    def __init__(self, config) -> None:
        from transformers import LlamaConfig

        import meshpar

        llama = LlamaConfig(
            hidden_size=32,
            num_hidden_layers=config.num_stages,
            num_attention_heads=4,
            intermediate_size=64,
            vocab_size=VOCABULARY,
            tie_word_embeddings=False,
        )
        self.config, self.sleeps, self.seconds = config, Sleeps(), []
        self.spans: list[list[Span]] = []  # of this rank, in each step
        self.model = meshpar.parallelize_model(llama, config)
        for layer in self.model._runner.own_layers():
            put_to_sleep(layer, self.sleeps)
        ids = torch.randint(0, VOCABULARY, (config.microbatches, SEQ_LEN), generator=torch.Generator().manual_seed(1))
        self.batch = {"input_ids": ids, "labels": ids}
        self.model.forward_backward(self.batch)  # without sleep: makes the schedule and its connections
        self.sleeps.seconds = SECONDS

    def step(self) -> None:
        """One timed step, in which every stage of this rank slept once a microbatch and kind."""
        from meshpar.actions import recording

        self.sleeps.counts.clear()
        with recording(torch.device("cpu")) as recorder:
            start = time.perf_counter()
            self.model.forward_backward(self.batch)
            self.seconds.append(time.perf_counter() - start)
        self.spans.append(recorder.spans())
        each = self.config.virtual_stages * self.config.microbatches
        if self.sleeps.counts != dict.fromkeys(SECONDS, each):
            raise RuntimeError(f"{self.config.schedule} slept {dict(self.sleeps.counts)} times, not {each} each")

    def report(self) -> dict:
        """The row of the table, of all ranks."""
        from meshpar.planner.orders import schedule_order
        from meshpar.planner.simulate import simulate

        config, times = self.config, SECONDS | {"B": SECONDS["I"] + SECONDS["W"]}
        order = schedule_order(config, config.microbatches)
        bound = simulate(order, lambda stage, kind: times[kind]).makespan
        measured = min(self._timelines(), key=lambda timeline: timeline.makespan)
        for spans, planned in zip(measured.ranks, order, strict=True):
            if [span.action for span in spans] != [*itertools.chain(*planned)]:
                raise RuntimeError(f"{config.schedule} ran other actions than the planner has")
        costs, latency = mean_costs(measured.ranks), send_seconds(measured.ranks)
        simulated = simulate(order, lambda stage, kind: costs[stage, kind], latency)
        return {
            "simulated": idle_part(simulated),
            "bubble": idle_part(measured),
            "schedule": config.schedule,
            "virtual": config.virtual_stages,
            "microbatches": config.microbatches,
            "bound": bound,
            "seconds": self.seconds,
        }

    def _timelines(self) -> list[Timeline]:
        """Each step's, from its first action; ranks of one machine share a clock."""
        import torch.distributed as dist

        from meshpar.planner.simulate import Span, Timeline

        everyone: list = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, self.spans)
        found = []
        for ranks in zip(*everyone, strict=True):
            zero = min(spans[0].start for spans in ranks)
            found.append(Timeline([[Span(action, a - zero, b - zero) for action, a, b in spans] for spans in ranks]))
        return found


def idle_part(timeline: Timeline) -> float:
    """Of all ranks' time."""
    return timeline.bubble / (1 + timeline.bubble)


def mean_costs(ranks: Sequence[Sequence[Span]]) -> dict[tuple[int, str], float]:
    """Seconds of each stage's actions by kind, as they took."""
    taken: dict[tuple[int, str], list[float]] = {}
    for action, start, finish in itertools.chain(*ranks):
        taken.setdefault((action.stage, action.kind), []).append(finish - start)
    return {key: statistics.mean(seconds) for key, seconds in taken.items()}


def send_seconds(ranks: Sequence[Sequence[Span]]) -> float:
    """From the end of what a rank waited for on another to the start of what waited; the median."""
    finished = {(a.kind.replace("B", "I"), *a[1:]): finish for a, _, finish in itertools.chain(*ranks)}
    gaps = []
    for spans in ranks:
        for before, (action, start, _) in itertools.pairwise(spans):
            step = {"F": -1, "B": 1, "I": 1}.get(action.kind, 0)
            sent = finished.get(("F" if step < 0 else "I", action.stage + step, action.microbatch), 0.0)
            gaps += [start - sent] if step and sent > before.finish else []
    return statistics.median(gaps)


if __name__ == "__main__":
    main()
