"""Layout of timm's XCiT."""

from typing import Any

from leanformer.pretrained.layouts.entries import Entry, attention, batch_norm, conv, linear, matrix, mlp, norm, same


def timm(*, depth: int, patch_size: int, class_depth: int = 2, **_: Any) -> list[Entry]:
    """Return the layout of timm's `Xcit`, for a model with these arguments.

    The stem has log2(patch size) convolutions: 4 for patches of 16 pixels, 3 for 8, the sizes that timm has.
    """
    entries = [
        Entry("cls_token", ("cls_token",), same),
        *linear("pos_embed.token_projection", "pos_embed", conv(1)),
        *_blocks("blocks.{i}", "blocks.layers", depth),
        *_class_blocks("cls_attn_blocks.{i}", "class_blocks.layers", class_depth),
        *norm("norm", "norm"),
        *linear("head", "head"),
    ]
    for i in range(patch_size.bit_length() - 1):  # every second module of timm's stem is a GELU
        entries += linear(f"patch_embed.proj.{2 * i}.0", f"patch_embed.conv{i + 1}", conv(3), bias=False)
        entries += batch_norm(f"patch_embed.proj.{2 * i}.1", f"patch_embed.norm{i + 1}")
    return entries


def _blocks(theirs: str, ours: str, layers: int) -> list[Entry]:
    """Return the entries of the cross-covariance blocks."""
    local = f"{theirs}.local_mp"
    return [
        *attention(f"{theirs}.attn", f"{ours}.attention", layers=layers),
        Entry(f"{theirs}.attn.temperature", (f"{ours}.attention.temperature",), same, layers),
        *linear(f"{local}.conv1", f"{ours}.local.conv1", conv(3, channels=1), layers=layers),
        *batch_norm(f"{local}.bn", f"{ours}.local.norm", layers=layers),
        *linear(f"{local}.conv2", f"{ours}.local.conv2", conv(3, channels=1), layers=layers),
        *mlp(f"{theirs}.mlp", f"{ours}.mlp", layers=layers),
        *_norms_and_scales(theirs, ours, layers, "123"),
    ]


def _class_blocks(theirs: str, ours: str, layers: int) -> list[Entry]:
    """Return the entries of the class-attention blocks."""
    entries = [
        *linear(f"{theirs}.attn.proj", f"{ours}.class_attention.out", matrix(2), layers=layers),
        *mlp(f"{theirs}.mlp", f"{ours}.mlp", layers=layers),
        *_norms_and_scales(theirs, ours, layers, "12"),
    ]
    for name in ("query", "key", "value"):
        entries += linear(f"{theirs}.attn.{name[0]}", f"{ours}.class_attention.{name}", layers=layers)
    return entries


def _norms_and_scales(theirs: str, ours: str, layers: int, numbers: str) -> list[Entry]:
    """Return the entries of the norms and layer scales of a block."""
    entries = [entry for n in numbers for entry in norm(f"{theirs}.norm{n}", f"{ours}.norm{n}", layers=layers)]
    return entries + [Entry(f"{theirs}.gamma{n}", (f"{ours}.gamma{n}",), same, layers) for n in numbers]
