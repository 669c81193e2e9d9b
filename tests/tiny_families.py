"""A tiny random model of every causal LM type of transformers, its config built from the fields of the config class.

``python -m tests.tiny_families [TYPE ...]`` runs each once forward and backward and prints one line a type.
"""

from __future__ import annotations

import logging
import sys
import warnings
from dataclasses import MISSING, fields

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.models import make_batch

LAYERS = 4

# What a config field becomes, by its name. A field a config class lacks is not set.
_BY_NAMES: dict[str, object] = {
    """vocab_size decoder_vocab_size audio_vocab_size output_vocab_size unpadded_vocab_size
    vocab_size_per_layer_input pronunciation_vocab_size shape_vocab_size encoder_hash_byte_group_vocab""": 96,
    """hidden_size d_model n_embd emb_dim embedding_size word_embed_proj_dim lru_width attention_hidden_size
    mamba_d_ssm num_mel_bins input_embedding_size output_embedding_size pronunciation_embed_dim
    shape_embed_dim moe_latent_size backbone_hidden_size hidden_size_global adapter_in_dim adapter_out_dim
    adapter_input_size downsample_hidden_size mm_embed_dim output_proj_dims output_channels ext_pw_out_channel
    depthwise_separable_out_channel nemo_conv_channels""": 32,
    """intermediate_size moe_intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim dim_ff dff d_inner
    ffn_hidden_size expert_ffn_hidden_size shared_expert_intermediate_size shared_intermediate_size
    moe_shared_expert_intermediate_size dense_intermediate_size prefix_dense_intermediate_size
    intermediate_size_mlp shared_experts_intermediate_size feed_forward_size""": 64,
    """num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers
    num_decoder_layers num_blocks num_attention_heads n_head n_heads num_heads encoder_attention_heads
    decoder_attention_heads attention_heads num_encoder_attention_heads num_decoder_attention_heads
    swa_num_attention_heads linear_num_heads linear_num_value_heads num_experts num_local_experts
    n_routed_experts moe_num_experts rotary_dim index_block_size d_rel""": LAYERS,
    """num_key_value_heads num_kv_heads swa_num_key_value_heads linear_num_key_heads n_groups index_n_heads
    num_experts_per_tok moe_k moe_topk top_k_experts eos_token_id index_topk_blocks num_codebooks
    zero_expert_num n_group o_groups n_layers_per_attn_res_block""": 2,
    """head_dim dim_head attention_head_size swa_head_dim kv_channels d_head attention_head_dim qk_rope_head_dim
    qk_nope_head_dim v_head_dim linear_key_head_dim linear_value_head_dim linear_head_dim index_head_dim
    index_topk mamba_d_state state_size ssm_state_size mamba_d_head mamba_head_dim sliding_window
    sliding_window_size attention_window_size local_attention local_attention_window_len attention_chunk_size
    window_size chunk_size mamba_chunk_size hidden_size_per_layer_input laurel_rank query_pre_attn_scalar
    gated_norm_rank hc_lowrank loop_gate_rank block_size adapter_rank mamba_n_heads mamba_num_heads rel_extent""": 8,
    "q_lora_rank kv_lora_rank o_lora_rank router_hidden_size": 16,
    """max_position_embeddings n_positions n_ctx max_seq_len context_length max_target_positions
    max_source_positions mm_posemb_size position_embedding_size""": 128,
    """topk_group bos_token_id decoder_start_token_id num_shared_experts n_shared_experts first_k_dense_replace
    num_dense_layers n_input_layers n_output_layers loop_layer_index_start""": 1,
    # With jitter, training would draw the experts at random; prediction heads are not part of the causal LM's loss.
    "pad_token_id router_jitter_noise input_jitter_noise num_nextn_predict_layers num_mtp_layers": 0,
    "initializer_range init_std logit_scale": 0.2,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.5,
    """key_multiplier attention_out_multiplier attention_in_multiplier ssm_in_multiplier ssm_out_multiplier
    lm_head_multiplier""": 0.7,
    "routed_scaling_factor route_scale router_scaling_factor moe_routed_scaling_factor": 1.5,
    "embedding_multiplier logits_mup_width_multiplier": 2.0,
    "logits_scaling": 3.0,
    "use_cache use_mamba_kernels": False,
    "is_decoder use_sliding_window": True,
}
_VALUE_OF = {name: value for names, value in _BY_NAMES.items() for name in names.split()}

# None in one of these means "as the number of heads" and the like; in any other field it means that a part is absent.
_NONE_IS_DERIVED = {
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "n_routed_experts",
    "num_experts_per_tok",
    "n_shared_experts",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
}

_ROPE = dict(rope_type="default", rope_theta=10000.0)

