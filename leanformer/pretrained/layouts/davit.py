"""Layout of timm's DaViT."""

from collections.abc import Sequence
from typing import Any

from leanformer.pretrained.layouts.entries import Entry, conv, flat, linear, matrix, mlp, norm


# The two blocks of a unit, and the roles of the thirds of their fused Linear. In channel attention the last two form
# the attention matrix, which mixes the first.
BLOCKS = {"spatial": ("query", "key", "value"), "channel": ("value", "query", "key")}


def timm(*, depth: Sequence[int], qkv_bias: bool = True, **_: Any) -> list[Entry]:
    """Return the layout of timm's `DaVit`, for a model with these arguments.

    `depth` is the number of pairs of a spatial and a channel block in each stage.
    """
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
        for j, (kind, thirds) in enumerate(BLOCKS.items()):
            theirs, ours = f"stages.{i}.blocks.{{i}}.{j}", f"stage{i + 1}.layers.{kind}"
            entries += _block(theirs, ours, units, thirds, qkv_bias)
    return entries


def _block(theirs: str, ours: str, units: int, thirds: tuple[str, ...], qkv_bias: bool) -> list[Entry]:
    """Return the entries of the blocks of one type in one stage."""
    kernels, biases = (tuple(f"{ours}.attention.{third}.{leaf}" for third in thirds) for leaf in ("kernel", "bias"))
    entries = [
        Entry(f"{theirs}.attn.qkv.weight", kernels, matrix(), units),
        *linear(f"{theirs}.attn.proj", f"{ours}.attention.out", matrix(2), layers=units),
        *mlp(f"{theirs}.mlp", f"{ours}.mlp", layers=units),
    ]
    if qkv_bias:
        entries.append(Entry(f"{theirs}.attn.qkv.bias", biases, flat, units))
    for n in (1, 2):
        entries += norm(f"{theirs}.norm{n}", f"{ours}.norm{n}", layers=units)
        entries += linear(f"{theirs}.cpe{n}.proj", f"{ours}.code{n}", conv(3, channels=1), layers=units)
    return entries
