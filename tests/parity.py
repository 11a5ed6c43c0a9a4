"""Helpers for the parity tests: fixture cases, models with the reference weights, and distances."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import safe_open

from leanformer import models, pretrained
from leanformer.pretrained import layouts
from leanformer.training import model_setup


FIXTURES = Path(__file__).parent / "fixtures"
FILES = {  # architecture and weight source of each fixture file
    **{f"{family}_timm": (family, "timm") for family in ("vit", "xcit", "volo", "tnt", "davit")},
    **{"vit_huggingface": ("vit", "huggingface"), "gpt_huggingface": ("gpt", "huggingface")},
    "nanochat_huggingface": ("gpt", "huggingface"),
}
OUTPUTS = ("logits", "class", "distilled", "tokens")
ARRAYS = {"input", "labels", "attentions", "grad", "train", *OUTPUTS, *(f"{name}64" for name in OUTPUTS)}
TOLERANCE = 1e-5  # relative to the largest logit; float32 differs from float64 by up to 1e-6, a wrong epsilon by 7e-5


def load_fixture(file, case):
    """Return the metadata of fixtures/<file>.safetensors and the arrays of one case, by name."""
    with safe_open(str(FIXTURES / f"{file}.safetensors"), "numpy") as content:
        metadata = {name: json.loads(text) for name, text in content.metadata().items() if text[0] in "{["}
        names = [name for name in content.keys() if name.startswith(f"{case}/")]  # noqa: SIM118 - the file is no dict
        return metadata, {name.removeprefix(f"{case}/"): content.get_tensor(name) for name in names}


@dataclasses.dataclass(eq=False)
class Case:
    """A model of a reference library: arguments of our model, their `tensors` (weights by reference names), and
    `arrays`: inputs, outputs and other arrays that are no weights. Images are B H W C."""

    file: str
    name: str
    arguments: dict
    tensors: dict
    arrays: dict

    @property
    def family(self):
        return FILES[self.file][0]

    @property
    def source(self):
        return FILES[self.file][1]

    @property
    def layout(self):
        return layout(self.family, self.arguments, self.source)

    @functools.cached_property
    def weights(self):
        return self.load(self.tensors)

    def load(self, tensors):
        """Return weights in our names and shapes."""
        backbone = self.name == "dinov2"
        allowed = pretrained.Allowed(new_head=backbone)
        _, (params, statistics) = load_into_model(self.family, self.arguments, tensors, self.source, allowed)
        if backbone:  # the reference has no head: use the identity
            width = self.arguments["width"]
            params["head"] = {"kernel": np.eye(width, dtype=np.float32), "bias": np.zeros(width, np.float32)}
        return params, statistics

    def build(self, **overrides):
        """Return our model with the reference weights."""
        return nnx.merge(
            split_model(self.family, self.arguments, **overrides)[0], *jax.tree.map(jnp.asarray, self.weights)
        )

    def doubled(self, **overrides):
        """Return our graph definition and the reference weights in float64."""
        weights = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), self.weights)
        return split_model(self.family, self.arguments, dtype=jnp.float64, **overrides)[0], weights


@functools.cache
def case(file, name):
    """Return one case of a fixture file."""
    metadata, tensors = load_fixture(file, name)
    arguments = {
        key: tuple(x) if key == "image_size" and isinstance(x, list) else x
        for key, x in metadata["cases"][name].items()
        if key not in ("input_size", "batch")
    }
    arrays = {key: tensors.pop(key) for key in list(tensors) if key.split("/")[0] in ARRAYS}
    if "weights" in arguments:  # this case uses the weights of another case
        source_tensors = load_fixture(file, arguments.pop("weights"))[1]
        tensors = {key: x for key, x in source_tensors.items() if key.split("/")[0] not in ARRAYS}
    if "model" in arguments:  # several DaViT cases share one model
        tensors = load_fixture(file, arguments["model"])[1]
        arguments = metadata["models"][arguments.pop("model")] | arguments | {"channels": 3}
        arguments["mlp_dim"] = [int(width * arguments["mlp_ratio"]) for width in arguments["width"]]
        del arguments["mlp_ratio"]
    if arrays["input"].ndim == 4:
        arrays["input"] = arrays["input"].transpose(0, 2, 3, 1)
    return Case(file, name, arguments, tensors, arrays)


def list_cases():
    """Return all cases, as (file, name)."""
    result = []
    for file in FILES:
        with safe_open(str(FIXTURES / f"{file}.safetensors"), "numpy") as content:
            result += [(file, name) for name in json.loads(content.metadata()["cases"])]
    return result


def compute_outputs(model, inputs):
    """Return the logits, and the logits of each head if the model has several."""

    @jax.jit
    def run(inputs):
        heads = model.heads(inputs)[0] if hasattr(model, "heads") else {}
        return heads | {"logits": model(inputs)[0]}

    inputs = jnp.asarray(inputs)
    return run(inputs.astype(model.dtype) if inputs.ndim == 4 else inputs)


def split_model(family, arguments, **overrides):
    """Return our model's graph definition, a function that initialises its weights from a key, and their shapes."""
    return model_setup.split_model(lambda rngs: models.build(family, **arguments, **overrides, rngs=rngs))


def layout(family, arguments, source="timm"):
    return layouts.layout(source, {"name": family, **arguments})


def load_into_model(family, arguments, tensors, source="timm", allowed=None, **overrides):
    """Return our model's graph definition and the reference weights, as (parameters, statistics) in our naming."""
    graphdef, _, shapes = split_model(family, arguments, **overrides)
    weight_layout = layout(family, arguments, source)
    tensors = layouts.huggingface.rename_nanochat(tensors, arguments)
    return graphdef, pretrained.load(tensors, weight_layout, shapes, allowed or pretrained.Allowed())


def relative_difference(values, expected):
    """Return the largest difference of two arrays of equal shape and dtype, relative to the largest expected value."""
    assert (values.dtype, values.shape) == (expected.dtype, expected.shape)
    return np.abs(values - expected).max() / np.abs(expected).max()


def check_export(weights, layout, tensors, *, alone=()):
    """Assert that the exported weights equal `tensors`; `alone` are names that only one side may have."""
    exported = pretrained.export(weights, layout)
    assert exported.keys() - set(alone) == tensors.keys() - set(alone)
    for name in tensors.keys() - set(alone):
        np.testing.assert_array_equal(exported[name], tensors[name], err_msg=name)
