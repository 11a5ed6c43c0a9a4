"""Layouts of transformers' models, nanochat and DINOv2 only to load. Each function takes the arguments of the model."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from leanformer.errors import ConfigError
from leanformer.pretrained.layouts.entries import Entry, axis, conv, flat, linear, matrix, norm, same


OURS = "blocks.layers"
# Options of a model that a published one needs.
BERT = {"positions": "learned", "norm": "layernorm", "post_norm": True, "gated": False}
BERT |= {"mlp_bias": True, "qkv_bias": True, "pool": "first"}  # also the defaults of the architecture
GPT2 = {"attention": "softmax", "positions": "learned", "norm": "layernorm", "gated": False, "mlp_bias": True}
GPT2 |= {"qkv_bias": True}
GPT_DEFAULTS = GPT2 | {"tied": True}
LLAMA = {"attention": "softmax", "positions": "none", "norm": "rmsnorm", "gated": True, "mlp_bias": False}
NANOCHAT = LLAMA | {"gated": False, "activation": "relu2", "qk_norm": "rmsnorm", "qkv_bias": False, "out_bias": False}
NANOCHAT |= {"tied": False}
# Options that no published GPT has; nanochat has a `head_cap`.
UNSUPPORTED = ("soft_cap", "head_cap", "logit_scale", "temperature", "layer_scale", "rotary_width")


def _refuse(wrong: Mapping[str, Any], model: str) -> None:
    if wrong:
        shown = ", ".join(f"model.{key}={value!r}" for key, value in wrong.items())
        raise ConfigError(f'{shown}: not supported by the layout "huggingface" of {model}.')


def vit(
    *, depth: int, patch_size: int, distilled: bool = False, layer_scale: float | None = None, **_: Any
) -> list[Entry]:
    """`ViTForImageClassification`.

    With a distillation token it is `DeiTForImageClassificationWithTeacher`, and with layer scale `Dinov2Model`, a
    backbone without a head, which needs `new_head`. The names are those that `save_pretrained` writes to files;
    transformers 5 has others in memory. Published configs of ViT and DeiT have `layer_norm_eps` 1e-12, while the
    default here is 1e-6, as in timm and DINOv2.
    """
    dino = layer_scale is not None
    prefix = "" if dino else "deit." if distilled else "vit."
    layer = f"{prefix}encoder.layer.{{i}}"
    names = ("layernorm_before", "layernorm_after", "intermediate.dense", "output.dense")
    names = ("norm1", "norm2", "mlp.fc1", "mlp.fc2") if dino else names
    entries = [
        Entry(f"{prefix}embeddings.cls_token", ("cls_token",), same),
        Entry(f"{prefix}embeddings.position_embeddings", ("pos_embed",), same),
        *linear(f"{prefix}embeddings.patch_embeddings.projection", "patch_embed", conv(patch_size)),
        *norm(f"{layer}.{names[0]}", f"{OURS}.norm1", layers=depth),
        *norm(f"{layer}.{names[1]}", f"{OURS}.norm2", layers=depth),
        *linear(f"{layer}.{names[2]}", f"{OURS}.mlp.up", layers=depth),
        *linear(f"{layer}.{names[3]}", f"{OURS}.mlp.down", layers=depth),
        *linear(f"{layer}.attention.output.dense", f"{OURS}.attention.out", matrix(2), layers=depth),
        *norm(f"{prefix}layernorm", "norm"),
    ]
    for part in ("query", "key", "value"):
        entries += linear(f"{layer}.attention.attention.{part}", f"{OURS}.attention.{part}", layers=depth)
    if dino:
        entries += [Entry(f"{layer}.layer_scale{n}.lambda1", (f"{OURS}.gamma{n}",), same, depth) for n in (1, 2)]
        entries.append(Entry("embeddings.mask_token", (), same))  # used only by its training objective
    if distilled and not dino:
        entries.append(Entry(f"{prefix}embeddings.distillation_token", ("dist_token",), same))
        return entries + linear("cls_classifier", "head") + linear("distillation_classifier", "head_dist")
    return entries + linear("classifier", "head")


def bert(*, depth: int, width: int, num_classes: int | None = None, **other: Any) -> list[Entry]:
    """`BertForSequenceClassification`, `BertForMaskedLM` or `BertModel` (Devlin et al. 2019).

    It is the first for a classifier, the second for a model with transform and bias, else `BertModel` without its
    pooler. Heads of these classes that the model lacks may be in a file, and are ignored.
    """
    wrong = {key: other[key] for key, value in BERT.items() if other.get(key, value) != value}
    if not other.get("types"):
        wrong["types"] = None
    if num_classes and other.get("pooler_dim") != width:
        wrong["pooler_dim"] = other.get("pooler_dim")
    if bool(other.get("transform")) != bool(other.get("head_bias")):
        wrong |= {key: bool(other.get(key)) for key in ("transform", "head_bias")}
    _refuse(wrong, "BERT")
    embeddings, layer = "bert.embeddings", "bert.encoder.layer.{i}"
    entries = [
        Entry(f"{embeddings}.word_embeddings.weight", ("embed",), same),
        Entry(f"{embeddings}.position_embeddings.weight", ("pos_embed",), same),
        Entry(f"{embeddings}.token_type_embeddings.weight", ("type_embed",), same),
        Entry(f"{embeddings}.position_ids", (), same),  # a buffer in old files
        *norm(f"{embeddings}.LayerNorm", "embed_norm"),
        *linear(f"{layer}.attention.output.dense", f"{OURS}.attention.out", matrix(2), layers=depth),
        *norm(f"{layer}.attention.output.LayerNorm", f"{OURS}.norm1", layers=depth),
        *linear(f"{layer}.intermediate.dense", f"{OURS}.mlp.up", layers=depth),
        *linear(f"{layer}.output.dense", f"{OURS}.mlp.down", layers=depth),
        *norm(f"{layer}.output.LayerNorm", f"{OURS}.norm2", layers=depth),
    ]
    for part in ("query", "key", "value"):
        entries += linear(f"{layer}.attention.self.{part}", f"{OURS}.attention.{part}", layers=depth)
    return entries + _bert_heads(classifier=bool(num_classes), masked=bool(other.get("transform")))


def _bert_heads(*, classifier: bool, masked: bool) -> list[Entry]:
    """Entries of the heads; those the model lacks, and the tied decoder, are known but not read."""
    pooled = [*linear("bert.pooler.dense", "pooler"), *linear("classifier", "head")]
    masked_lm = [
        *linear("cls.predictions.transform.dense", "transform"),
        *norm("cls.predictions.transform.LayerNorm", "transform_norm"),
        Entry("cls.predictions.bias", ("head_bias",), same),
    ]
    loaded = (pooled if classifier else []) + (masked_lm if masked else [])
    unread = [dataclasses.replace(entry, ours=()) for entry in pooled + masked_lm if entry not in loaded]
    unread += [Entry(f"cls.seq_relationship.{name}", (), same) for name in ("weight", "bias")]
    untied = "that differs from the array that it should copy: a model here has one for both. Use other weights."
    copies = {"weight": "bert.embeddings.word_embeddings.weight", "bias": "cls.predictions.bias"}
    for name, original in copies.items():
        decoder = Entry(f"cls.predictions.decoder.{name}", (), same)
        unread.append(dataclasses.replace(decoder, refused=untied, copy_of=original) if masked else decoder)
    return loaded + unread


def gpt(*, depth: int, **other: Any) -> list[Entry]:
    """The published model that matches the options.

    It is `GPT2LMHeadModel` with learned positions, `Qwen3ForCausalLM` with norms of queries and keys,
    `Qwen2ForCausalLM` with biases of queries, keys and values alone, else `LlamaForCausalLM`, whose `attention_bias` is
    qkv_bias and out_bias. For models like nanochat it is what `rename_nanochat` returns, which no library loads.
    """
    given: dict[str, Any] = GPT_DEFAULTS | other
    required = GPT2 if given["positions"] == "learned" else LLAMA
    if required is LLAMA and given.get("activation") == "relu2" and not given["gated"]:
        required = NANOCHAT
    wrong = {key: given.get(key) for key, value in required.items() if given.get(key) != value}
    wrong |= {key: given[key] for key in UNSUPPORTED if given.get(key) is not None}
    if required is NANOCHAT:
        wrong.pop("head_cap", None)
    _refuse(wrong, f'GPT with model.positions="{given["positions"]}"')
    return (_gpt2 if required is GPT2 else _llama)(depth, **given)


def rename_nanochat(tensors: Mapping[str, np.ndarray], arguments: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return nanochat's tensors as a Llama's with the same outputs; tensors of any other model unchanged.

    nanochat (`NanoChatForCausalLM`) is recognised by its tensors `model.layers.0.mlp.fc1.*`; the Llama's MLP has no
    gate projection. Its norms have no scales, so scales of 1 are added. It normalises the token embeddings first, so
    their rows are normalised here. It rotates queries and keys the other way, so the halves of their channels are
    exchanged; and it rotates them before it normalises them, which commutes. Training a loaded model also trains the
    scales.
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


def _gpt2(depth: int, *, tied: bool, head_bias: bool = False, **_: Any) -> list[Entry]:
    """Its linear layers are (in, out), like ours; old files have buffers of masks."""
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
    return entries + _gpt_head(tied, head_bias, "transformer.wte.weight")


def _llama(
    depth: int,
    *,
    tied: bool,
    gated: bool,
    qkv_bias: bool,
    head_bias: bool = False,
    out_bias: bool | None = None,
    qk_norm: str | None = None,
    **_: Any,
) -> list[Entry]:
    layer = "model.layers.{i}"
    bias = qkv_bias and out_bias is not False
    entries = [
        Entry("model.embed_tokens.weight", ("embed",), same),
        Entry(f"{layer}.input_layernorm.weight", (f"{OURS}.norm1.scale",), same, depth),
        *linear(f"{layer}.self_attn.o_proj", f"{OURS}.attention.out", matrix(2), bias=bias, layers=depth),
        Entry(f"{layer}.post_attention_layernorm.weight", (f"{OURS}.norm2.scale",), same, depth),
        Entry("model.norm.weight", ("norm.scale",), same),
    ]
    for name in ("gate", "up", "down") if gated else ("up", "down"):
        entries += linear(f"{layer}.mlp.{name}_proj", f"{OURS}.mlp.{name}", bias=False, layers=depth)
    for theirs, ours in (("q", "query"), ("k", "key"), ("v", "value")):
        name = f"{layer}.self_attn.{theirs}"
        entries += linear(f"{name}_proj", f"{OURS}.attention.{ours}", bias=qkv_bias, layers=depth)
        if qk_norm is not None and theirs != "v":
            entries.append(Entry(f"{name}_norm.weight", (f"{OURS}.attention.process.{ours}_norm.scale",), same, depth))
    return entries + _gpt_head(tied, head_bias, "model.embed_tokens.weight")


def _gpt_head(tied: bool, bias: bool, embed: str) -> list[Entry]:
    """Entries of the output head; with tied embeddings `embed`, files may have a copy, which is not read."""
    if not tied:
        return linear("lm_head", "head", bias=bias)
    reason = (
        f"that differs from {embed}, but the model has one matrix for both. Set --config.model.tied=False, and "
        "tie_word_embeddings to false in the config.json beside the weights."
    )
    return [Entry("lm_head.weight", (), same, refused=reason, copy_of=embed)]
