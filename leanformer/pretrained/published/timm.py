"""Settings of timm's models in `config.json`: `model_args`, and those that a registered name stands for (timm 1.0)."""

import re
from collections.abc import Mapping
from typing import Any

from leanformer.pretrained.published.tables import Table


# Layers, widths, heads, MLP ratio and stem width of the registered VOLOs, which cannot be changed by `model_args`.
VOLOS = {
    "volo_d1_224": ((4, 4, 8, 2), (192, 384, 384, 384), (6, 12, 12, 12), 3, 64),
    "volo_d2_224": ((6, 4, 10, 4), (256, 512, 512, 512), (8, 16, 16, 16), 3, 64),
    "volo_d3_224": ((8, 8, 16, 4), (256, 512, 512, 512), (8, 16, 16, 16), 3, 64),
    "volo_d4_224": ((8, 8, 16, 4), (384, 768, 768, 768), (12, 16, 16, 16), 3, 64),
    "volo_d5_224": ((12, 12, 20, 4), (384, 768, 768, 768), (12, 16, 16, 16), 4, 128),
}
# Width, depth and heads of ViTs; width and heads of XCiTs; width, inner width and heads of TNTs; first width, first
# number of heads and depths of DaViTs, whose widths and heads double from stage to stage.
VITS = {"tiny": (192, 12, 3), "small": (384, 12, 6), "base": (768, 12, 12), "large": (1024, 24, 16)}
VITS |= {"huge": (1280, 32, 16)}
XCITS = {"nano": (128, 4), "tiny": (192, 4), "small": (384, 8), "medium": (512, 8), "large": (768, 16)}
TNTS = {"s": (384, 24, 6), "b": (640, 40, 10)}
DAVITS = {"tiny": (96, 3, (1, 1, 3, 1)), "small": (96, 3, (1, 1, 9, 1)), "base": (128, 4, (1, 1, 9, 1))}
DAVITS |= {"large": (192, 6, (1, 1, 9, 1)), "huge": (256, 8, (1, 1, 9, 1)), "giant": (384, 12, (1, 1, 12, 3))}

HARMLESS_WORDS = """
drop_rate pos_drop_rate patch_drop_rate proj_drop_rate attn_drop_rate drop_path_rate weight_init
fix_init device dtype mlp_ratio
"""
HARMLESS = HARMLESS_WORDS.split()  # the MLP ratio is read by `_find_mlp_dim`
CLASSES = {"num_classes": ("num_classes", 1000)}
COMMON = {**CLASSES, "embed_dim": ("width", 768), "depth": ("depth", 12), "in_chans": ("channels", 3)}
COMMON |= {"patch_size": ("patch_size", 16)}
VIT = {**COMMON, "num_heads": ("num_heads", 12), "img_size": ("image_size", 224), "qkv_bias": ("qkv_bias", True)}
XCIT = {**COMMON, "num_heads": ("num_heads", 12), "tokens_norm": ("tokens_norm", False)}
XCIT |= {"cls_attn_layers": ("class_depth", 2)}
TNT = {**COMMON, "num_heads_outer": ("num_heads", 12), "num_heads_inner": ("inner_heads", 4)}
TNT |= {"inner_dim": ("inner_width", 48), "first_stride": ("pixel_stride", 4), "img_size": ("image_size", 224)}
TNT |= {"qkv_bias": ("qkv_bias", False)}
VOLO = {**CLASSES, "layers": ("depth", None), "embed_dims": ("width", None), "num_heads": ("num_heads", None)}
VOLO |= {"img_size": ("image_size", 224), "in_chans": ("channels", 3), "patch_size": ("patch_size", 8)}
VOLO |= {"stem_hidden_dim": ("stem_width", 64), "use_aux_head": ("token_head", True), "qkv_bias": ("qkv_bias", False)}
DAVIT: dict[str, Any] = {
    **CLASSES,
    "depths": ("depth", (1, 1, 3, 1)),
    "embed_dims": ("width", (96, 192, 384, 768)),
    "in_chans": ("channels", 3),
}
DAVIT |= {"num_heads": ("num_heads", (3, 6, 12, 24)), "window_size": ("window_size", 7)}
DAVIT |= {"qkv_bias": ("qkv_bias", True), "norm_eps": ("epsilon", 1e-5)}

