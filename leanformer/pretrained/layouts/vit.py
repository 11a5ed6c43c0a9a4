"""Layouts of timm's and Hugging Face's ViT and DeiT, and of DINOv2's backbone."""

from typing import Any

from leanformer.pretrained.layouts.entries import Entry, attention, conv, linear, matrix, mlp, norm, same


def timm(*, depth: int, patch_size: int, pool: str = "token", distilled: bool = False, **other: Any) -> list[Entry]:
    """Return the layout of timm's `VisionTransformer`, or with `distilled` of `VisionTransformerDistilled`.

    Args:
        depth, patch_size, pool, distilled: keys of config.model.
        other: the other keys of config.model, of which layer_scale is read.
    """
    ours = "blocks.layers"
    entries = [
        *linear("patch_embed.proj", "patch_embed", conv(patch_size)),
        Entry("pos_embed", ("pos_embed",), same),
        *norm("blocks.{i}.norm1", f"{ours}.norm1", layers=depth),
        *attention("blocks.{i}.attn", f"{ours}.attention", layers=depth),
        *norm("blocks.{i}.norm2", f"{ours}.norm2", layers=depth),
        *mlp("blocks.{i}.mlp", f"{ours}.mlp", layers=depth),
        *norm("fc_norm" if pool == "mean" else "norm", "norm"),
        *linear("head", "head"),
    ]
    if pool == "token":
        entries.append(Entry("cls_token", ("cls_token",), same))
    if distilled:
        entries += [Entry("dist_token", ("dist_token",), same), *linear("head_dist", "head_dist")]
    if other.get("layer_scale") is not None:
        entries += [Entry(f"blocks.{{i}}.ls{n}.gamma", (f"{ours}.gamma{n}",), same, depth) for n in (1, 2)]
    return entries


def huggingface(
    *, depth: int, patch_size: int, distilled: bool = False, layer_scale: float | None = None, **_: Any
) -> list[Entry]:
    """Return the layout of Hugging Face's `ViTForImageClassification`, for a model with these arguments.

    With a distillation token it is `DeiTForImageClassificationWithTeacher`, and with layer scale `Dinov2Model`, a
    backbone without a head, which needs `new_head`. The names are those that `save_pretrained` writes to files;
    transformers 5 has others in memory. Published configs of ViT and DeiT have `layer_norm_eps` 1e-12, while the
    default here is 1e-6, as in timm and DINOv2.
    """
    dino = layer_scale is not None
    prefix = "" if dino else "deit." if distilled else "vit."
    ours, layer = "blocks.layers", f"{prefix}encoder.layer.{{i}}"
    names = ("layernorm_before", "layernorm_after", "intermediate.dense", "output.dense")
    names = ("norm1", "norm2", "mlp.fc1", "mlp.fc2") if dino else names
    entries = [
        Entry(f"{prefix}embeddings.cls_token", ("cls_token",), same),
        Entry(f"{prefix}embeddings.position_embeddings", ("pos_embed",), same),
        *linear(f"{prefix}embeddings.patch_embeddings.projection", "patch_embed", conv(patch_size)),
        *norm(f"{layer}.{names[0]}", f"{ours}.norm1", layers=depth),
        *norm(f"{layer}.{names[1]}", f"{ours}.norm2", layers=depth),
        *linear(f"{layer}.{names[2]}", f"{ours}.mlp.up", layers=depth),
        *linear(f"{layer}.{names[3]}", f"{ours}.mlp.down", layers=depth),
        *linear(f"{layer}.attention.output.dense", f"{ours}.attention.out", matrix(2), layers=depth),
        *norm(f"{prefix}layernorm", "norm"),
    ]
    for part in ("query", "key", "value"):
        entries += linear(f"{layer}.attention.attention.{part}", f"{ours}.attention.{part}", layers=depth)
    if dino:
        entries += [Entry(f"{layer}.layer_scale{n}.lambda1", (f"{ours}.gamma{n}",), same, depth) for n in (1, 2)]
        mask = Entry("embeddings.mask_token", (), same)  # used only by its training objective
        return [*entries, mask, *linear("classifier", "head")]
    if distilled:
        entries.append(Entry(f"{prefix}embeddings.distillation_token", ("dist_token",), same))
        return entries + linear("cls_classifier", "head") + linear("distillation_classifier", "head_dist")
    return entries + linear("classifier", "head")
