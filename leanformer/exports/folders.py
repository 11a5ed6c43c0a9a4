"""Folders of trained models for other libraries: weights with config, tokenizer, preprocessing and README."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import tokenizers
from tokenizers import decoders, processors

from leanformer import models, pretrained
from leanformer.config.rules import image_sides
from leanformer.data.text import tokenizer as our_tokenizers
from leanformer.exports import Description, huggingface, timm
from leanformer.runtime import files
from leanformer.training import run_files
from leanformer.training.model_setup import ModelSetup


LIBRARIES = {"huggingface": huggingface, "timm": timm}
NOT_SCORES = ("step", "kind", "examples")
BICUBIC = 3  # Pillow's number of the filter
ROLES = {"cls_token": ("[CLS]", "<s>"), "sep_token": ("[SEP]", "</s>"), "mask_token": our_tokenizers.MASKS}
ROLES |= {"pad_token": ("[PAD]", "<pad>"), "unk_token": ("[UNK]", "<unk>")}
LEAN = """
class Lean(Attention):  # heads of dimension {head_dim}; timm's own are width / num_heads
    def __init__(self, dim, num_heads=8, **options):
        super().__init__(dim, num_heads, attn_head_dim={head_dim}, **options)

"""
SIZES = ("width", "depth", "num_heads", "head_dim", "mlp_dim")


@dataclasses.dataclass(frozen=True)
class Origin:
    """Facts of a run about its model that the config does not have; all are unset for weights from a file."""

    classes: tuple[str, ...] | None = None  # names of the classes
    tokenizer: str | None = None  # content of tokenizer.json
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # rows of the README: task, data, scores

    @classmethod
    def of_run(cls, workdir: Path, config: Any, step: int) -> "Origin":
        """Return the facts in a run's folder, with the scores at a step."""
        path = workdir / our_tokenizers.FILE
        values = next((r for r in run_files.read_records(workdir, "eval") if r["step"] == step), {})
        scores = {key: x for key, x in values.items() if key not in NOT_SCORES and isinstance(x, int | float)}
        facts = {"task": config.task, "data": config.data.name, "step": step} | scores
        tokenizer = our_tokenizers.read(path).json() if path.is_file() else None
        return cls(run_files.load_classes(workdir), tokenizer, facts)


def describe(config: Any, to: str, classes: tuple[str, ...] | None = None) -> Description:
    """Return the model of a library, a key of LIBRARIES, that computes what the model of a config does."""
    names = run_files.output_names(classes, config.model.get("num_classes") or 0)
    arguments = models.find_class(config.model.name).defaults() | config.model.to_dict()
    return LIBRARIES[to].describe(arguments, names, sigmoid=config.get("loss") == "sigmoid")


def write_folder(folder: Path, model: ModelSetup, weights: Any, to: str, origin: Origin) -> tuple[Description, Path]:
    """Write a folder that a library, a key of LIBRARIES, loads; return its description and the path of the weights."""
    config, layout = model.config, model.layout(to)
    description = describe(config, to, origin.classes)
    tensors = description.adapt(pretrained.export(jax.device_get(weights), layout))
    write = _timm_files if to == "timm" else _huggingface_files
    target = folder / "model.safetensors"
    pretrained.write(target, tensors, {"format": "pt", "layout": to})
    for name, content in write(config, description, origin).items():
        files.write_json(folder / name, content)
    files.write_text(folder / "README.md", _readme(description, config.model.to_dict(), origin.facts))
    return description, target


def _huggingface_files(config: Any, description: Description, origin: Origin) -> dict[str, dict[str, Any]]:
    """Return the content of the JSON files of a folder for transformers by name."""
    main, contents = dict(description.config), {}
    keys, data = config.model, config.data
    if "channels" in keys:
        steps = preprocessing(keys.image_size, data.crop_fraction, data.mean, data.std)
        contents = {} if steps is None else {"preprocessor_config.json": steps}
    elif origin.tokenizer is not None:
        causal, length = keys.name == "gpt", keys.max_length
        contents = tokenizer_files(origin.tokenizer, causal=causal, types=bool(keys.get("types")), length=length)
        tokenizer = our_tokenizers.parse(origin.tokenizer)
        if causal:
            end = {"bos_token_id": tokenizer.end, "eos_token_id": tokenizer.end, "pad_token_id": tokenizer.end}
            main |= end
            sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}  # as `leanformer.generate`
            contents["generation_config.json"] = {**end, **sampling, "max_length": length}
        elif (padding := tokenizer.number("[PAD]")) is not None:
            main["pad_token_id"] = padding
    return {"config.json": main, **contents}


def _timm_files(config: Any, description: Description, origin: Origin) -> dict[str, dict[str, Any]]:
    """Return timm's config; without a head dimension of its own, transformers' timm_wrapper reads it too."""
    keys, data = config.model, config.data
    names = run_files.output_names(origin.classes, keys.num_classes)
    about: dict[str, Any] = {
        **{"input_size": [keys.channels, *image_sides(keys.image_size)], "mean": [*data.mean], "std": [*data.std]},
        **{"interpolation": "bicubic", "crop_pct": data.crop_fraction, "crop_mode": "center"},
        **{"num_classes": keys.num_classes, "label_names": names},
    }
    main = {**description.config, "pretrained_cfg": about}
    wrapper = {"model_type": "timm_wrapper", "label_names": names} if description.head_dim is None else {}
    return {"config.json": main | wrapper}


def preprocessing(
    size: int | Sequence[int], crop_fraction: float, mean: Sequence[float], std: Sequence[float]
) -> dict[str, Any] | None:
    """Return the content of `preprocessor_config.json` of transformers, which prepares images as in evaluation.

    None for images that are not square, since transformers has no resizing to cover them.
    """
    height, width = image_sides(size)
    if height != width:
        return None
    return {
        "image_processor_type": "BitImageProcessor",
        **{"do_convert_rgb": True, "do_resize": True, "resample": BICUBIC},
        "size": {"shortest_edge": math.floor(height / crop_fraction)},
        **{"do_center_crop": True, "crop_size": {"height": height, "width": width}},
        **{"do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True},
        **{"image_mean": [*mean] * (3 // len(mean)), "image_std": [*std] * (3 // len(std))},
    }


def tokenizer_files(content: str, *, causal: bool, types: bool, length: int) -> dict[str, dict[str, Any]]:
    """Return `tokenizer.json` and `tokenizer_config.json` of transformers from a run's tokenizer.json."""
    base, tokenizer = tokenizers.Tokenizer.from_str(content), our_tokenizers.parse(content)
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


def _readme(description: Description, model: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    """Return the README.md of a folder: a table of the model and of `facts`, and code that loads the folder."""
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
