"""BERT as Hugging Face publishes it (Devlin et al. 2019): its blocks, which hold the same arrays as ours, post-norm."""

from typing import Any

from leanformer.pretrained.layouts.entries import Entry, linear, matrix, norm, same


EMBEDDINGS = ("word_embeddings.weight", "position_embeddings.weight", "token_type_embeddings.weight", "position_ids")


def huggingface(*, depth: int, **other: Any) -> list[Entry]:
    """The blocks of `BertModel`; embeddings and pooler are known and not read."""
    ours, layer = "blocks.layers", "encoder.layer.{i}"
    unread = [*(f"embeddings.{name}" for name in (*EMBEDDINGS, "LayerNorm.weight", "LayerNorm.bias"))]
    unread += ["pooler.dense.weight", "pooler.dense.bias"]
    entries = [
        *linear(f"{layer}.attention.output.dense", f"{ours}.attention.out", matrix(2), layers=depth),
        *norm(f"{layer}.attention.output.LayerNorm", f"{ours}.norm1", layers=depth),
        *linear(f"{layer}.intermediate.dense", f"{ours}.mlp.up", layers=depth),
        *linear(f"{layer}.output.dense", f"{ours}.mlp.down", layers=depth),
        *norm(f"{layer}.output.LayerNorm", f"{ours}.norm2", layers=depth),
    ]
    for part in ("query", "key", "value"):
        entries += linear(f"{layer}.attention.self.{part}", f"{ours}.attention.{part}", layers=depth)
    return entries + [Entry(name, (), same, optional=True) for name in unread]
