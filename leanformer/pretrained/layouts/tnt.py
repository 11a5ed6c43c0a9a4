"""Layouts of timm's TNT, original and patchwise."""

from typing import Any

from leanformer.pretrained.layouts.entries import Entry, conv, linear, matrix, mlp, norm, same


def timm(
    *, depth: int, patch_size: int, inner_width: int, pixel_stride: int = 4, layout: str = "original", **_: Any
) -> list[Entry]:
    """Return the layout of timm's `TNT`, for a model with these arguments.

    The layout "original" is that of `legacy=True` and of timm up to 1.0.15, "patchwise" that of 1.0.16 and later.
    """
    block, ours, patchwise = "blocks.{i}", "blocks.layers", layout == "patchwise"
    entries = [
        *linear("pixel_embed.proj", "pixel_embed", conv(7)),
        Entry("pixel_pos", ("pixel_pos",), conv(patch_size // pixel_stride, channels=inner_width)),
        *norm("norm1_proj", "patch_embed.norm1"),
        *linear("proj", "patch_embed.linear"),
        *norm("norm2_proj", "patch_embed.norm2"),
        Entry("cls_token", ("cls_token",), same),
        Entry("patch_pos", ("pos_embed",), same),
        *norm(f"{block}.norm1_proj", f"{ours}.injection.norm1", layers=depth),
        *linear(f"{block}.proj", f"{ours}.injection.linear", bias=not patchwise, layers=depth),
        *norm("norm", "norm"),
        *linear("head", "head"),
    ]
    if patchwise:
        entries += norm(f"{block}.norm2_proj", f"{ours}.injection.norm2", layers=depth)
    for name, their_norms, their_mlp, suffix in (
        ("inner", ("norm_in", "norm_mlp_in"), "mlp_in", "in"),
        ("outer", ("norm_out", "norm_mlp"), "mlp", "out"),
    ):
        part = f"{ours}.{name}"
        for i, their_norm in enumerate(their_norms, 1):
            entries += norm(f"{block}.{their_norm}", f"{part}.norm{i}", layers=depth)
        entries += _attention(f"{block}.attn_{suffix}", f"{part}.attention", depth)
        entries += mlp(f"{block}.{their_mlp}", f"{part}.mlp", layers=depth)
    return entries


def _attention(theirs: str, ours: str, layers: int) -> list[Entry]:
    """Return the entries of attention: queries and keys in one Linear, values in another, both without bias."""
    joint = (f"{ours}.query.kernel", f"{ours}.key.kernel")
    return [
        Entry(f"{theirs}.qk.weight", joint, matrix(), layers),
        *linear(f"{theirs}.v", f"{ours}.value", bias=False, layers=layers),
        *linear(f"{theirs}.proj", f"{ours}.out", matrix(2), layers=layers),
    ]
