"""Settings of transformers' models in `config.json`, by `model_type`; defaults are those of transformers 5.24."""

from collections.abc import Mapping
from typing import Any

from leanformer.pretrained.published.tables import Table


REFUSED = {  # published models that no architecture here computes, by `model_type`
    "gemma": "norms with 1 added to their scales, and scaled embeddings",
    "gemma2": "norms before and after each branch, and layers that see only near tokens",
    "gemma3_text": "norms before and after each branch, and layers that see only near tokens",
    "modernbert": "layers that see only near tokens, with another base of rotary positions",
}
SAME = {"xlm-roberta": "roberta", "camembert": "roberta"}  # names of models that compute what another computes

# Keys of every model. Generation settings are in configs of transformers 4.
HARMLESS_WORDS = """
model_type architectures transformers_version dtype torch_dtype name_or_path auto_map language tokenizer_class
prefix return_dict use_return_dict output_attentions output_hidden_states use_cache problem_type id2label label2id
num_labels bos_token_id eos_token_id pad_token_id sep_token_id cls_token_id mask_token_id decoder_start_token_id
torchscript initializer_range initializer_factor gradient_checkpointing finetuning_task task_specific_params
use_bfloat16 tf_legacy_loss tie_encoder_decoder cross_attention_hidden_size chunk_size_feed_forward
attn_implementation max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty
temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size output_scores
encoder_no_repeat_ngram_size bad_words_ids num_return_sequences return_dict_in_generate forced_bos_token_id
forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
hidden_dropout_prob attention_probs_dropout_prob classifier_dropout attention_dropout drop_path_rate
"""
HARMLESS = HARMLESS_WORDS.split()
FIXED: dict[str, Any] = {"is_encoder_decoder": False, "is_decoder": False, "add_cross_attention": False}
FIXED |= {"pruned_heads": {}, "quantization_config": None}
PLAIN = {"attention": "softmax", "soft_cap": None, "logit_scale": None, "temperature": None}
LAYER_NORM = {**PLAIN, "norm": "layernorm", "qk_norm": None, "rotary": None, "gated": False, "mlp_bias": True}

ENCODER: dict[str, Any] = {
    "hidden_size": ("width", 768),
    "num_hidden_layers": ("depth", 12),
    "num_attention_heads": ("num_heads", 12),
}
ENCODER |= {"intermediate_size": ("mlp_dim", 3072), "hidden_act": ("activation", "gelu")}
ENCODER |= {"layer_norm_eps": ("epsilon", 1e-12)}
VIT = ENCODER | {"head_dim": ("head_dim", None), "image_size": ("image_size", 224), "patch_size": ("patch_size", 16)}
VIT |= {"num_channels": ("channels", 3), "qkv_bias": ("qkv_bias", True)}
OF_IMAGES = {**LAYER_NORM, "post_norm": False, "pool": "token", "distilled": False}
UNUSED_HEAD = ["encoder_stride", "pooler_output_size", "pooler_act"]
DINO = {name: entry for name, entry in VIT.items() if name != "intermediate_size"}
DINO |= {"layer_norm_eps": ("epsilon", 1e-6), "patch_size": ("patch_size", 14)}
BACKBONE = ["mlp_ratio", "layerscale_value", "apply_layernorm", "reshape_hidden_states", "use_mask_token"]
BACKBONE += ["stage_names", "out_features", "out_indices"]

BERT = ENCODER | {"vocab_size": ("vocabulary", 30522), "max_position_embeddings": ("max_length", 512)}
BERT |= {"type_vocab_size": ("types", 2)}
POST_NORM = {
    **LAYER_NORM,
    "post_norm": True,
    "positions": "learned",
    "qkv_bias": True,
    "pool": "first",
    "head_dim": None,
}
TIED = {**FIXED, "position_embedding_type": "absolute", "tie_word_embeddings": True}

GPT2: dict[str, Any] = {
    "n_embd": ("width", 768),
    "n_layer": ("depth", 12),
    "n_head": ("num_heads", 12),
    "n_inner": ("mlp_dim", None),
}
GPT2 |= {"vocab_size": ("vocabulary", 50257), "n_positions": ("max_length", 1024)}
GPT2 |= {"layer_norm_epsilon": ("epsilon", 1e-5), "activation_function": ("activation", "gelu_new")}
GPT2 |= {"tie_word_embeddings": ("tied", True)}
OF_GPT2 = {
    **LAYER_NORM,
    "post_norm": False,
    "positions": "learned",
    "qkv_bias": True,
    "head_cap": None,
    "head_dim": None,
}
SUMMARY = ["summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout"]

