"""Check of the `config.json` beside published weights.

Shapes of weights do not determine what a model computes: 4 heads of 16 and 8 heads of 8 have equal shapes, and epsilon
and activation have none. A setting in `config.json` must therefore equal the setting of the model that reads them.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from leanformer.config.rules import image_sides
from leanformer.errors import WeightsError
from leanformer.runtime import files, multihost


# Our keys of config.model by the keys of transformers' config.json. `exports.huggingface` writes the same.
ENCODER = {"hidden_size": "width", "num_hidden_layers": "depth", "num_attention_heads": "num_heads"}
ENCODER |= {"intermediate_size": "mlp_dim", "layer_norm_eps": "epsilon"}
VIT = ENCODER | {"head_dim": "head_dim", "image_size": "image_size", "patch_size": "patch_size"}
VIT |= {"num_channels": "channels"}
BERT = ENCODER | {"vocab_size": "vocabulary", "max_position_embeddings": "max_length", "type_vocab_size": "types"}
GPT2 = {"n_embd": "width", "n_layer": "depth", "n_head": "num_heads", "n_inner": "mlp_dim"}
GPT2 |= {"vocab_size": "vocabulary", "n_positions": "max_length", "layer_norm_epsilon": "epsilon"}
GPT2 |= {"tie_word_embeddings": "tied"}
LLAMA = {"hidden_size": "width", "num_hidden_layers": "depth", "num_attention_heads": "num_heads"}
LLAMA |= {"num_key_value_heads": "num_kv_heads", "head_dim": "head_dim", "intermediate_size": "mlp_dim"}
LLAMA |= {"vocab_size": "vocabulary", "rms_norm_eps": "epsilon", "rope_theta": "rotary", "tie_word_embeddings": "tied"}
NANOCHAT = LLAMA | {"final_logit_softcapping": "head_cap"}
HUGGINGFACE = {  # architecture and keys by `model_type`; other models have the same names of tensors and differ
    **dict.fromkeys(("vit", "deit", "dinov2"), ("vit", VIT)),
    **{"bert": ("bert", BERT), "gpt2": ("gpt", GPT2)},
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), ("gpt", LLAMA)),
    "nanochat": ("gpt", NANOCHAT),
}
ACTIVATION_KEYS = ("hidden_act", "activation_function")
ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh"}
ACTIVATIONS |= {"gelu_python": "gelu", "swish": "silu"}
FIXED: dict[str, Any] = {  # keys of transformers with one supported value
    **{"scale_attn_by_inverse_layer_idx": False, "partial_rotary_factor": 1.0, "rope_type": "default"},
    **{"position_embedding_type": "absolute", "type": "default", "scale_attn_weights": True, "is_decoder": False},
}
SEEN_BY_SHAPE = ("image_size", "channels", "vocabulary")

# Layers, widths, heads, MLP ratio and stem width of timm's registered VOLOs, which `model_args` cannot change.
VOLOS = {
    "volo_d1_224": ((4, 4, 8, 2), (192, 384, 384, 384), (6, 12, 12, 12), 3, 64),
    "volo_d2_224": ((6, 4, 10, 4), (256, 512, 512, 512), (8, 16, 16, 16), 3, 64),
    "volo_d3_224": ((8, 8, 16, 4), (256, 512, 512, 512), (8, 16, 16, 16), 3, 64),
    "volo_d4_224": ((8, 8, 16, 4), (384, 768, 768, 768), (12, 16, 16, 16), 3, 64),
    "volo_d5_224": ((12, 12, 20, 4), (384, 768, 768, 768), (12, 16, 16, 16), 4, 128),
}
VITS = {"tiny": 3, "small": 6, "base": 12, "large": 16, "huge": 16}
TIMM_HEADS = {  # heads by the first two parts of a registered name of timm
    **{"vit": VITS, "deit": VITS, "tnt": {"s": 6, "b": 10}},
    "xcit": {"nano": 4, "tiny": 4, "small": 8, "medium": 8, "large": 16},
    "davit": {size: tuple(first << i for i in range(4)) for size, first in zip(VITS, (3, 3, 4, 6, 8), strict=True)},
    "volo": {name.split("_")[1]: sizes[2] for name, sizes in VOLOS.items()},
}
TIMM_EPSILON = {"vit": 1e-6, "deit": 1e-6, "xcit": 1e-6, "davit": 1e-5}
TIMM = {"embed_dim": "width", "embed_dims": "width", "depth": "depth", "depths": "depth", "num_heads": "num_heads"}
TIMM |= {"num_heads_outer": "num_heads", "num_heads_inner": "inner_heads", "norm_eps": "epsilon"}
TIMM |= {"window_size": "window_size", "tokens_norm": "tokens_norm", "patch_size": "patch_size"}
TIMM |= {"img_size": "image_size", "act_layer": "activation"}


def check(path: str | Path, layout: str, settings: Mapping[str, Any]) -> tuple[int, int] | None:
    """Raise WeightsError if the `config.json` beside published weights does not match `settings` of the model.

    Returns the rows and columns of patches of the published model, if known. Warns if the number of heads is unknown.
    """
    path = Path(path).expanduser()
    config = (path if path.is_dir() else path.parent) / "config.json"
    content = files.read_json(config) if config.is_file() else {}
    kind, theirs = _of_timm(content) if layout == "timm" else _of_transformers(config, content, settings)
    if content and kind not in (settings["name"], None):
        raise WeightsError(f"{config}: these are weights of model.name={kind}, but the model is {settings['name']}.")
    if "num_heads" not in theirs and multihost.is_primary():
        missing = "does not tell" if content else "does not exist. Shapes of weights do not show"
        print(f"WARNING: {config} {missing} the number of heads; check it yourself.", file=sys.stderr, flush=True)
    ours = {key: tuple(x) if isinstance(x, list) else x for key, x in settings.items()}
    ours["num_kv_heads"] = ours.get("num_kv_heads") or ours.get("num_heads")
    differ = {key: x for key, x in theirs.items() if key not in SEEN_BY_SHAPE and x != ours.get(key)}
    if differ:
        needed = " ".join(f"--config.model.{key}={str(x).replace(' ', '')}" for key, x in differ.items())
        found = ", ".join(f"model.{key}={ours.get(key)}" for key in differ)
        hint = f", or correct tie_word_embeddings in {config.name}" if "tied" in differ else ""
        raise WeightsError(f"{config}: these weights need {needed}, but found {found}. Set them{hint}.")
    if "image_size" not in theirs or "patch_size" not in theirs:
        return None
    height, width = image_sides(theirs["image_size"])
    return height // theirs["patch_size"], width // theirs["patch_size"]


def normalisation(path: str | Path) -> dict[str, tuple[float, ...]]:
    """Return mean and std of images from the files beside published weights, those of timm or of transformers."""
    path = Path(path).expanduser()
    folder, result = path if path.is_dir() else path.parent, {}
    for name, prefix in (("config.json", ""), ("preprocessor_config.json", "image_")):
        content = files.read_json(folder / name) if (folder / name).is_file() else {}
        content = content.get("pretrained_cfg", content)
        result |= {key: tuple(content[prefix + key]) for key in ("mean", "std") if content.get(prefix + key)}
    return result


def _of_transformers(
    config: Path, content: Mapping[str, Any], settings: Mapping[str, Any]
) -> tuple[str | None, dict[str, Any]]:
    """Return the architecture and {our key: value} of a config of transformers."""
    if not content:
        return None, {}
    model_type = content.get("model_type")
    if model_type not in HUGGINGFACE:
        raise WeightsError(f"{config}: model_type={model_type} is not supported, only {', '.join(HUGGINGFACE)}.")
    parts = {"rope_theta": 10_000.0}, content, content.get("rope_scaling") or {}, content.get("rope_parameters") or {}
    values = {key: x for part in parts for key, x in part.items()}
    norms = {"rms_norm_eps": 1e-6} if model_type == "qwen3" else {}  # that of queries and keys cannot be set
    for key, only in (FIXED | norms).items():
        if values.get(key, only) != only:
            raise WeightsError(f"{config}: {key}={values[key]!r} is not supported, only {only!r}. Use other weights.")
    window = values.get("sliding_window") if values.get("use_sliding_window", True) else None
    if window is not None and window < settings.get("max_length", 0):
        raise WeightsError(f"{config}: sliding_window={window}. Set --config.model.max_length={window}.")
    architecture, keys = HUGGINGFACE[model_type]
    theirs = {ours: values[key] for key, ours in keys.items() if values.get(key) is not None}
    for key in ACTIVATION_KEYS:
        if key in values:
            theirs["activation"] = ACTIVATIONS.get(values[key], values[key])
    return architecture, theirs


def _of_timm(content: Mapping[str, Any]) -> tuple[str | None, dict[str, Any]]:
    """Return the architecture, None if unknown, and {our key: value} of a config of timm."""
    family, _, rest = content.get("architecture", "").partition(".")[0].partition("_")
    size = rest.partition("_")[0]
    theirs: dict[str, Any] = {}
    if size in TIMM_HEADS.get(family, {}):
        theirs["num_heads"] = TIMM_HEADS[family][size]
    if family in TIMM_EPSILON:
        theirs["epsilon"] = TIMM_EPSILON[family]
    if family == "xcit":
        theirs["tokens_norm"] = size != "nano"
    given = {TIMM[key]: x for key, x in (content.get("model_args") or {}).items() if key in TIMM}
    theirs |= {key: tuple(x) if isinstance(x, list) else x for key, x in given.items()}
    if family in ("xcit", "volo") and "num_heads" in theirs:
        heads = theirs["num_heads"]
        theirs["class_heads"] = heads[-1] if isinstance(heads, tuple) else heads
    return {"deit": "vit"}.get(family, family) if family in TIMM_HEADS else None, theirs
