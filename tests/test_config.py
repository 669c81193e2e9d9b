"""ParallelConfig: what is legal, what is refused, and with which words."""

import accelerate
import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    generate_stage_to_rank_mapping,
    get_schedule_class,
)
from transformers import GPT2Config, LlamaConfig

from meshpar.config import (
    ConfigError,
    ParallelConfig,
    check_model,
    check_torch_version,
    torch_dtype,
)
from meshpar.schedules import SCHEDULES, accepts_microbatches, choose_microbatches


def llama(heads=4, kv_heads=2, layers=4):
    return LlamaConfig(
        vocab_size=64,
        hidden_size=8 * heads,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
    )


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"pp": 0}, ["pp=0", "at least 1"]),
        ({"tp": True}, ["tp=True", "whole number"]),
        ({"dp_shard": 2.0}, ["dp_shard=2.0", "whole number"]),
        ({"dp_replicate": -2}, ["dp_replicate=-2"]),
        ({"tp": -1, "dp_shard": -1}, ["dp_shard=-1", "tp=-1", "cannot both"]),
        ({"schedule": "1F1C"}, ["schedule='1F1C'", "1F1B", "ZBVZeroBubble"]),
        ({"schedule": "PipelineScheduleMulti"}, ["schedule='PipelineScheduleMulti'"]),
        ({"sequence_parallel": 1}, ["sequence_parallel=1", "True or False"]),
        ({"reshard_after_forward": 1}, ["reshard_after_forward=1", "True, False or None"]),
        ({"reshard_after_forward": "no"}, ["reshard_after_forward='no'", "True, False or None"]),
        (
            {"pp": 2, "reshard_after_forward": True, "schedule": "ZBVZeroBubble", "virtual_stages": 2},
            ["reshard_after_forward=True", "ZBVZeroBubble", "1F1B"],
        ),
        ({"async_tp": True}, ["async_tp=True", "compile=True"]),
        ({"async_tp": True, "compile": True, "sequence_parallel": False}, ["async_tp=True", "sequence_parallel=True"]),
        ({"compile": 1}, ["compile=1", "True or False"]),
        ({"activation_checkpoint": "always"}, ["activation_checkpoint='always'", "selective"]),
        ({"param_dtype": "fp32"}, ["param_dtype='fp32'", "float32"]),
        ({"compute_dtype": "float16"}, ["compute_dtype='float16'", "loss scaling", "bfloat16"]),
        ({"microbatches": 0}, ["microbatches=0"]),
        ({"virtual_stages": 0}, ["virtual_stages=0"]),
        ({"pp": 2, "virtual_stages": 2}, ["virtual_stages=2", "schedule=1F1B", "virtual_stages=1"]),
        ({"pp": 2, "schedule": "Interleaved1F1B"}, ["virtual_stages=1", "virtual_stages=2 or more"]),
        ({"pp": 2, "schedule": "ZBVZeroBubble", "virtual_stages": 3}, ["virtual_stages=3", "set virtual_stages=2."]),
        ({"pp": 2, "stage_layers": [7, 0]}, ["stage_layers=[7, 0]", "at least 1"]),
        ({"pp": 2, "stage_layers": [7]}, ["stage_layers=[7]", "pp=2 x virtual_stages=1", "2 stages"]),
    ],
)
def test_refused_setting_is_named_with_what_works(settings, words):
    with pytest.raises(ValueError) as refused:  # noqa: PT011  (the words are checked below)
        ParallelConfig(**settings)
    assert str(refused.value).startswith(words[0].split()[0])
    assert all(word in str(refused.value) for word in words), str(refused.value)


def test_schedule_without_pipeline_does_not_matter():
    config = ParallelConfig(pp=1, dp_shard=1, schedule="Interleaved1F1B", microbatches=1)
    assert (config.num_stages, config.world_size) == (1, 1)


def test_schedule_names_ignore_case_as_in_torch():
    assert ParallelConfig(schedule="zbvzerobubble").schedule == "ZBVZeroBubble"


def test_dtypes_may_be_torch_dtypes():
    config = ParallelConfig(compute_dtype=torch.bfloat16)
    assert config.compute_dtype == "bfloat16"
    assert torch_dtype(config.compute_dtype) is torch.bfloat16


def test_config_is_hashable_whatever_sequence_stage_layers_is():
    assert len({ParallelConfig(pp=2, stage_layers=[7, 9]), ParallelConfig(pp=2, stage_layers=(7, 9))}) == 1


@pytest.mark.parametrize("name", ["pp", "dp_replicate", "dp_shard", "tp"])
def test_any_one_size_takes_what_is_left_of_the_world(name):
    sizes = {"pp": 1, "dp_replicate": 1, "dp_shard": 3, "tp": 1} | {name: -1}
    config = ParallelConfig(**sizes).resolve(12)
    assert config.world_size == 12
    assert getattr(config, name) == (12 if name == "dp_shard" else 4)


