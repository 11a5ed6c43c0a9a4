"""Export of models as StableHLO programs by `jax.export`, which run without leanformer.

The folder has `model.stablehlo`, a function (weights by name, inputs) -> logits for any batch size on CPUs and CUDA
GPUs; `model.safetensors`, its weights under our names; `signature.json`, the shapes of its inputs; and a model card.
"""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from leanformer import pretrained, tasks
from leanformer.errors import ConfigError
from leanformer.pretrained import storage
from leanformer.runtime import files
from leanformer.runtime.trees import leaf_names
from leanformer.training.model_setup import ModelSetup


PLATFORMS = ("cpu", "cuda")
PROGRAM = "model.stablehlo"
CARD = """---
library_name: jax
tags: [leanformer, stablehlo]
---

# Model card

A {name} trained with leanformer, as a program for CPUs and CUDA GPUs that needs only JAX, flatbuffers and safetensors.
Inputs, of any batch size: {inputs}. Run inside this folder:

```python
import pathlib

import numpy as np
from jax import export
from safetensors.numpy import load_file

program = export.deserialize(pathlib.Path("model.stablehlo").read_bytes())
weights = {{name: x for path in pathlib.Path().glob("model*.safetensors") for name, x in load_file(path).items()}}
inputs = {{{example}}}
logits = program.call(weights, inputs)
```
"""


def input_specs(model: ModelSetup) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Return {name: (shape, dtype)} of each input of the exported program, for one example, without the batch axis.

    They are those of the task, so images are uint8 and normalised by the program. Of a model trained on packed rows,
    each row is one document, so that there is no input of segments.
    """
    specs = tasks.build(model.config).data.input_specs()
    return {name: (shape, np.dtype(dtype)) for name, (shape, dtype) in specs.items() if name != "segments"}


def program(model: ModelSetup) -> jax.export.Exported:
    """Return the exported function (weights by our names, inputs by name) -> logits, with a symbolic batch size.

    It takes inputs of any batch size on CPUs and CUDA GPUs; `input_specs` has their names, shapes and types.
    """
    task = tasks.build(model.config)
    names = [*leaf_names(model.weights[0]), *leaf_names(model.weights[1])]
    structure = jax.tree.structure(model.weights)
    packed = "segments" in task.data.input_specs()

    def apply(weights: Mapping[str, jax.Array], inputs: Mapping[str, jax.Array]) -> jax.Array:
        merged = nnx.merge(model.graphdef, *jax.tree.unflatten(structure, [weights[name] for name in names]))
        arguments = (inputs["tokens"],) if packed else task.objective.inputs(inputs)
        return merged(*arguments)[0]

    (batch,) = jax.export.symbolic_shape("batch")
    leaves = jax.tree.leaves(model.weights)
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in zip(names, leaves, strict=True)}
    inputs = {name: jax.ShapeDtypeStruct((batch, *shape), dtype) for name, (shape, dtype) in input_specs(model).items()}
    return jax.export.export(jax.jit(apply), platforms=PLATFORMS)(shapes, inputs)


def write_folder(folder: Path, model: ModelSetup, weights: Any, *, largest: int | None = None) -> Path:
    """Write a folder with a model's program, and return the path of the program.

    The files are model.stablehlo, the weights as model.safetensors or shards with an index, signature.json and
    README.md.

    Args:
        folder: folder to write to, which is created.
        model: setup of the model.
        weights: parameters and batch statistics of the model.
        largest: maximum number of bytes of a file of weights; None for one file.

    Raises:
        ConfigError: the package flatbuffers, which `jax.export` writes with, is missing.
    """
    if importlib.util.find_spec("flatbuffers") is None:
        raise ConfigError(
            "--to=stablehlo needs the package flatbuffers. In the repository, run: pip install -e '.[stablehlo]'."
        )
    content = program(model).serialize()
    tensors = pretrained.export(jax.device_get(weights), model.layout("own"))
    folder.mkdir(parents=True, exist_ok=True)
    storage.write_model(folder, tensors, {"layout": "own"}, largest)
    with files.atomic_write(folder / PROGRAM) as draft:
        draft.write_bytes(content)
    specs = input_specs(model)
    signature = {name: {"shape": ["batch", *shape], "dtype": dtype.name} for name, (shape, dtype) in specs.items()}
    files.write_json(folder / "signature.json", {"inputs": signature, "platforms": [*PLATFORMS]})
    rows = [(name, dtype.name, ", ".join(map(str, shape))) for name, (shape, dtype) in specs.items()]
    shown = ", ".join(f"`{name}` {dtype} (batch, {sizes})" for name, dtype, sizes in rows)
    example = ", ".join(f'"{name}": np.ones((2, {sizes}), np.{dtype})' for name, dtype, sizes in rows)
    files.write_text(folder / "README.md", CARD.format(name=model.config.model.name, inputs=shown, example=example))
    return folder / PROGRAM
