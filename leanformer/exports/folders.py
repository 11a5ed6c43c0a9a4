"""Folders of trained models for other libraries: weights with config, tokenizer, preprocessing and README."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from leanformer import models, pretrained
from leanformer.data.text import tokenizer as tokenizers
from leanformer.exports import files, huggingface, timm
from leanformer.exports.description import Description
from leanformer.pretrained import storage
from leanformer.runtime import files as disk
from leanformer.tasks import artifacts
from leanformer.training.model_setup import ModelSetup


LIBRARIES = {"huggingface": huggingface, "timm": timm}
NOT_SCORES = ("step", "kind", "examples")


@dataclasses.dataclass(frozen=True)
class Origin:
    """Facts of a run about its model that the config does not have; all are unset for weights from a file.

    Attributes:
        classes: names of the classes; None if they have none.
        tokenizer: content of tokenizer.json; None if the model does not read texts.
        facts: rows of the README, such as task, data and scores.
    """

    classes: tuple[str, ...] | None = None
    tokenizer: str | None = None
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def of_run(cls, workdir: Path, c: Any, step: int | None = None) -> "Origin":
        """Return the classes, the tokenizer, and the facts for the README that a run's folder has, as an `Origin`.

        Args:
            workdir: folder of the run.
            c: config of the run.
            step: step of the checkpoint whose recorded scores are among the facts; None for those at the end.

        Raises:
            ConfigError, WorkdirError: a file of the run is broken, or has changed since it was written.
        """
        path = workdir / tokenizers.FILE
        summary = disk.read_json(workdir / "summary.json") if (workdir / "summary.json").is_file() else {}
        values = summary.get("final") or {} if isinstance(summary, dict) else {}
        when = "at the end"
        if step is not None and step != values.get("step"):
            records = disk.read_lines(workdir / "metrics.jsonl")
            values = next((r for r in records if r.get("kind") == "eval" and r.get("step") == step), {})
            when = f"at step {step}"
        scores = {f"{key}, {when}": x for key, x in values.items() if key not in NOT_SCORES and _is_number(x)}
        facts = {"task": c.task, "data": c.data.name} | ({} if step is None else {"step": step}) | scores
        tokenizer = tokenizers.read(path).json() if path.is_file() else None
        return cls(artifacts.load_classes(workdir), tokenizer, facts)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def complete_arguments(c: Any) -> dict[str, Any]:
    """Return the section `model` of the config `c`, with the defaults of its architecture for keys that it lacks."""
    return models.find_class(c.model.name).defaults() | c.model.to_dict()


def describe(c: Any, to: str, classes: tuple[str, ...] | None = None) -> Description:
    """Return the model of another library that computes what the model of a config does.

    Args:
        c: config.
        to: "huggingface" or "timm".
        classes: names of the classes, if the data have names.

    Raises:
        ConfigError: the library has no such model.
    """
    names = artifacts.output_names(classes, c.model.get("num_classes") or 0)
    return LIBRARIES[to].describe(complete_arguments(c), names, sigmoid=c.get("loss") == "sigmoid")


def write_folder(folder: Path, model: ModelSetup, weights: Any, to: str, origin: Origin) -> tuple[Description, Path]:
    """Write a folder that a library loads, and return its description and the path of the weights.

    The folder has weights, config.json and a README.md; for transformers also the preprocessing of images, or the files
    of the tokenizer and of generation. Files of these names are replaced.

    Args:
        folder: folder to write to, which is created.
        model: setup of the model.
        weights: parameters and batch statistics of the model.
        to: "huggingface" or "timm".
        origin: facts about the model beside its config.

    Raises:
        ConfigError: the library has no such model.
        WeightsError: its layout has no tensor for some weights.
    """
    c, layout = model.config, model.layout(to)
    description = describe(c, to, origin.classes)
    tensors = description.adapt(pretrained.export(jax.device_get(weights), layout))
    contents = _contents(c, description, origin, to)
    target = folder / "model.safetensors"
    storage.write(target, tensors, {"format": "pt", "layout": to})
    for name, content in contents.items():
        disk.write_json(folder / name, content)
    disk.write_text(folder / "README.md", files.readme(description, c.model.to_dict(), origin.facts))
    return description, target


def _contents(c: Any, description: Description, origin: Origin, to: str) -> dict[str, Any]:
    """Return the content of the JSON files of a folder by name."""
    if to == "timm":
        return {"config.json": _timm_config(c, description, origin)}
    config, contents = dict(description.config), {}
    if "channels" in c.model:
        steps = files.preprocessing(c.model.image_size, c.data.crop_fraction, tuple(c.data.mean), tuple(c.data.std))
        contents = {} if steps is None else {"preprocessor_config.json": steps}
    elif origin.tokenizer is not None:
        causal, length = c.model.name == "gpt", c.model.max_length
        types = bool(c.model.get("types"))
        contents = files.tokenizer_files(origin.tokenizer, causal=causal, types=types, length=length)
        numbers = files.special_numbers(tokenizers.parse(origin.tokenizer, tokenizers.FILE), causal=causal)
        config |= numbers
        contents |= {"generation_config.json": files.generation(numbers, length)} if causal else {}
    return {"config.json": config, **contents}


def _timm_config(c: Any, description: Description, origin: Origin) -> dict[str, Any]:
    """Return timm's config; without a head dimension of its own, transformers' timm_wrapper reads it too."""
    size = c.model.image_size
    sides = (size, size) if isinstance(size, int) else tuple(size)
    names = artifacts.output_names(origin.classes, c.model.num_classes)
    about: dict[str, Any] = {"input_size": [c.model.channels, *sides], "mean": [*c.data.mean], "std": [*c.data.std]}
    about |= {"interpolation": "bicubic", "crop_pct": c.data.crop_fraction, "crop_mode": "center"}
    about |= {"num_classes": c.model.num_classes, "label_names": names}
    config = {**description.config, "pretrained_cfg": about}
    wrapper = {"model_type": "timm_wrapper", "label_names": names}
    return config | (wrapper if description.head_dim is None else {})
