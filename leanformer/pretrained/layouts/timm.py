"""Layouts of timm's image models. Each function takes the arguments of the model."""

from collections.abc import Sequence
from typing import Any

from leanformer.pretrained.layouts.entries import Entry, batch_norm, conv, flat, linear, matrix, norm, same


QKV = ("query", "key", "value")
# The two blocks of a unit of DaViT, and the roles of the thirds of their fused Linear. In channel attention the last
# two form the attention matrix, which mixes the first.
DAVIT_BLOCKS = {"spatial": QKV, "channel": ("value", "query", "key")}


def _attention(theirs: str, ours: str, layers: int, *, bias: bool = True, thirds: Sequence[str] = QKV) -> list[Entry]:
    """Entries of `qkv`, a fused Linear of query, key and value, with or without bias, and of `proj`."""
    entries = [Entry(f"{theirs}.qkv.weight", tuple(f"{ours}.{name}.kernel" for name in thirds), matrix(), layers)]
    if bias:
        entries.append(Entry(f"{theirs}.qkv.bias", tuple(f"{ours}.{name}.bias" for name in thirds), flat, layers))
    return entries + linear(f"{theirs}.proj", f"{ours}.out", matrix(2), layers=layers)


def _mlp(theirs: str, ours: str, layers: int) -> list[Entry]:
    return linear(f"{theirs}.fc1", f"{ours}.up", layers=layers) + linear(f"{theirs}.fc2", f"{ours}.down", layers=layers)


def _norms_and_mlp(theirs: str, ours: str, layers: int) -> list[Entry]:
    """Entries of a block without its attention."""
    return [
        *norm(f"{theirs}.norm1", f"{ours}.norm1", layers=layers),
        *norm(f"{theirs}.norm2", f"{ours}.norm2", layers=layers),
        *_mlp(f"{theirs}.mlp", f"{ours}.mlp", layers),
    ]


def vit(
    *,
    depth: int,
    patch_size: int,
    pool: str = "token",
    distilled: bool = False,
    layer_scale: float | None = None,
    **_: Any,
) -> list[Entry]:
    """`VisionTransformer`, or with `distilled` `VisionTransformerDistilled`."""
    ours = "blocks.layers"
    entries = [
        *linear("patch_embed.proj", "patch_embed", conv(patch_size)),
        Entry("pos_embed", ("pos_embed",), same),
        *_attention("blocks.{i}.attn", f"{ours}.attention", depth),
        *_norms_and_mlp("blocks.{i}", ours, depth),
        *norm("fc_norm" if pool == "mean" else "norm", "norm"),
        *linear("head", "head"),
    ]
    if pool == "token":
        entries.append(Entry("cls_token", ("cls_token",), same))
    if distilled:
        entries += [Entry("dist_token", ("dist_token",), same), *linear("head_dist", "head_dist")]
    if layer_scale is not None:
        entries += [Entry(f"blocks.{{i}}.ls{n}.gamma", (f"{ours}.gamma{n}",), same, depth) for n in (1, 2)]
    return entries


def xcit(*, depth: int, patch_size: int, class_depth: int = 2, **_: Any) -> list[Entry]:
    """`Xcit`, whose stem has log2(patch size) convolutions: 4 for patches of 16 pixels, 3 for 8, the sizes it has."""
    theirs, ours = "blocks.{i}", "blocks.layers"
    entries = [
        Entry("cls_token", ("cls_token",), same),
        *linear("pos_embed.token_projection", "pos_embed", conv(1)),
        *_attention(f"{theirs}.attn", f"{ours}.attention", depth),
        Entry(f"{theirs}.attn.temperature", (f"{ours}.attention.temperature",), same, depth),
        *linear(f"{theirs}.local_mp.conv1", f"{ours}.local.conv1", conv(3, channels=1), layers=depth),
        *batch_norm(f"{theirs}.local_mp.bn", f"{ours}.local.norm", layers=depth),
        *linear(f"{theirs}.local_mp.conv2", f"{ours}.local.conv2", conv(3, channels=1), layers=depth),
        *_norms_and_mlp(theirs, ours, depth),
        *norm(f"{theirs}.norm3", f"{ours}.norm3", layers=depth),
        *_layer_scales(theirs, ours, depth, 3),
        *norm("norm", "norm"),
        *linear("head", "head"),
    ]
    theirs, ours = "cls_attn_blocks.{i}", "class_blocks.layers"
    entries += [
        *linear(f"{theirs}.attn.proj", f"{ours}.class_attention.out", matrix(2), layers=class_depth),
        *_norms_and_mlp(theirs, ours, class_depth),
        *_layer_scales(theirs, ours, class_depth, 2),
    ]
    for name in QKV:
        entries += linear(f"{theirs}.attn.{name[0]}", f"{ours}.class_attention.{name}", layers=class_depth)
    for i in range(patch_size.bit_length() - 1):  # every second module of timm's stem is a GELU
        entries += linear(f"patch_embed.proj.{2 * i}.0", f"patch_embed.conv{i + 1}", conv(3), bias=False)
        entries += batch_norm(f"patch_embed.proj.{2 * i}.1", f"patch_embed.norm{i + 1}")
    return entries


