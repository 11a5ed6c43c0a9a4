"""`config.json` of Hugging Face's models, from our config; the names of their weights are in `layouts`.

Its keys by ours are in the tables of `leanformer.pretrained.published`, its constants here. Models whose heads may have
any dimension have the key `head_dim`; ViT, DeiT and DINOv2 read it from transformers 5.9 on (DINOv2 from 5.18), and
older versions fail with a mismatch of shapes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from leanformer.config.rules import image_sides
from leanformer.errors import ConfigError
from leanformer.exports.description import Description, check_keys, check_total_width, complete
from leanformer.pretrained.published.huggingface import TABLES
from leanformer.pretrained.storage import Tensors


NAME = "transformers"
PADDING = "Narrower heads can be padded with zeros: --pad_heads. "
ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu": "relu", "silu": "silu", "relu2": "relu2"}

LUMA = (0.299, 0.587, 0.114)  # weights of red, green and blue in a grey image, as in Pillow
SIZES = ("width", "depth", "num_heads", "mlp_dim")
VIT = TABLES["vit"].names(*SIZES, "head_dim", "image_size", "patch_size", "channels", "epsilon")
VIT_CONSTANTS: dict[str, Any] = {"hidden_act": "gelu", "qkv_bias": True}
VIT_CONSTANTS |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
VIT_CLASSES = {  # by model_type; with the oldest version of transformers that reads `head_dim`
    "vit": ("ViTForImageClassification", "5.9"),
    "deit": ("DeiTForImageClassificationWithTeacher", "5.9"),
    "dinov2": ("Dinov2ForImageClassification", "5.18"),
}
BERT = TABLES["bert"].names(*SIZES, "vocabulary", "max_length", "types", "epsilon")
BERT_CONSTANTS = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "tie_word_embeddings": True}
GPT2 = TABLES["gpt2"].names(*SIZES, "vocabulary", "max_length", "epsilon", "tied")
GPT2_CONSTANTS = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
LLAMA = TABLES["llama"].names(*SIZES, "head_dim", "vocabulary", "epsilon", "tied")
LLAMA |= {"max_length": "max_position_embeddings"}
LLAMA_CONSTANTS = {"attention_dropout": 0.0}
LATENT = TABLES["deepseek_v3"].names("value_dim", "kv_rank", "query_rank", "rotary_width", "head_dim")


def describe(arguments: Mapping[str, Any], classes: Sequence[str], *, sigmoid: bool = False) -> Description:
    """Return the model of transformers that computes what a model of leanformer does.

    Args:
        arguments: complete section config.model, with defaults.
        classes: names of the classes, one for each output of a classifier.
        sigmoid: True if a classifier's outputs are independent.

    Raises:
        ConfigError: transformers has no model that computes it.
    """
    writers = {"vit": _vit, "bert": _bert, "gpt": _gpt}
    if arguments["name"] not in writers:
        raise ConfigError(
            f'model.name="{arguments["name"]}": {NAME} has no such model, or leanformer no config for it. Choose '
            "--to=timm for images, or --to=stablehlo, which runs without leanformer."
        )
    return writers[arguments["name"]](complete(arguments), _labels(classes, sigmoid) if classes else {})


def _labels(classes: Sequence[str], sigmoid: bool) -> dict[str, Any]:
    kind = "multi_label_classification" if sigmoid else "single_label_classification"
    kind = "regression" if len(classes) == 1 else kind
    names = {str(i): name for i, name in enumerate(classes)}
    return {"id2label": names, "label2id": {name: int(i) for i, name in names.items()}, "problem_type": kind}


def _translate(arguments: Mapping[str, Any], keys: Mapping[str, str]) -> dict[str, Any]:
    values = {theirs: arguments[ours] for ours, theirs in keys.items()}
    return {key: list(x) if isinstance(x, tuple) else x for key, x in values.items()}


def _start(kind: str, architecture: str) -> dict[str, Any]:
    return {"model_type": kind, "architectures": [architecture], "dtype": "float32"}


def _vit(arguments: Mapping[str, Any], labels: dict[str, Any]) -> Description:
    """Return ViT, DeiT with its two heads, or with layer scale DINOv2, whose head also reads the mean of patches."""
    dino = arguments["layer_scale"] is not None
    kind = "dinov2" if dino else "deit" if arguments["distilled"] else "vit"
    architecture, oldest = VIT_CLASSES[kind]
    taken = {*VIT, "num_classes", *(["layer_scale"] if dino else ["distilled"])}
    fixed = {"attention": "softmax", "pool": "token", "out_bias": True, "value_dim": arguments["head_dim"]}
    fixed["num_kv_heads"] = arguments["num_heads"]
    check_keys(arguments, taken, fixed, NAME, architecture)
    config = _start(kind, architecture) | _translate(arguments, VIT) | VIT_CONSTANTS
    if dino:
        if len(set(image_sides(arguments["image_size"]))) > 1:
            raise ConfigError(
                f"model.image_size={arguments['image_size']}: {architecture} of {NAME} takes square images. Choose "
                "--to=timm."
            )
        ratio = config.pop("intermediate_size") / arguments["width"]
        if ratio != int(ratio):
            raise ConfigError(
                f"model.mlp_dim={arguments['mlp_dim']}: {architecture} of {NAME} needs a multiple of model.width="
                f"{arguments['width']}. Choose --to=timm."
            )
        config |= {"mlp_ratio": int(ratio), "use_mask_token": False, "layerscale_value": arguments["layer_scale"]}
    wide = arguments["num_heads"] * arguments["head_dim"] != arguments["width"]
    grey = config["num_channels"] == 1
    config["num_channels"] = 3

    def adapt(tensors: Tensors) -> Tensors:
        tensors = _of_dino(tensors) if dino else dict(tensors)
        return _read_colours(tensors) if grey else tensors

    about: dict[str, Any] = {"auto": "AutoModelForImageClassification", "pipeline": "image-classification"}
    about |= {"needs": oldest if wide else "", "adapt": adapt, "grey": grey}
    return Description(NAME, architecture, config | labels, **about)


def _read_colours(tensors: Tensors) -> Tensors:
    """Return the tensors of a model of grey images for RGB, which pipelines convert all images to."""
    weights = np.array(LUMA, np.float32)[None, :, None, None]
    names = [name for name in tensors if name.endswith("patch_embeddings.projection.weight")]
    return tensors | {name: tensors[name] * weights for name in names}


def _of_dino(tensors: Tensors) -> Tensors:
    """Return the tensors of a DINOv2 classifier: the weights of the mean of the patches are zero."""
    named = {name if name.startswith("classifier") else f"dinov2.{name}": x for name, x in tensors.items()}
    head = named["classifier.weight"]
    return named | {"classifier.weight": np.concatenate([head, np.zeros_like(head)], axis=1)}


def _bert(arguments: Mapping[str, Any], labels: dict[str, Any]) -> Description:
    """Return BERT with the head of the model: a classifier, the masked tokens', or none."""
    options = {}
    if arguments["num_classes"]:
        name = "ForSequenceClassification"
        architecture, auto, pipeline = f"Bert{name}", f"AutoModel{name}", "text-classification"
    elif arguments["transform"]:
        architecture, auto, pipeline = "BertForMaskedLM", "AutoModelForMaskedLM", "fill-mask"
    else:
        architecture, auto, pipeline = "BertModel", "AutoModel", "feature-extraction"
        options = {"add_pooling_layer": False}  # otherwise a pooler with random weights is added
    fixed = {"attention": "softmax", "norm": "layernorm", "positions": "learned", "pool": "first", "post_norm": True}
    fixed |= {"mlp_bias": True, "qkv_bias": True, "out_bias": True, "num_kv_heads": arguments["num_heads"]}
    fixed |= {"value_dim": arguments["head_dim"]}
    taken = {*BERT, "head_dim", "activation", "transform", "head_bias", "num_classes", "pooler_dim"}
    check_keys(arguments, taken, fixed, NAME, architecture)
    check_total_width(arguments, NAME, architecture, PADDING)
    config = _start("bert", architecture) | _translate(arguments, BERT) | BERT_CONSTANTS
    config["hidden_act"] = ACTIVATIONS[arguments["activation"]]
    return Description(NAME, architecture, config | labels, auto, pipeline, options)