# What the names do not tell.
_OF_TYPE: dict[str, dict] = {
    "bamba": dict(attn_layer_indices=[1, 3]),
    "big_bird": dict(attention_type="original_full"),  # block-sparse attention needs sequences of 704 tokens and more
    "bigbird_pegasus": dict(attention_type="original_full"),
    "blt": dict(patching_threshold=4.0),  # about half of the bytes of a random model open a patch
    "cohere_compass_text": dict(
        layer_types=["sliding_attention", "full_attention"] * 2,
        rope_parameters=dict.fromkeys(("sliding_attention", "full_attention"), _ROPE),
    ),
    "dbrx": dict(
        attn_config=dict(kv_n_heads=2, clip_qkv=8.0, rope_theta=10000.0),
        ffn_config=dict(ffn_hidden_size=64, moe_num_experts=4, moe_top_k=2),
    ),
    "deepseek_v4": dict(
        num_key_value_heads=1, compress_rates=dict(compressed_sparse_attention=4, heavily_compressed_attention=8)
    ),
    "dots1": dict(layer_types=["full_attention", "sliding_attention"] * 2),
    "dots3_note_text": dict(
        swa_num_attention_heads=4,
        swa_num_key_value_heads=4,
        swa_q_lora_rank=16,
        swa_kv_lora_rank=16,
        swa_head_dim=16,
        swa_qk_nope_head_dim=8,
        swa_v_head_dim=8,
    ),
    "falcon_h1": dict(mamba_d_ssm=64, mlp_multipliers=[0.7, 1.3], ssm_multipliers=[0.7, 0.8, 0.9, 1.1, 1.2]),
    # The last two layers reuse the keys and values of the two before them, which a cut in the middle leaves together.
    "gemma3n_text": dict(num_hidden_layers=8, num_kv_shared_layers=2, activation_sparsity_pattern=[0.5] + [0.0] * 7),
    "gemma4_assistant": dict(text_config=dict(hidden_size_per_layer_input=0, vocab_size_per_layer_input=0)),
    "gemma4_text": dict(global_head_dim=16),
    "gemma4_unified_text": dict(global_head_dim=16),
    "glm_moe_dsa": dict(indexer_types=["full", "shared"] * 2),
    "hy_v4": dict(indexer_types=["full", "shared"] * 2),
    "gpt_neo": dict(attention_types=[[["global", "local"], 2]]),
    "granitemoehybrid": dict(layer_types=["linear_attention", "full_attention"] * 2),
    "inkling2_loop_text": dict(loop_layer_index_end=3, n_layers_per_attn_res_block=1),
    # Experts at 0 and 3, attention at 1 and 3: both kinds of layer meet both kinds of MLP.
    "jamba": dict(attn_layer_period=2, attn_layer_offset=1, expert_layer_period=3, expert_layer_offset=0),
    "laguna": dict(layer_types=["full_attention", "sliding_attention"] * 2),
    "lfm2": dict(layer_types=["conv", "full_attention"] * 2),
    "lfm2_moe": dict(layer_types=["conv", "full_attention"] * 2),
    "llama4_text": dict(moe_layers=[1, 2], no_rope_layers=[1, 0, 1, 0]),
    "mamba2": dict(num_heads=8),  # times head_dim 8 is twice the hidden size
    "mellum": dict(layer_types=["full_attention", "sliding_attention"] * 2),
    "minicpm3": dict(scale_emb=2, dim_model_base=16),
    "minimax": dict(full_attn_alpha_factor=0.7, linear_attn_alpha_factor=1.2, mlp_beta_factor=0.8),
    "minimax_m3_vl_text": dict(
        layer_types=["full_attention", "minimax_m3_sparse"] * 2, mlp_layer_types=["dense", "sparse", "sparse", "sparse"]
    ),
    "ministral": dict(layer_types=["sliding_attention", "full_attention"] * 2),
    "qwen4_exp_text": dict(
        indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=8, indexer_budget=8, indexer_compress_ratio=4
    ),
    # Axial positions would fix the length of every training sequence.
    "reformer": dict(
        axial_pos_embds=False,
        attn_layers=["local", "lsh"] * 2,
        local_attn_chunk_length=4,
        lsh_attn_chunk_length=4,
        num_buckets=2,
        hash_seed=1,
    ),
    "xlm": dict(causal=True),  # it and xlnet default to attention both ways
    "xlnet": dict(attn_type="uni"),
    "xmod": dict(default_language="en_XX"),
    "zaya": dict(num_experts_per_tok=1, sliding_window=8, layer_types=["hybrid", "hybrid_sliding"] * 2),
}


def causal_types() -> list[str]:
    """Every model type that `AutoModelForCausalLM` builds."""
    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(model_type: str, **changes) -> PreTrainedConfig:
    """A config of hidden size 32 with 4 layers, or as many as show each kind of layer, and every dropout 0."""
    return AutoConfig.for_model(model_type, **_shrunk(CONFIG_MAPPING[model_type], **changes))


