"""Where ranks sit, what it costs, and lines that start a job there."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from torch.distributed import run as torchrun

from meshpar.config import ParallelConfig
from meshpar.load import skeleton_from_config
from meshpar.planner.communication import Microbatches
from meshpar.planner.devices import device_named, network_of
from meshpar.planner.placement import ADVICE, coordinates, groups, launch_lines, node_of, spans
from meshpar.planner.work import model_work
from tests import models

VECTORS = json.loads((Path(__file__).parent / "time_vectors.json").read_text())


@pytest.mark.parametrize("vector", VECTORS["rank_groups"], ids=lambda v: str(v["world"]))
def test_groups_of_published_meshes(vector):
    config = ParallelConfig(pp=vector["pp"], tp=vector["tp"]).resolve(vector["world"])
    for dim in ("tp", "pp", "dp"):
        found = groups(config, dim)
        assert sorted(rank for group in found for rank in group) == list(range(vector["world"]))
        assert found[0] == vector.get(f"{dim}0", found[0])
    first, second, *_ = groups(config, "pp")[0]
    assert second - first == vector.get("pp0_stride", second - first)


def test_groups_of_replicas():
    config = ParallelConfig(pp=2, dp_replicate=2, dp_shard=2, tp=2)
    assert groups(config, "dp_shard")[0] == [0, 2]
    assert groups(config, "dp_replicate")[0] == [0, 4]
    assert groups(config, "dp")[:2] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert coordinates(config, 13) == {"pp": 1, "dp_replicate": 1, "dp_shard": 0, "tp": 1}
    assert [node_of(rank, 8) for rank in (7, 8)] == [0, 1]


def test_groups_that_span_nodes_are_found_with_their_cost():
    device, batch = device_named("h100-80gb"), Microbatches(1, 2048, 4)
    skeleton = skeleton_from_config(
        models.tiny_config(hidden_size=2048, intermediate_size=5632, num_attention_heads=16)
    )

    def found(per_node: int, **sizes):
        config = ParallelConfig(**sizes)
        work = model_work(skeleton, config, 2048)
        network = network_of(device, per_node)
        return {span.dim: span for span in spans(work, config, batch, [4 // config.pp] * config.pp, device, network)}

    assert found(8, dp_shard=1, tp=8) == {}
    inside = found(8, pp=2, dp_shard=2, tp=8)
    assert list(inside) == ["dp", "pp"]
    across = found(4, dp_shard=2, tp=8)
    assert list(across) == ["tp", "dp"]
    assert across["tp"].extra_seconds > 10 * abs(across["dp"].extra_seconds)
    assert re.fullmatch(r"groups of tp=8 span 2 nodes: \S+ s a step more than inside one", str(across["tp"]))


@pytest.mark.parametrize(("world", "nodes"), [(8, 1), (4, 1), (32, 4)])
def test_launch_lines_are_understood(world, nodes, tmp_path):
    text = launch_lines(ParallelConfig(tp=2, dp_shard=world // 2), 8, "my recipe.yaml")
    lines = [line for line in text.splitlines() if "torchrun" in line]
    assert len(lines) == (1 if nodes == 1 else 2)
    for line in lines:
        words = shlex.split(line)
        args = torchrun.parse_args(words[words.index("torchrun") + 1 :])
        assert (int(args.nnodes.split(":")[-1]), int(args.nproc_per_node)) == (nodes, min(world, 8))
        assert (args.module, args.training_script, args.training_script_args) == (
            True,
            "meshpar",
            ["train", "my recipe.yaml"],
        )
    script = tmp_path / "job.sh"
    script.write_text(text)
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    assert (f"#SBATCH --nodes={nodes}" in text) == (nodes > 1)


def test_nothing_is_forced_on_nccl():
    assert "NCCL_PROTO=" not in ADVICE + launch_lines(ParallelConfig(dp_shard=32), 8, "r.yaml")
    assert "do not fill 2 nodes of 8" in launch_lines(ParallelConfig(dp_shard=12), 8, "r.yaml")