LLAMA: dict[str, Any] = {
    "hidden_size": ("width", 4096),
    "num_hidden_layers": ("depth", 32),
    "num_attention_heads": ("num_heads", 32),
}
LLAMA |= {
    "head_dim": ("head_dim", None),
    "num_key_value_heads": ("num_kv_heads", None),
    "hidden_act": ("activation", "silu"),
}
LLAMA |= {"intermediate_size": ("mlp_dim", 11008), "vocab_size": ("vocabulary", 32000), "rope_theta": ("rotary", 1e4)}
LLAMA |= {"rms_norm_eps": ("epsilon", 1e-6), "tie_word_embeddings": ("tied", False)}
ROTARY = {**PLAIN, "norm": "rmsnorm", "qk_norm": None, "post_norm": False, "positions": "none", "gated": True}
ROTARY |= {"mlp_bias": False, "qkv_bias": False, "out_bias": False, "head_cap": None, "rotary_width": None}
BIASED = ("mlp_bias", "qkv_bias", "out_bias")
WINDOWS = ["use_sliding_window", "sliding_window", "max_window_layers", "layer_types"]  # `published` checks them
# Rotary positions have no last position. `published` also checks the type of rotary positions.
HARMLESS_LLAMA = [*HARMLESS, *WINDOWS, "max_position_embeddings", "pretraining_tp", "rope_parameters", "rope_scaling"]
NO_BIAS = {**FIXED, "partial_rotary_factor": 1.0, "attention_bias": False, "mlp_bias": False}
LATENT = {name: entry for name, entry in LLAMA.items() if name not in ("head_dim", "num_key_value_heads")}
LATENT |= {"v_head_dim": ("value_dim", 128), "kv_lora_rank": ("kv_rank", 512), "q_lora_rank": ("query_rank", 1536)}
LATENT |= {"qk_rope_head_dim": ("rotary_width", 64), "qk_nope_head_dim": ("head_dim", 128)}
OF_LATENT = {"attention": "latent", "latent_norm": "rmsnorm"}
# Of layers with experts, which `published` refuses; and dimensions that others determine.
EXPERTS_WORDS = """
first_k_dense_replace n_group n_routed_experts n_shared_experts routed_scaling_factor topk_group topk_method
norm_topk_prob num_experts_per_tok moe_intermediate_size moe_layer_freq output_router_logits ep_size scoring_func
num_nextn_predict_layers num_mtp_layers aux_loss_alpha seq_aux qk_head_dim head_dim num_key_value_heads
rope_interleave
"""
EXPERTS = EXPERTS_WORDS.split()


def _find_mlp_dim(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hidden dimension of DINOv2's MLP."""
    ratio, width = values.get("mlp_ratio", 4), values["hidden_size"]
    return {"mlp_dim": int(width * ratio)} if isinstance(ratio, int | float) and isinstance(width, int) else {}


def _find_biases(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the biases of attention, all of them or none."""
    both = values.get("attention_bias", False)
    return {"qkv_bias": both, "out_bias": both}


def _change(keys: Mapping[str, tuple[str, Any]], **defaults: Any) -> dict[str, tuple[str, Any]]:
    """Return keys with other defaults."""
    return {name: (ours, defaults.get(name, default)) for name, (ours, default) in keys.items()}


def _llama(keys: Mapping[str, tuple[str, Any]], *free: str, **implied: Any) -> Table:
    """Return a table of a model like Llama; `free` are keys of NO_BIAS that it supports."""
    fixed = {name: only for name, only in NO_BIAS.items() if name not in free}
    derive = _find_biases if "attention_bias" in free else lambda _: {}
    harmless = [*HARMLESS_LLAMA, *(["attention_bias"] if "attention_bias" in free else [])]
    more, mapped = EXPERTS if implied.get("attention") == "latent" else [], {option for option, _ in keys.values()}
    implied = {option: value for option, value in {**ROTARY, **implied}.items() if option not in mapped}
    return Table("gpt", keys, implied, fixed, [*harmless, *more], derive)


QWEN3 = _change(LLAMA, vocab_size=151936, intermediate_size=22016, num_key_value_heads=32, head_dim=128)
QWEN2 = _change(QWEN3, head_dim=None)
NANOCHAT = _change(LLAMA, hidden_size=768, num_hidden_layers=12, num_attention_heads=6, intermediate_size=8192)
NANOCHAT = _change(NANOCHAT, vocab_size=50304, hidden_act="relu2", num_key_value_heads=6)
NANOCHAT |= {"final_logit_softcapping": ("head_cap", 15.0)}
DEEPSEEK_V3 = _change(LATENT, hidden_size=7168, intermediate_size=18432, num_hidden_layers=61, vocab_size=129280)
DEEPSEEK_V3 = _change(DEEPSEEK_V3, num_attention_heads=128)
GPT2_FIXED = {**FIXED, "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False}
GPT2_HARMLESS = [*HARMLESS, *SUMMARY, "resid_pdrop", "embd_pdrop", "attn_pdrop", "n_ctx", "reorder_and_upcast_attn"]
TABLES = {
    "vit": Table("vit", VIT, OF_IMAGES | {"layer_scale": False}, FIXED, [*HARMLESS, *UNUSED_HEAD]),
    "deit": Table("vit", VIT, OF_IMAGES | {"layer_scale": False, "distilled": True}, FIXED, [*HARMLESS, *UNUSED_HEAD]),
    "dinov2": Table(
        "vit",
        DINO,
        OF_IMAGES | {"layer_scale": True},
        FIXED | {"use_swiglu_ffn": False},
        HARMLESS + BACKBONE,
        _find_mlp_dim,
    ),
    "bert": Table("bert", BERT, POST_NORM, TIED, HARMLESS),
    # Positions of RoBERTa start after the number of its padding token.
    "roberta": Table(
        "bert",
        _change(BERT, vocab_size=50265),
        POST_NORM,
        TIED | {"pad_token_id": 1},
        HARMLESS,
        lambda values: {"max_length": values["max_position_embeddings"] - 2},
    ),
    "gpt2": Table("gpt", GPT2, OF_GPT2, GPT2_FIXED, GPT2_HARMLESS),
    "llama": _llama(LLAMA, "attention_bias"),
    "mistral": _llama(_change(LLAMA, intermediate_size=14336, num_key_value_heads=8)),
    "qwen2": _llama(QWEN2, qkv_bias=True),
    "qwen3": _llama(QWEN3, "attention_bias", qk_norm="rmsnorm"),
    "nanochat": _llama(NANOCHAT, qk_norm="rmsnorm", gated=False),
    "deepseek_v2": _llama(_change(LATENT, vocab_size=102400), **OF_LATENT),
    "deepseek_v3": _llama(DEEPSEEK_V3, **OF_LATENT),
}
ALIASES = {  # second names of keys, by model
    "gpt2": {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
    | {"max_position_embeddings": "n_positions"}
}
