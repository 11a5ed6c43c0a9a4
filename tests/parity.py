"""Helpers of the parity tests: stored cases, models with their weights, and distances."""

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
from leanformer.training import state


FIXTURES = Path(__file__).parent / "fixtures"
FILES = {  # family and source of the weights in a file of fixtures
    **{f"{family}_timm": (family, "timm") for family in ("vit", "xcit", "volo", "tnt", "davit")},
    **{"vit_huggingface": ("vit", "huggingface"), "gpt_huggingface": ("gpt", "huggingface")},
    "deepseek_huggingface": ("gpt", "huggingface"),
}
OUTPUTS = ("logits", "class", "distilled", "tokens")
ARRAYS = {"input", "labels", "attentions", "grad", "train", *OUTPUTS, *(f"{name}64" for name in OUTPUTS)}
TOLERANCE = 1e-5  # of the largest logit; float32 against float64 differs by up to 1e-6, a wrong epsilon by 7e-5


def stored(file, case):
    """Return the metadata of fixtures/<file>.safetensors, and the arrays of one case by name."""
    with safe_open(str(FIXTURES / f"{file}.safetensors"), "numpy") as content:
        about = {name: json.loads(text) for name, text in content.metadata().items() if text[0] in "{["}
        names = [name for name in content.keys() if name.startswith(f"{case}/")]  # noqa: SIM118 - the file is no dict
        return about, {name.removeprefix(f"{case}/"): content.get_tensor(name) for name in names}


@dataclasses.dataclass(eq=False)
class Case:
    """A model as others compute it: arguments of ours, their weights by their names, and `arrays` that are no weights,
    images B H W C."""

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
        _, (params, statistics) = load(self.family, self.arguments, tensors, self.source, allowed)
        if backbone:  # the head hands on what it is given
            width = self.arguments["width"]
            params["head"] = {"kernel": np.eye(width, dtype=np.float32), "bias": np.zeros(width, np.float32)}
        return params, statistics

    def build(self, **other):
        """Return our model with their weights."""
        return nnx.merge(definition(self.family, self.arguments, **other)[0], *jax.tree.map(jnp.asarray, self.weights))

    def doubled(self, **other):
        """Return our graph definition and their weights in float64."""
        weights = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), self.weights)
        return definition(self.family, self.arguments, dtype=jnp.float64, **other)[0], weights

    def error(self, model, name="logits"):
        """Return how far logits are from theirs, as a share of the largest."""
        return distance(outputs(model, self.arrays["input"])["logits"], self.arrays[name])


@functools.cache
def case(file, name):
    """Return one case of a file of fixtures."""
    about, tensors = stored(file, name)
    arguments = {
        key: tuple(x) if key == "image_size" and isinstance(x, list) else x
        for key, x in about["cases"][name].items()
        if key not in ("input_size", "batch")
    }
    arrays = {key: tensors.pop(key) for key in list(tensors) if key.split("/")[0] in ARRAYS}
    if "weights" in arguments:  # of another case
        others = stored(file, arguments.pop("weights"))[1]
        tensors = {key: x for key, x in others.items() if key.split("/")[0] not in ARRAYS}
    if "model" in arguments:  # DaViT's, of which there are fewer than cases
        tensors = stored(file, arguments["model"])[1]
        arguments = about["models"][arguments.pop("model")] | arguments | {"channels": 3}
        arguments["mlp_dim"] = [int(width * arguments["mlp_ratio"]) for width in arguments["width"]]
        del arguments["mlp_ratio"]
    if arrays["input"].ndim == 4:
        arrays["input"] = arrays["input"].transpose(0, 2, 3, 1)
    return Case(file, name, arguments, tensors, arrays)


def cases():
    """Return all cases, as (file, name)."""
    result = []
    for file in FILES:
        with safe_open(str(FIXTURES / f"{file}.safetensors"), "numpy") as content:
            result += [(file, name) for name in json.loads(content.metadata()["cases"])]
    return result


def outputs(model, inputs):
    """Return the logits, and those of each head where there are several."""

    @jax.jit
    def run(inputs):
        heads = model.heads(inputs)[0] if hasattr(model, "heads") else {}
        return heads | {"logits": model(inputs)[0]}

    inputs = jnp.asarray(inputs)
    return run(inputs.astype(model.dtype) if inputs.ndim == 4 else inputs)


def definition(family, arguments, **other):
    """Return our model's graph definition, a function that makes its weights from a key, and their shapes."""
    return state.split(lambda rngs: models.build(family, **arguments, **other, rngs=rngs))


def layout(family, arguments, source="timm"):
    return layouts.layout(source, {"name": family, **arguments})


def load(family, arguments, tensors, source="timm", allowed=None, **other):
    """Return our model's graph definition and their weights in its names and shapes: parameters and statistics."""
    graphdef, _, shapes = definition(family, arguments, **other)
    chosen = layout(family, arguments, source)
    return graphdef, pretrained.load(tensors, chosen, shapes, allowed or pretrained.Allowed())


def distance(values, expected):
    """Return the largest difference of arrays of one shape and precision as a share of the largest number."""
    assert (values.dtype, values.shape) == (expected.dtype, expected.shape)
    return np.abs(values - expected).max() / np.abs(expected).max()


def check_back(weights, layout, tensors, *, alone=()):
    """Assert that exported weights equal `tensors`; `alone` are names that only one side has."""
    back = pretrained.export(weights, layout)
    assert back.keys() - set(alone) == tensors.keys() - set(alone)
    for name in tensors.keys() - set(alone):
        np.testing.assert_array_equal(back[name], tensors[name], err_msg=name)


def other_epsilon(model, kind, epsilon):
    """Set the epsilon of every norm of that kind."""
    for _, module in nnx.iter_modules(model):
        if isinstance(module, kind):
            module.epsilon = epsilon
