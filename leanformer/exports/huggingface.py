"""`config.json` of Hugging Face's models, from our config; the names of their weights are in `layouts`.

Models whose heads may have any dimension have the key `head_dim`; ViT and DeiT read it from transformers 5.9 on, and
older versions fail with a mismatch of shapes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from leanformer.errors import ConfigError
from leanformer.exports import OTHERS, Description, check_keys, check_total_width, complete, plain_attention
from leanformer.pretrained import published
from leanformer.pretrained.layouts import huggingface as layouts
from leanformer.pretrained.storage import Tensors


NAME = "transformers"
ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu": "relu", "silu": "silu", "relu2": "relu2"}

LUMA = (0.299, 0.587, 0.114)  # weights of red, green and blue in a grey image, as in Pillow
VIT_CONSTANTS: dict[str, Any] = {"hidden_act": "gelu", "qkv_bias": True}
VIT_CONSTANTS |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
BERT_CONSTANTS = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "tie_word_embeddings": True}
GPT2_CONSTANTS = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
LLAMA_CONSTANTS = {"attention_dropout": 0.0}


def describe(arguments: Mapping[str, Any], classes: Sequence[str], *, sigmoid: bool = False) -> Description:
    """Return the model of transformers that computes what ours does; `sigmoid` for independent classes."""
    writers = {"vit": _vit, "bert": _bert, "gpt": _gpt}
    if arguments["name"] not in writers:
        raise ConfigError(f'model.name="{arguments["name"]}": {NAME} has no such model. Choose --to=timm or --to=own.')
    return writers[arguments["name"]](complete(arguments), _labels(classes, sigmoid) if classes else {})


def _labels(classes: Sequence[str], sigmoid: bool) -> dict[str, Any]:
    kind = "multi_label_classification" if sigmoid else "single_label_classification"
    kind = "regression" if len(classes) == 1 else kind
    names = {str(i): name for i, name in enumerate(classes)}
    return {"id2label": names, "label2id": {name: int(i) for i, name in names.items()}, "problem_type": kind}


def _translate(arguments: Mapping[str, Any], keys: Mapping[str, str]) -> dict[str, Any]:
    values = {theirs: arguments[ours] for theirs, ours in keys.items() if ours in arguments}
    return {key: list(x) if isinstance(x, tuple) else x for key, x in values.items()}


def _start(kind: str, architecture: str) -> dict[str, Any]:
    return {"model_type": kind, "architectures": [architecture], "dtype": "float32"}


def _vit(arguments: Mapping[str, Any], labels: dict[str, Any]) -> Description:
    kind, architecture = "vit", "ViTForImageClassification"
    if arguments["distilled"]:
        kind, architecture = "deit", "DeiTForImageClassificationWithTeacher"
    fixed = plain_attention(arguments) | {"pool": "token", "layer_scale": None}
    check_keys(arguments, {*published.VIT.values(), "num_classes", "distilled"}, fixed, NAME, architecture)
    config = _start(kind, architecture) | _translate(arguments, published.VIT) | VIT_CONSTANTS
    wide = arguments["num_heads"] * arguments["head_dim"] != arguments["width"]
    grey = config["num_channels"] == 1
    config["num_channels"] = 3
    about: dict[str, Any] = {"needs": "5.9" if wide else "", "adapt": _read_colours if grey else dict, "grey": grey}
    return Description(NAME, architecture, config | labels, "AutoModelForImageClassification", **about)


def _read_colours(tensors: Tensors) -> Tensors:
    """Return the tensors of a model of grey images for RGB, which pipelines convert all images to."""
    weights = np.array(LUMA, np.float32)[None, :, None, None]
    names = [name for name in tensors if name.endswith("patch_embeddings.projection.weight")]
    return tensors | {name: tensors[name] * weights for name in names}


def _bert(arguments: Mapping[str, Any], labels: dict[str, Any]) -> Description:
    options = {}
    if arguments["num_classes"]:
        architecture, auto = "BertForSequenceClassification", "AutoModelForSequenceClassification"
    elif arguments["transform"]:
        architecture, auto = "BertForMaskedLM", "AutoModelForMaskedLM"
    else:
        architecture, auto = "BertModel", "AutoModel"
        options = {"add_pooling_layer": False}  # otherwise a pooler with random weights is added
    taken = {*published.BERT.values(), "head_dim", "activation", "transform", "head_bias", "num_classes", "pooler_dim"}
    check_keys(arguments, taken, plain_attention(arguments) | layouts.BERT, NAME, architecture)
    check_total_width(arguments, NAME, architecture)
    config = _start("bert", architecture) | _translate(arguments, published.BERT) | BERT_CONSTANTS
    config["hidden_act"] = ACTIVATIONS[arguments["activation"]]
    return Description(NAME, architecture, config | labels, auto, options)


def _gpt(arguments: Mapping[str, Any], labels: dict[str, Any]) -> Description:
    kind, name = _causal_kind(arguments)
    architecture = f"{name}ForCausalLM" if kind != "gpt2" else "GPT2LMHeadModel"
    if kind == "gpt2":
        keys, constants, fixed = published.GPT2, GPT2_CONSTANTS, plain_attention(arguments) | layouts.GPT2
    else:
        keys = published.LLAMA | {"max_position_embeddings": "max_length"}
        both = kind == "llama" and arguments["qkv_bias"]
        constants = LLAMA_CONSTANTS | {"attention_bias": both}
        biases = {"qkv_bias": both or kind == "qwen2", "out_bias": both}
        fixed = plain_attention(arguments) | layouts.LLAMA | biases
        fixed |= {"qk_norm": "rmsnorm"} if kind == "qwen3" else {}
    check_keys(arguments, {*keys.values(), "activation", "head_dim"}, fixed, NAME, architecture)
    config = _start(kind, architecture) | constants | {"bos_token_id": None, "eos_token_id": None}
    config |= _translate(arguments, keys)
    config["activation_function" if kind == "gpt2" else "hidden_act"] = ACTIVATIONS[arguments["activation"]]
    if kind == "gpt2":
        check_total_width(arguments, NAME, architecture)
    else:
        config |= _rotary(arguments, architecture)
    if kind == "qwen3" and arguments["epsilon"] != 1e-6:
        epsilon = f"model.epsilon={arguments['epsilon']}"
        raise ConfigError(f"{epsilon}: {architecture} has one for all norms, and queries and keys have 1e-06. {OTHERS}")
    config |= {"sliding_window": None} if kind == "mistral" else {}
    return Description(NAME, architecture, config, "AutoModelForCausalLM")


def _causal_kind(arguments: Mapping[str, Any]) -> tuple[str, str]:
    """Return `model_type` and the first part of the class. Llama's heads must divide the width; Mistral's need not."""
    if arguments["positions"] == "learned":
        return "gpt2", "GPT2"
    if arguments["qk_norm"] is not None:
        return "qwen3", "Qwen3"
    if arguments["qkv_bias"] and not arguments["out_bias"]:
        return "qwen2", "Qwen2"
    return ("mistral", "Mistral") if arguments["width"] % arguments["num_heads"] else ("llama", "Llama")


def _rotary(arguments: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """Return the base of rotary positions, under its names before and from transformers 5 on."""
    base = arguments["rotary"]
    if base is None:
        raise ConfigError(f"model.rotary=None: {architecture} of {NAME} always has rotary positions. {OTHERS}")
    return {"rope_theta": base, "rope_parameters": {"rope_type": "default", "rope_theta": base}}