def test_dp_is_replicate_times_shard():
    assert ParallelConfig(dp_replicate=2, tp=2).resolve(16).dp == 8


def test_sizes_that_are_not_known_yet_are_refused_by_name():
    with pytest.raises(ConfigError, match=r"dp_shard=-1 .*resolve"):
        _ = ParallelConfig().world_size


def test_mesh_that_does_not_fill_the_world_names_the_nearest_sizes():
    with pytest.raises(ConfigError) as refused:
        ParallelConfig(pp=2, dp_shard=1, tp=3).resolve(8)
    assert "makes 6 processes, but world_size=8" in str(refused.value)
    assert "set tp=4" in str(refused.value)


def test_mesh_that_does_not_divide_the_world_names_the_nearest_sizes():
    with pytest.raises(ConfigError) as refused:
        ParallelConfig(pp=2, tp=3).resolve(8)
    for words in ("does not divide world_size=8", "start 6 or 12 processes", "set tp=2 or 4"):
        assert words in str(refused.value)


@pytest.mark.parametrize("world_size", [0, -1, True, 2.0])
def test_world_size_must_be_a_count(world_size):
    with pytest.raises(ConfigError, match="world_size="):
        ParallelConfig().resolve(world_size)


def test_accelerate_config_gives_the_same_mesh():
    config = ParallelConfig.from_accelerate(
        accelerate.ParallelismConfig(dp_replicate_size=2, dp_shard_size=4, tp_size=2)
    )
    assert (config.pp, config.dp_replicate, config.dp_shard, config.tp) == (1, 2, 4, 2)


@pytest.mark.parametrize("name", ["cp_size", "sp_size"])
def test_accelerate_config_with_other_parallelism_is_refused_by_name(name):
    with pytest.raises(ConfigError, match=f"{name}=2 is not supported"):
        ParallelConfig.from_accelerate(accelerate.ParallelismConfig(**{name: 2}))


@pytest.mark.parametrize("version", ["2.11.0", "2.12.1+cu128"])
def test_pipeline_on_older_torch_is_refused(version):
    with pytest.raises(ConfigError, match=f"pp=2 needs torch >= 2.13, and torch {version.replace('+', '.')}"):
        check_torch_version(ParallelConfig(pp=2), version)
    check_torch_version(ParallelConfig(pp=1), version)


@pytest.mark.parametrize("version", ["2.13.0", "2.13.0a0+gitabc", "2.14.1+cpu", "3.0"])
def test_pipeline_on_torch_2_13_and_later_runs(version):
    check_torch_version(ParallelConfig(pp=2), version)


@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (4, 2), (12, 4), (28, 4), (8, 1)])
def test_any_tp_up_to_the_number_of_heads_works(heads, kv_heads):
    for tp in range(1, heads + 1):
        check_model(ParallelConfig(tp=tp, dp_shard=1), llama(heads, kv_heads))
    with pytest.raises(ConfigError, match=rf"tp={heads + 1} .*num_attention_heads={heads}; tp from 1 to {heads}"):
        check_model(ParallelConfig(tp=heads + 1, dp_shard=1), llama(heads, kv_heads))


def test_model_without_kv_heads_counts_its_heads():
    with pytest.raises(ConfigError, match=r"tp=13 .*num_attention_heads=12; tp from 1 to 12"):
        check_model(ParallelConfig(tp=13, dp_shard=1), GPT2Config())


def test_more_stages_than_layers_are_refused():
    with pytest.raises(ConfigError, match=r"pp=4 x virtual_stages=1 makes 4 stages.*num_hidden_layers=3.*pp=3"):
        check_model(ParallelConfig(pp=4, dp_shard=1), llama(layers=3))


def test_thirty_layers_on_four_stages_are_fine():
    check_model(ParallelConfig(pp=4, dp_shard=1), llama(layers=30))


def test_stage_layers_must_add_up_to_the_model():
    with pytest.raises(ConfigError, match=r"stage_layers=\[7, 9\] adds up to 16.*num_hidden_layers=30; \[15, 15\]"):
        check_model(ParallelConfig(pp=2, dp_shard=1, stage_layers=[7, 9]), llama(layers=30))


@pytest.mark.parametrize(("pp", "microbatches", "working"), [(2, 1, "2"), (4, 2, "4")])
def test_fewer_microbatches_than_stages_are_refused_for_1f1b(pp, microbatches, working):
    """T11A: torch's own schedule raises or hangs."""
    with pytest.raises(ConfigError, match=rf"microbatches={microbatches} is fewer than the {pp} stages.*: {working}\."):
        ParallelConfig(pp=pp, microbatches=microbatches)


