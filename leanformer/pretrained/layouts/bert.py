"""Layout of Hugging Face's BERT (Devlin et al. 2019)."""

import dataclasses
from typing import Any

from leanformer.errors import ConfigError
from leanformer.pretrained.layouts.entries import Entry, linear, matrix, norm, same


REQUIRED = {"positions": "learned", "norm": "layernorm", "post_norm": True, "gated": False}
REQUIRED |= {"mlp_bias": True, "qkv_bias": True, "pool": "first"}  # also the defaults of the architecture
EMBED = "bert.embeddings.word_embeddings.weight"
COPIES = {"cls.predictions.decoder.weight": EMBED, "cls.predictions.decoder.bias": "cls.predictions.bias"}
UNTIED = "that differs from the array that it should copy: a model here has one for both. Use other weights."
OURS, LAYER = "blocks.layers", "bert.encoder.layer.{i}"


def huggingface(*, depth: int, width: int, num_classes: int | None = None, **other: Any) -> list[Entry]:
    """Return the layout of `BertForSequenceClassification`, `BertForMaskedLM` or `BertModel`.

    It is the first for a classifier, the second for a model with transform and bias, else `BertModel` without its
    pooler. Heads of these classes that the model lacks may be in a file, and are ignored.

    Args:
        depth, width, num_classes: keys of config.model.
        other: the other keys of config.model.

    Raises:
        ConfigError: the model has an option that these do not have.
    """
    wrong = {key: other[key] for key, value in REQUIRED.items() if other.get(key, value) != value}
    if not other.get("types"):
        wrong["types"] = None
    if num_classes and other.get("pooler_dim") != width:
        wrong["pooler_dim"] = other.get("pooler_dim")
    if bool(other.get("transform")) != bool(other.get("head_bias")):
        wrong |= {key: bool(other.get(key)) for key in ("transform", "head_bias")}
    if wrong:
        shown = ", ".join(f"model.{key}={value!r}" for key, value in wrong.items())
        raise ConfigError(f'{shown}: not supported by the layout "huggingface" of BERT.')
    return [
        Entry(EMBED, ("embed",), same),
        Entry("bert.embeddings.position_embeddings.weight", ("pos_embed",), same),
        Entry("bert.embeddings.token_type_embeddings.weight", ("type_embed",), same),
        *norm("bert.embeddings.LayerNorm", "embed_norm"),
        *_blocks(depth),
        *_heads(classifier=bool(num_classes), masked=bool(other.get("transform"))),
        Entry("bert.embeddings.position_ids", (), same),  # a buffer in old files
    ]


def _blocks(depth: int) -> list[Entry]:
    """Return the entries of the transformer blocks."""
    entries = [
        *linear(f"{LAYER}.attention.output.dense", f"{OURS}.attention.out", matrix(2), layers=depth),
        *norm(f"{LAYER}.attention.output.LayerNorm", f"{OURS}.norm1", layers=depth),
        *linear(f"{LAYER}.intermediate.dense", f"{OURS}.mlp.up", layers=depth),
        *linear(f"{LAYER}.output.dense", f"{OURS}.mlp.down", layers=depth),
        *norm(f"{LAYER}.output.LayerNorm", f"{OURS}.norm2", layers=depth),
    ]
    for part in ("query", "key", "value"):
        entries += linear(f"{LAYER}.attention.self.{part}", f"{OURS}.attention.{part}", layers=depth)
    return entries


def _heads(*, classifier: bool, masked: bool) -> list[Entry]:
    """Return the entries of the heads; those the model lacks, and the tied decoder, are known but not read."""
    pooled = [*linear("bert.pooler.dense", "pooler"), *linear("classifier", "head")]
    masked_lm = [
        *linear("cls.predictions.transform.dense", "transform"),
        *norm("cls.predictions.transform.LayerNorm", "transform_norm"),
        Entry("cls.predictions.bias", ("head_bias",), same),
    ]
    loaded = (pooled if classifier else []) + (masked_lm if masked else [])
    names = [f"cls.{name}" for name in ("predictions.decoder.weight", "predictions.decoder.bias")]
    names += [f"cls.seq_relationship.{name}" for name in ("weight", "bias")]
    names += [entry.theirs for entry in pooled + masked_lm if entry not in loaded]
    unread = {name: Entry(name, (), same) for name in names}
    if masked:
        for name, original in COPIES.items():
            unread[name] = dataclasses.replace(unread[name], refused=UNTIED, copy_of=original)
    return [*loaded, *unread.values()]