def _gpt(arguments: Mapping[str, Any], labels: dict[str, Any]) -> Description:
    """Return GPT-2, Llama, Mistral, Qwen2, Qwen3 or DeepSeek-V3, by the options of the model."""
    latent = arguments["attention"] == "latent"
    kind, name = _causal_kind(arguments)
    architecture = f"{name}ForCausalLM" if kind != "gpt2" else "GPT2LMHeadModel"
    if kind == "gpt2":
        keys, constants = GPT2, GPT2_CONSTANTS
        fixed = {"positions": "learned", "norm": "layernorm", "mlp_bias": True, "qkv_bias": True, "out_bias": True}
        fixed |= {"attention": "softmax", "num_kv_heads": arguments["num_heads"], "value_dim": arguments["head_dim"]}
    else:
        keys, constants = LLAMA | (LATENT if latent else {}), LLAMA_CONSTANTS
        fixed = {"positions": "none", "norm": "rmsnorm", "gated": True, "mlp_bias": False}
        fixed |= {"attention": "latent"} if latent else {"attention": "softmax", "value_dim": arguments["head_dim"]}
        fixed |= {"qwen3": {"qk_norm": "rmsnorm"}, "deepseek_v3": {"latent_norm": "rmsnorm"}}.get(kind, {})
        both = kind == "llama" and arguments["qkv_bias"]
        fixed |= {"qkv_bias": both or kind == "qwen2", "out_bias": both}
        constants = constants | {"attention_bias": both}
    taken = {*keys, "activation", "head_dim", *(() if kind == "gpt2" else ("rotary", "num_kv_heads"))}
    check_keys(arguments, taken, fixed, NAME, architecture)
    config = _start(kind, architecture) | constants | {"bos_token_id": None, "eos_token_id": None}
    config |= _translate(arguments, keys)
    config["activation_function" if kind == "gpt2" else "hidden_act"] = ACTIVATIONS[arguments["activation"]]
    if kind == "gpt2":
        hint = 'Models with model.positions="none" and model.rotary go out as Llama, which has one. '
        check_total_width(arguments, NAME, architecture, hint + PADDING)
    else:
        config |= _rotary(arguments, architecture) | {"num_key_value_heads": arguments["num_kv_heads"]}
        _check_epsilon(arguments, kind, architecture)
    config |= {"mistral": {"sliding_window": None}, "deepseek_v3": _dense(arguments)}.get(kind, {})
    return Description(NAME, architecture, config, "AutoModelForCausalLM", "text-generation")


