"""Files beside the weights in a folder: preprocessing of images, tokenizer, generation settings, README."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import decoders, processors

from leanformer.data.text.tokenizer import MASKS, Tokenizer, parse
from leanformer.exports.description import Description


BICUBIC = 3  # Pillow's number of the filter
ROLES = {"cls_token": ("[CLS]", "<s>"), "sep_token": ("[SEP]", "</s>"), "mask_token": MASKS}
ROLES |= {"pad_token": ("[PAD]", "<pad>"), "unk_token": ("[UNK]", "<unk>")}
LEAN = """
class Lean(Attention):  # heads of dimension {head_dim}; timm's own are width / num_heads
    def __init__(self, dim, num_heads=8, **options):
        super().__init__(dim, num_heads, attn_head_dim={head_dim}, **options)

"""
SIZES = ("width", "depth", "num_heads", "head_dim", "mlp_dim")


def preprocessing(
    size: int | Sequence[int], crop_fraction: float, mean: Sequence[float], std: Sequence[float]
) -> dict[str, Any] | None:
    """Return the content of `preprocessor_config.json` of transformers, which prepares images as in evaluation.

    The shorter side is resized, the centre is cropped, and three channels are normalised. None for images that are not
    square, since transformers has no resizing to cover them.

    Args:
        size: side of an image, or height and width.
        crop_fraction: side of the crop as a fraction of the shorter side of the resized image.
        mean, std: normalisation of each channel, or of a grey image.
    """
    sides = [size] if isinstance(size, int) else [*size]
    if len({*sides}) > 1:
        return None
    return {
        "image_processor_type": "BitImageProcessor",
        **{"do_convert_rgb": True, "do_resize": True, "resample": BICUBIC},
        "size": {"shortest_edge": math.floor(sides[0] / crop_fraction)},
        **{"do_center_crop": True, "crop_size": {"height": sides[0], "width": sides[0]}},
        **{"do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True},
        **{"image_mean": [*mean] * (3 // len(mean)), "image_std": [*std] * (3 // len(std))},
    }


def tokenizer_files(content: str, *, causal: bool, types: bool, length: int) -> dict[str, dict[str, Any]]:
    """Return the content of `tokenizer.json` and `tokenizer_config.json` of transformers, by file name.

    Args:
        content: tokenizer.json of the run.
        causal: True for a causal language model, whose texts begin with the token that ends a document.
        types: True if the model has token types.
        length: maximal number of tokens.
    """
    base, tokenizer = tokenizers.Tokenizer.from_str(content), parse(content, "tokenizer.json")
    names = {number: token for token, number in base.get_vocab().items()}
    end = names[tokenizer.end]
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": length}
    config["clean_up_tokenization_spaces"] = False
    if isinstance(base.decoder, decoders.ByteLevel):  # "<|endoftext|>" in a text is text, as in `Tokenizer.encode`
        config["split_special_tokens"] = True
    if causal:
        template = processors.TemplateProcessing(
            single=f"{end}:0 $A:0", pair=f"{end}:0 $A:0 {end}:0 $B:0", special_tokens=[(end, tokenizer.end)]
        )
        # GPT-2's own sets offsets; any other would add tokens that no text began with in training.
        given = base.post_processor
        offsets = isinstance(given, processors.ByteLevel)
        base.post_processor = processors.Sequence([given, template]) if offsets else template
        config |= {"bos_token": end, "eos_token": end, "pad_token": end, "padding_side": "left"}
        config["model_input_names"] = ["input_ids", "attention_mask"]
    else:
        present = {role: [t for t in tokens if tokenizer.number(t) is not None] for role, tokens in ROLES.items()}
        config |= {role: tokens[0] for role, tokens in present.items() if tokens}
        config["model_input_names"] = ["input_ids", *(["token_type_ids"] if types else []), "attention_mask"]
    return {"tokenizer.json": json.loads(base.to_str()), "tokenizer_config.json": config}


def special_numbers(tokenizer: Tokenizer, *, causal: bool) -> dict[str, int]:
    """Return the numbers of special tokens for `config.json`, by key such as "pad_token_id".

    Args:
        tokenizer: tokenizer of the run.
        causal: True for a causal language model, for which all of them are the token that ends a document.
    """
    if causal:
        return {"bos_token_id": tokenizer.end, "eos_token_id": tokenizer.end, "pad_token_id": tokenizer.end}
    padding = tokenizer.number("[PAD]")
    return {} if padding is None else {"pad_token_id": padding}


def generation(numbers: Mapping[str, int], length: int) -> dict[str, Any]:
    """Return the content of `generation_config.json` of transformers: sampling as `leanformer.generate` by default.

    Args:
        numbers: numbers of special tokens, from `special_numbers`.
        length: maximal number of tokens of prompt and completion.
    """
    return {**numbers, "do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_length": length}


def loading_code(description: Description) -> str:
    """Return Python code that loads the model from the folder in which it runs."""
    if description.library == "transformers":
        options = "".join(f", {name}={value!r}" for name, value in description.options.items())
        call = f'{description.auto}.from_pretrained("."{options})'
        return f"from transformers import {description.auto}\n\nmodel = {call}"
    lean = description.head_dim is not None
    head = "from timm.layers import Attention\n\n" + LEAN.format(head_dim=description.head_dim) if lean else ""
    options = ", attn_layer=Lean" if lean else ""
    return f'import timm\n{head}\nmodel = timm.create_model("local-dir:.", pretrained=True{options}).eval()'


def readme(description: Description, model: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    """Return the README.md of a folder: a table of facts, and code that loads the folder.

    Args:
        description: model of the folder.
        model: section config.model.
        facts: further rows of the table, such as data and score.
    """
    rows = {"architecture": f"{model['name']}, in {description.library} `{description.architecture}`"}
    if description.grey:
        rows["images"] = "RGB; the model was trained on grey images, and weighs the channels to grey"
    rows |= {**{f"`{key}`": model[key] for key in SIZES}, **facts}
    table = ["| | |", "|---|---|", *(f"| {key} | {_cell(value)} |" for key, value in rows.items())]
    needs = f" It needs {description.library} {description.needs} or newer." if description.needs else ""
    meta = ["---", f"library_name: {description.library}", "tags: [leanformer]", "---"]
    lines = [*meta, "", "Weights in float32, written by leanformer.", "", *table, ""]
    return "\n".join([*lines, f"Run inside this folder.{needs}", "", "```python", loading_code(description), "```", ""])


def _cell(value: Any) -> str:
    return (f"{value:.4g}" if isinstance(value, float) else str(value)).replace("|", "\\|").replace("\n", " ")