def test_microbatches_that_make_no_whole_rounds_name_both_neighbours():
    """T11A."""
    with pytest.raises(ConfigError, match=r"microbatches=9 .*2 rounds.*: 8 or 10\."):
        ParallelConfig(pp=4, schedule="Interleaved1F1B", virtual_stages=2, microbatches=9)


@pytest.mark.parametrize("schedule", ["GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"])
def test_one_microbatch_is_legal_where_the_schedule_can_run_it(schedule):
    virtual = SCHEDULES[schedule].least_virtual
    ParallelConfig(pp=2, schedule=schedule, virtual_stages=virtual, microbatches=1)


def toy_stage(index):
    with torch.random.fork_rng():
        torch.manual_seed(index)
        return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())


def squared_error(output, target):
    return ((output - target) ** 2).sum()


def toy_batch(microbatches):
    generator = torch.Generator().manual_seed(99)
    return torch.randn(2 * microbatches, 4, generator=generator), torch.randn(2 * microbatches, 4, generator=generator)


def torch_schedule_step(schedule, virtual, microbatches):
    """What torch does on this rank: None where it refuses, else the largest gradient error against one process."""
    pp, rank, stages = dist.get_world_size(), dist.get_rank(), dist.get_world_size() * virtual
    shape = "v" if SCHEDULES[schedule].most_virtual == 2 else "loop"
    owners = generate_stage_to_rank_mapping(pp, stages, style=shape)
    mine = [
        PipelineStage(toy_stage(i), i, stages, torch.device("cpu"), group=dist.group.WORLD)
        for i in range(stages)
        if owners[i] == rank
    ]
    kind = get_schedule_class(schedule)
    try:
        runner = kind(
            mine[0] if issubclass(kind, PipelineScheduleSingle) else mine,
            microbatches,
            loss_fn=squared_error,
            scale_grads=False,
        )
    except ValueError:
        return None
    rows, target = toy_batch(microbatches)
    inputs = (rows,) if owners[0] == rank else ()
    runner.step(*inputs, **({"target": target} if owners[stages - 1] == rank else {}))
    whole = torch.nn.Sequential(*[toy_stage(i) for i in range(stages)])
    squared_error(whole(rows), target).backward()
    return max(
        float((got.grad - want.grad).abs().max())
        for stage in mine
        for got, want in zip(stage.submod.parameters(), whole[stage.stage_index].parameters(), strict=True)
    )


def torch_schedule_steps(schedule, virtual, counts):
    return {count: torch_schedule_step(schedule, virtual, count) for count in counts}


@pytest.mark.parametrize("pp", [2, 3])
@pytest.mark.parametrize("schedule", list(SCHEDULES))
def test_microbatches_accepted_are_those_torch_runs_with_right_gradients(pool, schedule, pp):
    """T11A: interleaved schedules may run fewer than pp."""
    virtual = SCHEDULES[schedule].least_virtual
    config = ParallelConfig(pp=pp, dp_shard=1, schedule=schedule, virtual_stages=virtual)
    counts = list(range(1, 3 * pp + 1))
    for errors in pool.run(pp, torch_schedule_steps, schedule, virtual, counts):
        accepted = [count for count in counts if accepts_microbatches(config, count)]
        assert accepted == [count for count, error in errors.items() if error is not None]
        assert max(errors[count] for count in accepted) < 1e-4


def test_microbatches_without_pipeline_are_one():
    assert choose_microbatches(ParallelConfig(), 12) == 1


def test_microbatches_asked_for_are_kept():
    assert choose_microbatches(ParallelConfig(pp=2, microbatches=6), 12) == 6


@pytest.mark.parametrize(
    ("pp", "schedule", "rows", "chosen"),
    [
        (2, "1F1B", 64, 8),  # 4 * pp
        (2, "1F1B", 18, 9),  # the smallest divisor above it
        (2, "1F1B", 6, 6),  # a row each
        (2, "1F1B", 1, 2),  # more than the rows: the caller pads
        (2, "GPipe", 1, 1),
        (4, "Interleaved1F1B", 120, 20),  # whole rounds of pp
        (4, "Interleaved1F1B", 9, 10),  # 9 would leave a broken round
        (2, "ZBVZeroBubble", 3, 3),
        (2, "DualPipeV", 3, 4),
    ],
)
def test_chosen_microbatches(pp, schedule, rows, chosen):
    config = ParallelConfig(pp=pp, schedule=schedule, virtual_stages=SCHEDULES[schedule].least_virtual)
    assert choose_microbatches(config, rows) == chosen


@pytest.mark.parametrize("schedule", list(SCHEDULES))
def test_chosen_microbatches_are_always_legal(schedule):
    for pp in (2, 3, 4, 8):
        config = ParallelConfig(pp=pp, schedule=schedule, virtual_stages=SCHEDULES[schedule].least_virtual)
        assert all(accepts_microbatches(config, choose_microbatches(config, rows)) for rows in range(1, 100))
