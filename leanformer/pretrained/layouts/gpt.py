"""Layouts of Hugging Face's GPT-2, Llama, Mistral, Qwen2, Qwen3 and, to load, nanochat."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from leanformer.errors import ConfigError
from leanformer.pretrained.layouts.entries import Entry, axis, flat, linear, matrix, norm, same


GPT2 = {"positions": "learned", "norm": "layernorm", "gated": False, "mlp_bias": True, "qkv_bias": True}
LLAMA = {"positions": "none", "norm": "rmsnorm", "gated": True, "mlp_bias": False}
NANOCHAT = LLAMA | {"gated": False, "activation": "relu2", "qk_norm": "rmsnorm", "qkv_bias": False, "out_bias": False}
NANOCHAT |= {"tied": False}
# Options that no published model has; nanochat has a `head_cap`.
UNSUPPORTED = ("soft_cap", "head_cap", "logit_scale", "temperature", "layer_scale", "rotary_width")
OURS = "blocks.layers"


def huggingface(*, depth: int, positions: str = "learned", attention: str = "softmax", **other: Any) -> list[Entry]:
    """Return the layout of the published model that matches the options.

    It is `GPT2LMHeadModel` with learned positions, `Qwen3ForCausalLM` with norms of queries and keys,
    `Qwen2ForCausalLM` with biases of queries, keys and values alone, else `LlamaForCausalLM`, whose `attention_bias` is
    qkv_bias and out_bias. Models like nanochat have the layout of what `rename` returns, which no library loads.

    Args:
        depth, positions, attention: keys of config.model.
        other: the other keys of config.model.

    Raises:
        ConfigError: the model has an option that these do not have.
    """
    required = GPT2 if positions == "learned" else LLAMA
    if required is LLAMA and other.get("activation") == "relu2" and not other.get("gated"):
        required = NANOCHAT
    given: dict[str, Any] = (
        {"norm": "layernorm", "gated": False, "mlp_bias": True, "qkv_bias": True, "tied": True}
        | other
        | {"positions": positions}
    )
    wrong = {key: given.get(key) for key, value in required.items() if given.get(key) != value}
    wrong |= {key: given[key] for key in UNSUPPORTED if given.get(key) is not None}
    if required is NANOCHAT:
        wrong.pop("head_cap", None)
    if attention != "softmax":
        wrong["attention"] = attention
    if wrong:
        shown = ", ".join(f"model.{key}={value!r}" for key, value in wrong.items())
        raise ConfigError(f'{shown}: not supported by the layout "huggingface" with model.positions="{positions}".')
    return _gpt2(depth, **given) if required is GPT2 else _llama(depth, **given) + _heads(depth, **given)


def rename(tensors: Mapping[str, np.ndarray], **arguments: Any) -> dict[str, np.ndarray]:
    """Return nanochat's tensors as those of a Llama with the same outputs; tensors of any other model unchanged.

    nanochat (`NanoChatForCausalLM`) is recognised by its tensors `model.layers.0.mlp.fc1.*`; the Llama's MLP has no
    gate projection. Its norms have no scales, so scales of 1 are added. It normalises the token embeddings first, so
    their rows are normalised here. It rotates queries and keys the other way, so the halves of their channels are
    exchanged; and it rotates them before it normalises them, which commutes. Training a loaded model also trains the
    scales.

    Args:
        tensors: tensors of a file, by name.
        arguments: keys of config.model; depth, width, head_dim and epsilon are read.
    """
    if not any(name.startswith("model.layers.0.mlp.fc1.") for name in tensors):
        return dict(tensors)
    result, embed = {}, "model.embed_tokens.weight"
    for name, x in tensors.items():
        turned = name.endswith(("q_proj.weight", "k_proj.weight"))
        if turned and x.shape[0] % arguments["head_dim"] == 0:  # `pretrained.load` reports other shapes
            halves = x.reshape(-1, 2, arguments["head_dim"] // 2, x.shape[-1])
            x = halves[:, ::-1].reshape(x.shape)
        result[name.replace("mlp.fc1", "mlp.up_proj").replace("mlp.fc2", "mlp.down_proj")] = x
    if embed in tensors:
        rows = np.asarray(tensors[embed], np.float32)
        result[embed] = rows / np.sqrt(np.square(rows).mean(-1, keepdims=True) + arguments["epsilon"])
    result["model.norm.weight"] = np.ones(arguments["width"], np.float32)
    for i in range(arguments["depth"]):
        layer = f"model.layers.{i}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            result[f"{layer}.{name}.weight"] = np.ones(arguments["width"], np.float32)
        for name in ("q_norm", "k_norm"):
            result[f"{layer}.self_attn.{name}.weight"] = np.ones(arguments["head_dim"], np.float32)
    return result


def _gpt2(depth: int, *, tied: bool = True, head_bias: bool = False, **_: Any) -> list[Entry]:
    """Return the layout of GPT-2. Its linear layers are (in, out), like ours; old files have buffers of masks."""
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
        *(Entry(f"{layer}.attn.{name}", (), same, depth) for name in ("bias", "masked_bias")),
    ]
    return entries + _head(tied, head_bias, "transformer.wte.weight")


def _llama(
    depth: int,
    *,
    tied: bool = True,
    head_bias: bool = False,
    gated: bool = True,
    qkv_bias: bool = True,
    out_bias: bool | None = None,
    **_: Any,
) -> list[Entry]:
    """Return the layout of Llama without the projections of queries, keys and values."""
    bias = qkv_bias and out_bias is not False
    layer = "model.layers.{i}"
    entries = [
        Entry("model.embed_tokens.weight", ("embed",), same),
        Entry(f"{layer}.input_layernorm.weight", (f"{OURS}.norm1.scale",), same, depth),
        *linear(f"{layer}.self_attn.o_proj", f"{OURS}.attention.out", matrix(2), bias=bias, layers=depth),
        Entry(f"{layer}.post_attention_layernorm.weight", (f"{OURS}.norm2.scale",), same, depth),
        Entry("model.norm.weight", ("norm.scale",), same),
    ]
    for name in ("gate", "up", "down") if gated else ("up", "down"):
        entries += linear(f"{layer}.mlp.{name}_proj", f"{OURS}.mlp.{name}", bias=False, layers=depth)
    return entries + _head(tied, head_bias, "model.embed_tokens.weight")


def _heads(depth: int, *, qk_norm: str | None = None, qkv_bias: bool = True, **_: Any) -> list[Entry]:
    """Return the entries of query, key and value projections, and of their norms if there are any."""
    entries = []
    for theirs, ours in (("q", "query"), ("k", "key"), ("v", "value")):
        name = f"model.layers.{{i}}.self_attn.{theirs}"
        entries += linear(f"{name}_proj", f"{OURS}.attention.{ours}", bias=qkv_bias, layers=depth)
        if qk_norm is not None and theirs != "v":
            entries.append(Entry(f"{name}_norm.weight", (f"{OURS}.attention.process.{ours}_norm.scale",), same, depth))
    return entries


def _head(tied: bool, bias: bool, embed: str) -> list[Entry]:
    """Return the entries of the output head; with tied embeddings `embed`, files may have a copy, which is not read."""
    if not tied:
        return linear("lm_head", "head", bias=bias)
    reason = (
        f"that differs from {embed}, but the model has one matrix for both. Set --config.model.tied=False, and "
        "tie_word_embeddings to false in the config.json beside the weights."
    )
    return [Entry("lm_head.weight", (), same, refused=reason, copy_of=embed)]