PLAIN = {"soft_cap": None, "logit_scale": None, "temperature": None, "qk_norm": None, "rotary": None}
LAYERS = {"norm_layer": None, "act_layer": None}
VIT_FIXED: dict[str, Any] = {
    **LAYERS,
    "qk_norm": False,
    "scale_attn_norm": False,
    "scale_mlp_norm": False,
    "proj_bias": True,
}
VIT_FIXED |= {"pos_embed": "learn", "no_embed_class": False, "reg_tokens": 0, "pre_norm": False, "final_norm": True}
VIT_FIXED |= {"fc_norm": None, "pool_include_prefix": False, "embed_layer": None, "embed_norm_layer": None}
VIT_FIXED |= {"block_fn": None, "mlp_layer": None, "attn_layer": None}
DAVIT_FIXED: dict[str, Any] = {
    "norm_layer": "layernorm2d",
    "norm_layer_cl": "layernorm",
    "attn_types": ("spatial", "channel"),
}
DAVIT_FIXED |= {"ffn": True, "cpe_act": False, "down_kernel_size": 2, "channel_attn_v2": False, "named_blocks": False}
DAVIT_FIXED |= {"head_norm_first": False, "global_pool": "avg"}
VOLO_FIXED: dict[str, Any] = {
    "downsamples": (True, False, False, False),
    "outlook_attention": (True, False, False, False),
}
VOLO_FIXED |= {"pooling_scale": 2, "global_pool": "token", "norm_layer": None}


def _find_mlp_dim(values: Mapping[str, Any], default: float | int) -> Any:
    """Return the hidden dimension of the MLP, one per stage if there are stages."""
    ratio, widths = values.get("mlp_ratio", default), values.get("embed_dim", values.get("embed_dims"))
    several = isinstance(widths, list | tuple)
    sizes = [int(width * ratio) for width in (widths if several else [widths])]
    return tuple(sizes) if several else sizes[0]


def _of_vit(values: Mapping[str, Any]) -> dict[str, Any]:
    pool = {"token": "token", "avg": "mean"}.get(values.get("global_pool", "token"), values.get("global_pool"))
    derived = {"mlp_dim": _find_mlp_dim(values, 4.0), "layer_scale": values.get("init_values") is not None}
    return derived | {"pool": pool, "distilled": values.get("distilled", False)}


def _of_xcit(values: Mapping[str, Any]) -> dict[str, Any]:
    derived = {"mlp_dim": _find_mlp_dim(values, 4.0), "layer_scale": values.get("eta", 1.0) is not None}
    return derived | {"class_heads": values["num_heads"]}


def _of_tnt(values: Mapping[str, Any]) -> dict[str, Any]:
    layout = "original" if values.get("legacy", False) else "patchwise"
    return {"mlp_dim": _find_mlp_dim(values, 4.0), "layout": layout, "inner_mlp_dim": 4 * values["inner_dim"]}


def _of_volo(values: Mapping[str, Any]) -> dict[str, Any]:
    layers = [*values.get("post_layers", ("ca", "ca"))]
    derived = {"mlp_dim": _find_mlp_dim(values, 3.0), "class_heads": values["num_heads"][-1], "stem_stride": 2}
    return derived | {"class_depth": len(layers) if {*layers} <= {"ca"} else tuple(layers)}


