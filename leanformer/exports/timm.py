"""`config.json` of timm's models, from our config, for `timm.create_model("local-dir:FOLDER", pretrained=True)`.

A registered name is built with `model_args`. Of timm's models only the ViT takes a class of attention, so that heads of
any dimension need a class of the user's; in the other models num_heads x head_dim is the width.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from leanformer.errors import ConfigError
from leanformer.exports import OTHERS, Description, check_keys, check_total_width, complete, plain_attention
from leanformer.pretrained.published import VOLOS


NAME = "timm"


def describe(arguments: Mapping[str, Any], *_: Any, **__: Any) -> Description:
    """Return the model of timm that computes what a model of leanformer does; only `arguments` count."""
    writers = {"vit": _vit, "xcit": _xcit, "tnt": _tnt, "davit": _davit, "volo": _volo}
    if arguments["name"] not in writers:
        raise ConfigError(f'model.name="{arguments["name"]}": {NAME} has no such model. {OTHERS}')
    values = complete(arguments)
    name, model_args, head_dim = writers[arguments["name"]](values)
    config = {"architecture": name, "num_classes": values["num_classes"]}
    config["model_args"] = {key: list(x) if isinstance(x, tuple) else x for key, x in model_args.items()}
    return Description(NAME, name, config, head_dim=head_dim)


def _mlp_ratio(mlp_dim: int, width: int) -> float:
    """Return the factor for which timm's int(width * factor) is the hidden dimension of the MLP."""
    ratio = mlp_dim / width
    return ratio if int(width * ratio) == mlp_dim else math.nextafter(ratio, math.inf)


def _uniform_ratio(pairs: Sequence[tuple[int, int]], model: str) -> float:
    ratio = _mlp_ratio(*pairs[0])
    if wrong := [mlp_dim for mlp_dim, width in pairs if int(width * ratio) != mlp_dim]:
        raise ConfigError(f"mlp_dim={wrong[0]}: {model} of {NAME} has one ratio of MLP to width. {OTHERS}")
    return ratio


def _check(values: Mapping[str, Any], taken: Sequence[str], model: str, **fixed: Any) -> None:
    common = ("image_size", "channels", "num_classes", "width", "depth", "num_heads", "head_dim", "mlp_dim")
    check_keys(values, (*common, *taken), plain_attention(values) | fixed, NAME, model)


def _common(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **{"img_size": values["image_size"], "patch_size": values["patch_size"], "in_chans": values["channels"]},
        **{"embed_dim": values["width"], "depth": values["depth"]},
    }


def _vit(values: Mapping[str, Any]) -> tuple[str, dict[str, Any], int | None]:
    _check(values, ("patch_size", "pool", "distilled", "layer_scale"), "VisionTransformer", epsilon=1e-6)
    args = _common(values) | {"num_heads": values["num_heads"], "init_values": values["layer_scale"]}
    args["mlp_ratio"] = _mlp_ratio(values["mlp_dim"], values["width"])
    args |= {"global_pool": "avg", "class_token": False} if values["pool"] == "mean" else {}
    lean = values["num_heads"] * values["head_dim"] != values["width"]
    name = "deit_base_distilled_patch16_224" if values["distilled"] else "vit_base_patch16_224"
    return name, args, values["head_dim"] if lean else None


def _xcit(values: Mapping[str, Any]) -> tuple[str, dict[str, Any], None]:
    taken = ("patch_size", "layer_scale", "tokens_norm", "class_depth", "class_head_dim")
    fixed = {"attention": "cross_covariance", "class_heads": values["num_heads"]}
    values = dict(values) | {"class_mlp_dim": values["class_mlp_dim"] or values["mlp_dim"]}
    check_total_width(values, NAME, "Xcit")
    _check(values, taken, "Xcit", class_mlp_dim=values["mlp_dim"], **fixed)
    check_total_width(values | {"head_dim": values["class_head_dim"]}, NAME, "Xcit")
    args = _common(values) | {"num_heads": values["num_heads"], "eta": values["layer_scale"]}
    args |= {"tokens_norm": values["tokens_norm"], "cls_attn_layers": values["class_depth"]}
    return "xcit_nano_12_p16_224", args | {"mlp_ratio": _mlp_ratio(values["mlp_dim"], values["width"])}, None


