"""GPT-2, Llama, Qwen3 and DeepSeek-V2 and V3 as Hugging Face publishes them: by the options of ours that they are."""

from typing import Any

from leanformer.errors import ConfigError
from leanformer.pretrained.layouts.entries import Entry, axis, flat, linear, matrix, neighbours, norm, same


GPT2 = {"positions": "learned", "norm": "layernorm", "gated": False, "mlp_bias": True, "qkv_bias": True}
LLAMA = {"positions": "none", "norm": "rmsnorm", "gated": True, "mlp_bias": False, "qkv_bias": False}
DEEPSEEK = LLAMA | {"latent_norm": "rmsnorm", "out_bias": False}
OF_NONE = ("soft_cap", "head_cap", "logit_scale", "temperature", "layer_scale")  # options that none of them has
OURS = "blocks.layers"


def huggingface(*, depth: int, positions: str = "learned", attention: str = "softmax", **other: Any) -> list[Entry]:
    """`GPT2LMHeadModel` of a model with learned positions, else `LlamaForCausalLM`, or with norms of queries and keys
    `Qwen3ForCausalLM`, or with latent attention `DeepseekV2ForCausalLM` and `DeepseekV3ForCausalLM` of which every
    layer's MLP is dense (`first_k_dense_replace` of as many as there are), V3 with its `rope_interleave`.

    Rotary positions are plain: of `rope_type` "default", so that DeepSeek's logits have no further factor.

    Raises:
        ConfigError: the model has an option that these have not.
    """
    wanted = GPT2 if positions == "learned" else DEEPSEEK if attention == "latent" else LLAMA
    given = {"norm": "layernorm", "gated": False, "mlp_bias": True, "qkv_bias": True} | other | {"positions": positions}
    wrong = {key: given.get(key) for key, value in wanted.items() if given.get(key) != value}
    wrong |= {key: given[key] for key in OF_NONE if given.get(key) is not None}
    if wanted is GPT2 and attention != "softmax":
        wrong["attention"] = attention
    if wanted is DEEPSEEK and given.get("rotary") is None:
        wrong["rotary"] = None
    if wrong:
        shown = ", ".join(f"model.{key}={value!r}" for key, value in wrong.items())
        raise ConfigError(f'{shown}: "huggingface" has no such model with model.positions="{positions}".')
    if wanted is GPT2:
        return _gpt2(depth, **given)
    heads = _latent_heads(depth, **given) if wanted is DEEPSEEK else _heads(depth, **given)
    return _llama(depth, **given) + heads


def _gpt2(depth: int, *, tied: bool = True, head_bias: bool = False, **_: Any) -> list[Entry]:
    """Its linear layers are (in, out), as ours. Buffers of masks are in old files."""
    layer, parts = "transformer.h.{i}", ("query", "key", "value")
    entries = [
        Entry("transformer.wte.weight", ("embed",), same),
        Entry("transformer.wpe.weight", ("pos_embed",), same),
        *norm(f"{layer}.ln_1", f"{OURS}.norm1", layers=depth),
        Entry(f"{layer}.attn.c_attn.weight", tuple(f"{OURS}.attention.{p}.kernel" for p in parts), axis(1), depth),
        Entry(f"{layer}.attn.c_attn.bias", tuple(f"{OURS}.attention.{p}.bias" for p in parts), flat, depth),
        *linear(f"{layer}.attn.c_proj", f"{OURS}.attention.out", axis(2), layers=depth),
        *norm(f"{layer}.ln_2", f"{OURS}.norm2", layers=depth),
        *linear(f"{layer}.mlp.c_fc", f"{OURS}.mlp.up", axis(1), layers=depth),
        *linear(f"{layer}.mlp.c_proj", f"{OURS}.mlp.down", axis(1), layers=depth),
        *norm("transformer.ln_f", "norm"),
        *(Entry(f"{layer}.attn.{name}", (), same, depth, optional=True) for name in ("bias", "masked_bias")),
    ]
    return entries + _head(tied, head_bias)


def _llama(depth: int, *, tied: bool = True, head_bias: bool = False, **_: Any) -> list[Entry]:
    """All but what makes queries, keys and values."""
    layer = "model.layers.{i}"
    experts = "of a mixture of experts, and a layer here has one MLP: take a model whose every layer is dense."
    entries = [
        Entry("model.embed_tokens.weight", ("embed",), same),
        Entry(f"{layer}.input_layernorm.weight", (f"{OURS}.norm1.scale",), same, depth),
        *linear(f"{layer}.self_attn.o_proj", f"{OURS}.attention.out", matrix(2), bias=False, layers=depth),
        Entry(f"{layer}.post_attention_layernorm.weight", (f"{OURS}.norm2.scale",), same, depth),
        Entry("model.norm.weight", ("norm.scale",), same),
        Entry(f"{layer}.mlp.gate.weight", (), same, depth, optional=True, refused=experts),  # their router
    ]
    for name in ("gate", "up", "down"):
        entries += linear(f"{layer}.mlp.{name}_proj", f"{OURS}.mlp.{name}", bias=False, layers=depth)
    return entries + _head(tied, head_bias)


def _heads(depth: int, *, qk_norm: str | None = None, **_: Any) -> list[Entry]:
    entries = []
    for theirs, ours in (("q", "query"), ("k", "key"), ("v", "value")):
        name = f"model.layers.{{i}}.self_attn.{theirs}"
        entries += linear(f"{name}_proj", f"{OURS}.attention.{ours}", bias=False, layers=depth)
        if qk_norm is not None and theirs != "v":
            entries.append(Entry(f"{name}_norm.weight", (f"{OURS}.attention.process.{ours}_norm.scale",), same, depth))
    return entries


def _latent_heads(
    depth: int, *, num_heads: int, rotary_width: int, query_rank: int | None = None, **_: Any
) -> list[Entry]:
    """DeepSeek's: the latent and the key that turns in one matrix, keys and values of each head side by side."""
    theirs, ours = "model.layers.{i}.self_attn", f"{OURS}.attention"
    turned, kernels = neighbours(matrix(), rotary_width), (f"{ours}.latent.kernel", f"{ours}.turned.kernel")
    entries = [
        Entry(f"{theirs}.kv_a_proj_with_mqa.weight", kernels, (matrix(), turned), depth),
        Entry(f"{theirs}.kv_a_layernorm.weight", (f"{ours}.latent_norm.scale",), same, depth),
    ]
    kernels = (f"{ours}.key_up.kernel", f"{ours}.value_up.kernel")
    entries.append(Entry(f"{theirs}.kv_b_proj.weight", kernels, matrix(), depth, blocks=num_heads))
    if query_rank is None:
        return entries + linear(f"{theirs}.q_proj", f"{ours}.query", turned, bias=False, layers=depth)
    return [
        *entries,
        *linear(f"{theirs}.q_a_proj", f"{ours}.query_latent", bias=False, layers=depth),
        Entry(f"{theirs}.q_a_layernorm.weight", (f"{ours}.query_norm.scale",), same, depth),
        *linear(f"{theirs}.q_b_proj", f"{ours}.query_up", turned, bias=False, layers=depth),
    ]


def _head(tied: bool, bias: bool) -> list[Entry]:
    """Of tied embeddings the same tensor again, which files may have."""
    return [Entry("lm_head.weight", (), same, optional=True)] if tied else linear("lm_head", "head", bias=bias)