def _of_davit(values: Mapping[str, Any]) -> dict[str, Any]:
    widths = zip(values["embed_dims"], values["num_heads"], strict=True)
    return {"mlp_dim": _find_mlp_dim(values, 4), "channel_head_dim": tuple(width // heads for width, heads in widths)}


NO_SIZE = [*HARMLESS, "img_size"]  # models without learned positions
TABLES = {
    "vit": Table(
        *("vit", VIT, PLAIN | {"attention": "softmax", "epsilon": 1e-6}, VIT_FIXED),
        # Images have the size of the config, for which dynamic sizes change nothing.
        [*HARMLESS, "init_values", "global_pool", "class_token", "distilled", "dynamic_img_size", "dynamic_img_pad"],
        _of_vit,
    ),
    "xcit": Table(
        *("xcit", XCIT, PLAIN | {"attention": "cross_covariance", "epsilon": 1e-6, "qkv_bias": True}),
        LAYERS | {"qkv_bias": True, "use_pos_embed": True, "global_pool": "token"},
        [*NO_SIZE, "eta"],
        _of_xcit,
    ),
    "tnt": Table(
        *("tnt", TNT, PLAIN | {"attention": "softmax"}, {"norm_layer": None, "global_pool": "token"}),
        [*HARMLESS, "legacy"],
        _of_tnt,
    ),
    "volo": Table(
        *("volo", VOLO, PLAIN | {"attention": "softmax"}, VOLO_FIXED),
        [*HARMLESS, "post_layers", "use_mix_token"],
        _of_volo,
    ),
    "davit": Table("davit", DAVIT, PLAIN | {"attention": "softmax"}, DAVIT_FIXED, NO_SIZE, _of_davit),
}


def _name_vit(match: re.Match[str]) -> dict[str, Any]:
    width, depth, heads = VITS[match["size"]]
    args = {"embed_dim": width, "depth": depth, "num_heads": heads, "patch_size": int(match["patch"])}
    return args | {"img_size": int(match["image"]), "distilled": bool(match["distilled"])}


def _name_xcit(match: re.Match[str]) -> dict[str, Any]:
    width, heads = XCITS[match["size"]]
    args = {"embed_dim": width, "num_heads": heads, "depth": int(match["depth"]), "patch_size": int(match["patch"])}
    return args | {"tokens_norm": match["size"] != "nano"}


def _name_tnt(match: re.Match[str]) -> dict[str, Any]:
    width, inner, heads = TNTS[match["size"]]
    return {"embed_dim": width, "inner_dim": inner, "num_heads_outer": heads, "legacy": bool(match["legacy"])}


def _name_volo(match: re.Match[str]) -> dict[str, Any]:
    names = ("layers", "embed_dims", "num_heads", "mlp_ratio", "stem_hidden_dim")
    args = dict(zip(names, VOLOS[f"{match['size']}_224"], strict=True))
    return args | {"img_size": int(match["image"])}


def _name_davit(match: re.Match[str]) -> dict[str, Any]:
    width, heads, depths = DAVITS[match["size"]]
    sizes = {"embed_dims": tuple(width << i for i in range(4)), "num_heads": tuple(heads << i for i in range(4))}
    return sizes | {"depths": depths}


NAMES = {  # patterns of registered names
    r"(vit|deit)_(?P<size>tiny|small|base|large|huge)(?P<distilled>_distilled)?_patch(?P<patch>\d+)_(?P<image>\d+)": (
        *("vit", _name_vit),
    ),
    r"xcit_(?P<size>nano|tiny|small|medium|large)_(?P<depth>12|24)_p(?P<patch>8|16)_\d+": ("xcit", _name_xcit),
    r"tnt_(?P<size>s|b)(?P<legacy>_legacy)?_patch16_224": ("tnt", _name_tnt),
    r"(?P<size>volo_d[1-5])_(?P<image>\d+)": ("volo", _name_volo),
    r"davit_(?P<size>tiny|small|base|large|huge|giant)": ("davit", _name_davit),
}


def find(architecture: str) -> tuple[Table, dict[str, Any]] | None:
    """Return the `Table` of the keys of a model registered in timm, and the arguments that its name implies.

    The arguments are {name: value} of timm's constructor. A tag after a dot of the name is ignored. None for an unknown
    name, and for models of timm that leanformer has no architecture for.

    Args:
        architecture: registered name.

    >>> find("vit_small_patch16_224.augreg_in1k")[1]["num_heads"]
    6
    """
    name = architecture.partition(".")[0]
    for pattern, (table, arguments) in NAMES.items():
        if match := re.fullmatch(pattern, name):
            return TABLES[table], arguments(match)
    return None


def flatten(content: Mapping[str, Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """Return {argument: value} of timm's constructor for the model that a published config describes.

    The arguments are `named`, replaced by what `pretrained_cfg` implies, then by `num_classes`, then by `model_args`.

    Args:
        content: the published config.
        named: arguments that its registered name implies, from `find`; {} for an unknown name.
    """
    about = content.get("pretrained_cfg")
    about = about if isinstance(about, dict) else {}
    args = dict(named)
    size = about.get("input_size")
    if isinstance(size, list) and len(size) == 3:
        args |= {"in_chans": size[0]} | ({"img_size": size[1:]} if about.get("fixed_input_size") else {})
    args |= {"global_pool": about["global_pool"]} if about.get("global_pool") else {}
    number = content.get("num_classes", about.get("num_classes"))
    args |= {} if number is None else {"num_classes": number}
    given = content.get("model_args")
    return args | (given if isinstance(given, dict) else {})
