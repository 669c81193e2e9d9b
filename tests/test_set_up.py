"""Setting up on the meta device: shapes and placements without values, also for a rank of a world that is not there."""

from __future__ import annotations

import pytest

from tests import jobs_surface as jobs
from tests import models

PP, DP, TP = 8, 16, 8  # a world of 1024, of which torch's fake process group shows one rank
STAGE_LAYERS = [11, 10, 10, 10, 10, 10, 10, 9]
HIDDEN, WIDTH, KV, VOCABULARY = 8192, 28672, 1024, 128256  # Llama 70B's

LLAMA = dict(
    hidden_size=HIDDEN,
    intermediate_size=WIDTH,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
    vocab_size=VOCABULARY,
    tie_word_embeddings=False,
)


def expected_shapes(pp: int) -> dict[str, list[list[int]]]:
    """Name -> shape of the whole, and of this rank's part: tp splits rows or columns, then dp rows."""

    def rows(total: int, columns: int) -> list[list[int]]:
        return [[total, columns], [total // TP // DP, columns]]

    def columns(total: int) -> list[list[int]]:
        return [[HIDDEN, total], [HIDDEN // DP, total // TP]]

    norm = [[HIDDEN], [HIDDEN // DP]]
    of_layer = {
        "self_attn.q_proj": rows(HIDDEN, HIDDEN),
        "self_attn.k_proj": rows(KV, HIDDEN),
        "self_attn.v_proj": rows(KV, HIDDEN),
        "self_attn.o_proj": columns(HIDDEN),
        "mlp.gate_proj": rows(WIDTH, HIDDEN),
        "mlp.up_proj": rows(WIDTH, HIDDEN),
        "mlp.down_proj": columns(WIDTH),
        "input_layernorm": norm,
        "post_attention_layernorm": norm,
    }
    first = sum(STAGE_LAYERS[:pp])
    shapes = {
        f"model.layers.{i}.{name}.weight": shape
        for i in range(first, first + STAGE_LAYERS[pp])
        for name, shape in of_layer.items()
    }
    if pp == 0:
        shapes["model.embed_tokens.weight"] = rows(VOCABULARY, HIDDEN)
    if pp == PP - 1:
        shapes |= {"model.norm.weight": norm, "lm_head.weight": rows(VOCABULARY, HIDDEN)}
    return shapes


@pytest.mark.parametrize(("rank", "coordinate"), [(0, [0, 0, 0]), (517, [4, 0, 5]), (1023, [7, 15, 7])])
def test_a_rank_of_1024_has_its_part_of_a_70b_model(pool, rank, coordinate):
    config = dict(pp=PP, dp_shard=DP, tp=TP, stage_layers=STAGE_LAYERS)
    [result] = pool.run(1, jobs.of_a_rank_of_another_world, rank, PP * DP * TP, LLAMA, config)
    assert result["coordinate"] == coordinate
    assert result["devices"] == {"meta"}
    assert result["shapes"] == expected_shapes(coordinate[0])


def test_on_meta_a_directory_gives_the_same_parameters_and_no_weights_are_read(pool, tmp_path):
    models.tiny_model().save_pretrained(tmp_path)
    config = dict(tp=2, dp_shard=2)
    on_cpu, on_meta = (pool.run(4, jobs.of_directory, str(tmp_path), config, device) for device in ("cpu", "meta"))
    for (params, read), (shapes, unread) in zip(on_cpu, on_meta, strict=True):
        assert shapes == params
        assert unread.endswith(" 0 bytes read")
        assert not read.endswith(" 0 bytes read")