def _layer_scales(theirs: str, ours: str, layers: int, number: int) -> list[Entry]:
    return [Entry(f"{theirs}.gamma{n}", (f"{ours}.gamma{n}",), same, layers) for n in range(1, number + 1)]


def volo(
    *,
    depth: Sequence[int],
    patch_size: int,
    class_depth: int = 2,
    stem_stride: int = 2,
    token_head: bool = True,
    **_: Any,
) -> list[Entry]:
    """`VOLO`; `depth` has one number per stage."""
    entries = [
        Entry("cls_token", ("cls_token",), same),
        Entry("pos_embed", ("pos_embed",), same),
        *linear("patch_embed.proj", "patch_embed.patches", conv(patch_size // stem_stride)),
        *linear("network.1.proj", "downsample", conv(2)),
        *norm("norm", "norm"),
        *linear("head", "head"),
    ]
    for i, size in enumerate((7, 3, 3)):
        entries += linear(f"patch_embed.conv.{3 * i}", f"patch_embed.conv{i + 1}", conv(size), bias=False)
        entries += batch_norm(f"patch_embed.conv.{3 * i + 1}", f"patch_embed.norm{i + 1}")
    for stage, layers in enumerate(depth):
        # In timm's list of modules, the downsampling is between stages 1 and 2.
        theirs, ours = f"network.{stage + (stage > 0)}.{{i}}", f"stage{stage + 1}.layers"
        entries += _norms_and_mlp(theirs, ours, layers)
        attention = _attention if stage else _outlook
        entries += attention(f"{theirs}.attn", f"{ours}.attention", layers, bias=False)
    theirs, ours = "post_network.{i}", "class_blocks.layers"
    key_value = tuple(f"{ours}.class_attention.{name}.kernel" for name in ("key", "value"))
    entries += [
        *_norms_and_mlp(theirs, ours, class_depth),
        *linear(f"{theirs}.attn.q", f"{ours}.class_attention.query", bias=False, layers=class_depth),
        Entry(f"{theirs}.attn.kv.weight", key_value, matrix(), class_depth),
        *linear(f"{theirs}.attn.proj", f"{ours}.class_attention.out", matrix(2), layers=class_depth),
    ]
    return entries + (linear("aux_head", "aux_head") if token_head else [])


def _outlook(theirs: str, ours: str, layers: int, *, bias: bool) -> list[Entry]:
    """Entries of VOLO's outlook attention, whose values have a bias or not."""
    return [
        *linear(f"{theirs}.v", f"{ours}.value", bias=bias, layers=layers),
        *linear(f"{theirs}.attn", f"{ours}.weights", layers=layers),
        *linear(f"{theirs}.proj", f"{ours}.out", matrix(2), layers=layers),
    ]


def tnt(
    *, depth: int, patch_size: int, inner_width: int, pixel_stride: int = 4, layout: str = "original", **_: Any
) -> list[Entry]:
    """`TNT`: "original" has `legacy=True`, as timm up to 1.0.15; "patchwise" is timm from 1.0.16 on."""
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
    for name, suffix, norm1, norm2, their_mlp in (
        ("inner", "in", "norm_in", "norm_mlp_in", "mlp_in"),
        ("outer", "out", "norm_out", "norm_mlp", "mlp"),
    ):
        attention, part = f"{block}.attn_{suffix}", f"{ours}.{name}"
        joint = (f"{part}.attention.query.kernel", f"{part}.attention.key.kernel")
        entries += [
            *norm(f"{block}.{norm1}", f"{part}.norm1", layers=depth),
            *norm(f"{block}.{norm2}", f"{part}.norm2", layers=depth),
            Entry(f"{attention}.qk.weight", joint, matrix(), depth),
            *linear(f"{attention}.v", f"{part}.attention.value", bias=False, layers=depth),
            *linear(f"{attention}.proj", f"{part}.attention.out", matrix(2), layers=depth),
            *_mlp(f"{block}.{their_mlp}", f"{part}.mlp", depth),
        ]
    return entries


def davit(*, depth: Sequence[int], qkv_bias: bool = True, **_: Any) -> list[Entry]:
    """`DaVit`; `depth` is the number of pairs of a spatial and a channel block in each stage."""
    entries = [
        *linear("stem.conv", "stem", conv(7)),
        *norm("stem.norm", "stem_norm"),
        *norm("head.norm", "norm"),
        *linear("head.fc", "head"),
    ]
    for i, units in enumerate(depth):
        if i:
            entries += norm(f"stages.{i}.downsample.norm", f"down{i + 1}.norm")
            entries += linear(f"stages.{i}.downsample.conv", f"down{i + 1}.conv", conv(2))
        for j, (kind, thirds) in enumerate(DAVIT_BLOCKS.items()):
            theirs, ours = f"stages.{i}.blocks.{{i}}.{j}", f"stage{i + 1}.layers.{kind}"
            entries += _attention(f"{theirs}.attn", f"{ours}.attention", units, bias=qkv_bias, thirds=thirds)
            entries += _norms_and_mlp(theirs, ours, units)
            for n in (1, 2):
                entries += linear(f"{theirs}.cpe{n}.proj", f"{ours}.code{n}", conv(3, channels=1), layers=units)
    return entries
