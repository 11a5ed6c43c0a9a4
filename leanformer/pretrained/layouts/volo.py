"""Layout of timm's VOLO."""

from collections.abc import Sequence
from typing import Any

from leanformer.pretrained.layouts.entries import Entry, attention, batch_norm, conv, linear, matrix, mlp, norm, same


def timm(
    *,
    depth: Sequence[int],
    patch_size: int,
    class_depth: int = 2,
    stem_stride: int = 2,
    token_head: bool = True,
    **_: Any,
) -> list[Entry]:
    """Return the layout of timm's `VOLO`, for a model with these arguments; `depth` has one number per stage."""
    entries = [
        Entry("cls_token", ("cls_token",), same),
        Entry("pos_embed", ("pos_embed",), same),
        *linear("patch_embed.proj", "patch_embed.patches", conv(patch_size // stem_stride)),
        *linear("network.1.proj", "downsample", conv(2)),
        *norm("norm", "norm"),
        *linear("head", "head"),
    ]
    for place, ours in enumerate(("1", "2", "3")):
        entries += linear(
            f"patch_embed.conv.{3 * place}", f"patch_embed.conv{ours}", conv(7 if place == 0 else 3), bias=False
        )
        entries += batch_norm(f"patch_embed.conv.{3 * place + 1}", f"patch_embed.norm{ours}")
    for stage, layers in enumerate(depth):
        # In timm's list of modules, the downsampling is between stages 1 and 2.
        entries += _block(f"network.{stage + (stage > 0)}.{{i}}", f"stage{stage + 1}.layers", layers, outlook=not stage)
    entries += _class_blocks(class_depth)
    return entries + (linear("aux_head", "aux_head") if token_head else [])


def _norms_and_mlp(theirs: str, ours: str, layers: int) -> list[Entry]:
    """Return the entries of a block without its attention."""
    return [
        *norm(f"{theirs}.norm1", f"{ours}.norm1", layers=layers),
        *norm(f"{theirs}.norm2", f"{ours}.norm2", layers=layers),
        *mlp(f"{theirs}.mlp", f"{ours}.mlp", layers=layers),
    ]


def _block(theirs: str, ours: str, layers: int, *, outlook: bool) -> list[Entry]:
    """Return the entries of the blocks of one stage, with outlook attention or self-attention."""
    entries = _norms_and_mlp(theirs, ours, layers)
    if not outlook:
        return entries + attention(f"{theirs}.attn", f"{ours}.attention", bias=False, layers=layers)
    return [
        *entries,
        *linear(f"{theirs}.attn.v", f"{ours}.attention.value", bias=False, layers=layers),
        *linear(f"{theirs}.attn.attn", f"{ours}.attention.weights", layers=layers),
        *linear(f"{theirs}.attn.proj", f"{ours}.attention.out", matrix(2), layers=layers),
    ]


def _class_blocks(layers: int) -> list[Entry]:
    """Return the entries of the class-attention blocks."""
    theirs, ours = "post_network.{i}", "class_blocks.layers"
    key_value = tuple(f"{ours}.class_attention.{name}.kernel" for name in ("key", "value"))
    return [
        *_norms_and_mlp(theirs, ours, layers),
        *linear(f"{theirs}.attn.q", f"{ours}.class_attention.query", bias=False, layers=layers),
        Entry(f"{theirs}.attn.kv.weight", key_value, matrix(), layers),
        *linear(f"{theirs}.attn.proj", f"{ours}.class_attention.out", matrix(2), layers=layers),
    ]