def _tnt(values: Mapping[str, Any]) -> tuple[str, dict[str, Any], None]:
    inner = {name: values[f"inner_{name}"] for name in ("width", "head_dim")}
    inner["num_heads"] = values["inner_heads"]
    taken = ("patch_size", "pixel_stride", "layout", "inner_width", "inner_heads", "inner_head_dim")
    _check(values, taken, "TNT", inner_mlp_dim=4 * inner["width"])
    check_total_width(values, NAME, "TNT")
    check_total_width(inner, NAME, "TNT (inner)")
    args = _common(values) | {"num_heads_outer": values["num_heads"], "num_heads_inner": inner["num_heads"]}
    args |= {"inner_dim": inner["width"], "first_stride": values["pixel_stride"]}
    args["legacy"] = values["layout"] == "original"
    return "tnt_s_patch16_224", args | {"mlp_ratio": _mlp_ratio(values["mlp_dim"], values["width"])}, None


def _davit(values: Mapping[str, Any]) -> tuple[str, dict[str, Any], None]:
    values = dict(values) | {"channel_head_dim": values["channel_head_dim"] or values["head_dim"]}
    fixed = {"channel_head_dim": values["head_dim"]}
    _check(values, ("window_size", "qkv_bias"), "DaVit", **fixed)
    stages = list(zip(*(values[key] for key in ("num_heads", "head_dim", "width", "mlp_dim")), strict=True))
    for heads, head_dim, width, _ in stages:
        check_total_width({"num_heads": heads, "head_dim": head_dim, "width": width}, NAME, "DaVit")
    args = {"in_chans": values["channels"], "depths": values["depth"], "embed_dims": values["width"]}
    args |= {"num_heads": values["num_heads"], "window_size": values["window_size"], "qkv_bias": values["qkv_bias"]}
    args["mlp_ratio"] = _uniform_ratio([(mlp_dim, width) for *_, width, mlp_dim in stages], "DaVit")
    return "davit_tiny", args, None


def _volo(values: Mapping[str, Any]) -> tuple[str, dict[str, Any], None]:
    taken = ("patch_size", "class_depth", "class_heads", "class_head_dim", "class_mlp_dim", "stem_width")
    _check(values, (*taken, "token_head"), "VOLO", stem_stride=2)
    stages = list(zip(*(values[key] for key in ("num_heads", "head_dim", "width", "mlp_dim")), strict=True))
    last = {"num_heads": values["class_heads"], "head_dim": values["class_head_dim"], "width": values["width"][-1]}
    for heads, head_dim, width, _ in (*stages, (*last.values(), 0)):
        check_total_width({"num_heads": heads, "head_dim": head_dim, "width": width}, NAME, "VOLO")
    pairs = [(mlp_dim, width) for *_, width, mlp_dim in stages]
    ratio = _uniform_ratio([*pairs, (values["class_mlp_dim"] or pairs[-1][0], pairs[-1][1])], "VOLO")
    given = (*(tuple(values[key]) for key in ("depth", "width", "num_heads")), ratio, values["stem_width"])
    names = [name for name, sizes in VOLOS.items() if sizes == given]
    if not names or last["num_heads"] != values["num_heads"][-1]:
        raise ConfigError(
            f"model.depth={tuple(values['depth'])}, model.width={tuple(values['width'])}: {NAME} builds only its "
            f"registered VOLOs from a folder, {', '.join(VOLOS)}. {OTHERS}"
        )
    args = {"img_size": values["image_size"], "patch_size": values["patch_size"], "in_chans": values["channels"]}
    args |= {"post_layers": ("ca",) * values["class_depth"], "use_aux_head": values["token_head"]}
    return names[0], args, None
