"""GPT-2, Llama and Qwen3 as Hugging Face publishes them: by the options of ours that they are."""

from typing import Any

from leanformer.errors import ConfigError
from leanformer.pretrained.layouts.entries import Entry, axis, flat, linear, matrix, norm, same


GPT2 = {"positions": "learned", "norm": "layernorm", "gated": False, "mlp_bias": True, "qkv_bias": True}
LLAMA = {"positions": "none", "norm": "rmsnorm", "gated": True, "mlp_bias": False, "qkv_bias": False}
OURS = "blocks.layers"


def huggingface(*, depth: int, positions: str = "learned", **other: Any) -> list[Entry]:
    """`GPT2LMHeadModel` of a model with learned positions, else `LlamaForCausalLM`, or with norms of queries and keys
    `Qwen3ForCausalLM`.

    Raises:
        ConfigError: the model has an option that these have not.
    """
    wanted = GPT2 if positions == "learned" else LLAMA
    given = {"norm": "layernorm", "gated": False, "mlp_bias": True, "qkv_bias": True} | other | {"positions": positions}
    if wrong := {key: given[key] for key, value in wanted.items() if given[key] != value}:
        shown = ", ".join(f"model.{key}={value!r}" for key, value in wrong.items())
        raise ConfigError(f'{shown}: "huggingface" has no such model with model.positions="{positions}".')
    return _gpt2(depth, **given) if wanted is GPT2 else _llama(depth, **given)


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


def _llama(
    depth: int, *, tied: bool = True, head_bias: bool = False, qk_norm: str | None = None, **_: Any
) -> list[Entry]:
    layer = "model.layers.{i}"
    entries = [
        Entry("model.embed_tokens.weight", ("embed",), same),
        Entry(f"{layer}.input_layernorm.weight", (f"{OURS}.norm1.scale",), same, depth),
        *linear(f"{layer}.self_attn.o_proj", f"{OURS}.attention.out", matrix(2), bias=False, layers=depth),
        Entry(f"{layer}.post_attention_layernorm.weight", (f"{OURS}.norm2.scale",), same, depth),
        Entry("model.norm.weight", ("norm.scale",), same),
    ]
    for theirs, ours in (("q", "query"), ("k", "key"), ("v", "value")):
        name = f"{layer}.self_attn.{theirs}"
        entries += linear(f"{name}_proj", f"{OURS}.attention.{ours}", bias=False, layers=depth)
        if qk_norm is not None and theirs != "v":
            entries.append(Entry(f"{name}_norm.weight", (f"{OURS}.attention.process.{ours}_norm.scale",), same, depth))
    for name in ("gate", "up", "down"):
        entries += linear(f"{layer}.mlp.{name}_proj", f"{OURS}.mlp.{name}", bias=False, layers=depth)
    return entries + _head(tied, head_bias)


def _head(tied: bool, bias: bool) -> list[Entry]:
    """Of tied embeddings the same tensor again, which files may have."""
    return [Entry("lm_head.weight", (), same, optional=True)] if tied else linear("lm_head", "head", bias=bias)