def _shrunk(config_class: type[PreTrainedConfig], **changes) -> dict:
    """The arguments that make a tiny config of the class."""
    exceptions = {**_OF_TYPE.get(config_class.model_type, {}), **changes}
    arguments = {}
    for field in fields(config_class):
        default = field.default if field.default is not MISSING else None
        if field.name in config_class.sub_configs_defaults:
            spec = config_class.sub_configs_defaults[field.name]
            part = spec.get_config_class(spec.model_type) if spec.config_class is AutoConfig else spec.config_class
            arguments[field.name] = part(**_shrunk(part, **exceptions.pop(field.name, {})))
        elif "drop" in field.name and isinstance(default, float):
            arguments[field.name] = 0.0
        elif field.name in _VALUE_OF and (default is not None or field.name in _NONE_IS_DERIVED):
            value = _VALUE_OF[field.name]
            arguments[field.name] = float(value) if isinstance(default, float) else value
    if "kv_lora_rank" in arguments:  # latent attention has no groups of query heads
        arguments["num_key_value_heads"] = arguments["num_attention_heads"]
    if "use_sliding_window" in arguments:
        arguments["sliding_window"] = _VALUE_OF["sliding_window"]
    return {**arguments, **_layer_lists(config_class, exceptions), **exceptions}


def _layer_lists(config_class: type[PreTrainedConfig], exceptions: dict) -> dict:
    """The per-layer lists of the class's default, cut to the tiny number of layers with each kind of layer in it."""
    names = {f.name for f in fields(config_class)}
    listed = [n for n in ("layer_types", "layers_block_type", "mlp_layer_types") if n in names and n not in exceptions]
    default, layers = config_class() if listed else None, exceptions.get("num_hidden_layers", LAYERS)
    lists = {"mlp_only_layers": [0]} if "mlp_only_layers" in names else {}
    for name in listed:
        kinds = list(dict.fromkeys(getattr(default, name) or ()))
        if "use_sliding_window" in names:
            kinds = ["full_attention", "sliding_attention"]
        if name == "mlp_layer_types":
            first, rest = ("dense", "sparse") if "sparse" in kinds else kinds
            lists[name] = [first] + [rest] * (layers - 1)  # both kinds of attention meet the second kind of MLP
        elif kinds:
            lists[name] = [kinds[i % len(kinds)] for i in range(layers)]
    return lists


def tiny_model(model_type: str, seed: int = 0, **changes) -> PreTrainedModel:
    """A model of `tiny_config` in train mode, with weights from ``seed`` so large that each one moves the loss."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(model_type, **changes)).float()
    _redraw(model, torch.Generator().manual_seed(seed))
    return model.train()


@torch.no_grad()
def _redraw(model: nn.Module, generator: torch.Generator) -> None:
    for name, p in model.named_parameters():
        noise = 0.2 * torch.randn(p.shape, generator=generator)
        if not p.requires_grad:
            if not p.any():  # a router's correction: more would starve an expert; others are tables of sinusoids
                p.copy_(noise / 4)
        elif p.ndim < 2 or name.endswith("A_log"):  # norms, biases and decay rates keep their centre
            p.add_(noise)
        else:
            p.copy_(noise)


def loss_of(model: PreTrainedModel, batch: dict) -> Tensor:
    """Mean cross-entropy of the next token, from logits of [batch, seq, vocabulary]."""
    logits = model(input_ids=batch["input_ids"], use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch["labels"][:, 1:].flatten())


def check(model_type: str) -> str:
    """One line on the type: its class and size, and its loss and parameters without gradient, or where it failed."""
    step, about = "CONFIG", model_type
    try:
        tiny_config(model_type)
        step = "BUILD"
        model = tiny_model(model_type)
        about = f"{model_type} {type(model).__name__} {sum(p.numel() for p in model.parameters())}"
        step, batch = "FORWARD", make_batch(rows=4)
        losses = [loss_of(model, batch) for _ in range(2)]
        step = "BACKWARD"
        losses[0].backward()
    except Exception as e:
        return f"{about} {step} {type(e).__name__}: {' '.join(str(e).split())[:300]}"
    grads = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    still = [n for n, g in grads.items() if g is None or not g.any()]
    finite = all(g is None or g.isfinite().all() for g in grads.values())
    words = [f"loss={losses[0].item():.3f}", *(["non-deterministic"] if losses[0] != losses[1] else [])]
    words += [] if finite and losses[0].isfinite() else ["non-finite"]
    return f"{about} {'ok' if len(words) == 1 else 'BAD'} {' '.join(words)}, zero-grad params: {still}"


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    for wanted in sys.argv[1:] or causal_types():
        print(check(wanted), flush=True)