def _causal_kind(arguments: Mapping[str, Any]) -> tuple[str, str]:
    """Return `model_type` and the first part of the class. Llama's heads must divide the width; Mistral's need not."""
    if arguments["positions"] == "learned":
        return "gpt2", "GPT2"
    if arguments["attention"] == "latent":
        return "deepseek_v3", "DeepseekV3"
    if arguments["qk_norm"] is not None:
        return "qwen3", "Qwen3"
    if arguments["qkv_bias"] and not arguments["out_bias"]:
        return "qwen2", "Qwen2"
    return ("mistral", "Mistral") if arguments["width"] % arguments["num_heads"] else ("llama", "Llama")


def _rotary(arguments: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """Return the base of rotary positions, under its names before and from transformers 5 on."""
    base = arguments["rotary"]
    if base is None:
        raise ConfigError(
            f'model.rotary=None with model.positions="none": {architecture} of {NAME} always has rotary positions. '
            "Choose --to=stablehlo or --to=own."
        )
    return {"rope_theta": base, "rope_parameters": {"rope_type": "default", "rope_theta": base}}


def _check_epsilon(arguments: Mapping[str, Any], kind: str, architecture: str) -> None:
    """Raise ConfigError if norms of queries and keys, whose epsilon is 1e-6 here, would have another there."""
    if kind == "qwen3" and arguments["epsilon"] != 1e-6:
        raise ConfigError(
            f"model.epsilon={arguments['epsilon']}: {architecture} of {NAME} has one epsilon for all norms, and those "
            "of queries and keys have 1e-06. Choose --to=stablehlo or --to=own."
        )


def _dense(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a DeepSeek-V3 without experts: every layer is before the first with experts."""
    constants = {"rope_interleave": True, "n_routed_experts": 1, "n_shared_experts": 1, "num_experts_per_tok": 1}
    constants |= {"n_group": 1, "topk_group": 1, "moe_intermediate_size": 1, "num_mtp_layers": 0}
    return constants | {"first_k_dense_replace": arguments["depth"]}
