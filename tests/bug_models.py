"""The model, batches and one-process truth that the tests of bug reports share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests import jobs_bugs, models

LLAMA = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    initializer_range=0.2,
    tie_word_embeddings=False,
    attention_dropout=0.0,
    pad_token_id=0,
)


def one_process(family: str = "llama", **changes):
    """The unmodified model with weights from seed 0: 41,248 parameters in 39 tensors unless changed."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**LLAMA, **changes})).float()


class Folders:
    """Models of `one_process` saved as Hugging Face folders, each once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.made: dict[str, tuple[str, torch.nn.Module]] = {}

    def __call__(self, family: str = "llama", shard: str = "1GB", dtype=torch.float32, **changes) -> str:
        """Path of the folder."""
        return self._make(family, shard, dtype, changes)[0]

    def model(self, family: str = "llama", shard: str = "1GB", dtype=torch.float32, **changes):
        """The unmodified model read from the folder, in float32."""
        model = self._make(family, shard, dtype, changes)[1]
        model.zero_grad()
        return model

    def _make(self, family, shard, dtype, changes):
        key = repr((family, shard, dtype, sorted(changes.items(), key=str)))
        if key not in self.made:
            path = self.root / f"model-{len(self.made)}"
            one_process(family, **changes).to(dtype).save_pretrained(path, max_shard_size=shard)
            self.made[key] = (str(path), AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval())
        return self.made[key]


def tokens(rows: int, seq: int, seed: int = 1) -> torch.Tensor:
    """[rows, seq] token ids from 3 to 63."""
    return torch.randint(3, 64, (rows, seq), generator=torch.Generator().manual_seed(seed))


def whole_batch(rows: int, seq: int, seed: int = 1) -> dict:
    """`tokens` with every position a label."""
    ids = tokens(rows, seq, seed)
    return {"input_ids": ids, "labels": ids.clone()}


def mesh(pp: int, dp: int, tp: int, **more) -> dict:
    """A float32 config; a pipeline gets a microbatch for each of its ranks unless told otherwise."""
    return dict(pp=pp, dp_shard=dp, tp=tp, compute_dtype="float32", microbatches=pp if pp > 1 else None) | more


def label(value: object) -> str | None:
    """Test id of a config: pp x dp x tp and what else it sets."""
    if not isinstance(value, dict) or "dp_shard" not in value:
        return None
    shown = [f"{value['pp']}x{value['dp_shard']}x{value['tp']}"]
    usual = mesh(value["pp"], value["dp_shard"], value["tp"])
    return "-".join(shown + [f"{k}={v}" for k, v in value.items() if usual.get(k) != v])


def world(config: dict) -> int:
    return config["pp"] * config["dp_shard"] * config["tp"]


def assert_gradients_close(got: dict, want: dict, bar: float = 1e-5) -> None:
    """Same names, and each tensor within ``bar`` relative L2."""
    assert list(got) == list(want), "names or order differ from the unmodified model's"
    errors = {name: models.relative(got[name], want[name]) for name in want}
    worst = max(errors, key=errors.get)
    assert errors[worst] <= bar, f"{worst} is {errors[worst]:.1e} off"


def assert_close(pool, folders, config: dict, *batches: dict, family: str = "llama", **changes) -> list[dict]:
    """Accumulated calls on the mesh against one process; returns every rank's results."""
    losses, grads = models.reference(folders.model(family, **changes), *batches)
    results = pool.run(world(config), jobs_bugs.train, config, folders(family, **changes), list(batches))
    for result in results:
        assert result["losses"] == pytest.approx(losses, abs=1e-5)
        assert result["reported"] == pytest.approx(models.global_norm(grads), rel=1e-5)
    assert_gradients_close(results[0]["grads"], grads)
    return results
