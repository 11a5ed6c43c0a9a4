"""Comparison of converted weights with the model of another library: the largest difference of the outputs."""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import re
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from leanformer import data, tasks
from leanformer.config.rules import image_sides
from leanformer.errors import LeanformerError, WeightsError
from leanformer.exports import Description
from leanformer.exports.folders import loading_code
from leanformer.training import run_files
from leanformer.training.model_setup import ModelSetup


EXAMPLES = 8
# Largest accepted difference of two float32 models, as a share of the largest output. Rounding: up to 1.2e-6 in 38
# right conversions (tests/fixtures), 2.3e-6 from float64 with 24 layers. Ten times the epsilon of norms: 2e-5 or more.
LIMIT = 1e-5


class Sample(NamedTuple):
    """Inputs on which two models are compared."""

    # `image` (B height width C, normalised), or `tokens` (B T) with `lengths` (B) and `types` (B T) if any.
    arrays: dict[str, np.ndarray]
    description: str


def random_sample(model: ModelSetup, reason: str = "") -> Sample:
    """Return EXAMPLES random inputs: normal pixels, or uniform tokens in rows of maximal length."""
    keys, rng = model.config.model, np.random.default_rng(0)
    if "channels" in keys:
        shape = (EXAMPLES, *image_sides(keys.image_size), keys.channels)
        arrays = {"image": rng.standard_normal(shape, np.float32)}
    else:
        arrays = {"tokens": rng.integers(keys.vocabulary, size=(EXAMPLES, keys.max_length), dtype=np.int32)}
    return Sample(arrays, f"{EXAMPLES} random inputs{reason}")


def real_sample(model: ModelSetup, workdir: Path) -> Sample:
    """Return the first examples of a run's evaluation split, or random inputs if its data cannot be read."""
    config = model.config
    try:
        task = tasks.build_task(config)
        source = task.data.open(config.data.eval_split, run_files.load_classes(workdir))
        size = min(EXAMPLES, data.size(source) or EXAMPLES)
        batch = task.data.eval_batches(source, batch_size=size, process=0, processes=1)[0]
    except (LeanformerError, OSError) as error:
        return random_sample(model, f", since the data cannot be read ({str(error).splitlines()[0]})")
    if "image" in batch:
        arrays = {"image": np.asarray(task.objective.inputs({"image": jnp.asarray(batch["image"])})[0])}
    else:  # packed rows as one document each
        arrays = {name: np.asarray(batch[name]) for name in ("tokens", "lengths", "types") if name in batch}
    number = len(next(iter(arrays.values())))
    return Sample(arrays, f"{number} examples of {config.data.name}, {config.data.eval_split}")


def our_outputs(model: ModelSetup, weights: Any, sample: Sample) -> np.ndarray:
    """Return the logits of our model, B V or B T V; of a BERT without a head its last hidden states, B T D."""
    names = ("image", "tokens", "lengths", "types")
    arguments = {name: jnp.asarray(sample.arrays[name]) for name in names if name in sample.arrays}
    first = arguments.pop("image" if "image" in arguments else "tokens")
    keys = model.config.model
    headless = keys.name == "bert" and not (keys.get("num_classes") or keys.get("transform"))
    merged: Any = model.merge(weights)
    call = merged.hidden if headless else merged
    return np.asarray(jax.jit(lambda x, rest: call(x, **rest)[0])(first, arguments))


def obstacle(description: Description) -> str | None:
    """Return the reason why a folder of this description cannot be loaded here; None if it can."""
    library = description.library
    if missing := [name for name in (library, "torch") if importlib.util.find_spec(name) is None]:
        return f"not installed here: {', '.join(missing)}"
    installed = importlib.metadata.version(library)
    if description.needs and _numbers(installed) < _numbers(description.needs):
        return f"{library} {installed} is installed, and the folder needs {description.needs} or newer"
    return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def their_outputs(folder: Path, description: Description, sample: Sample) -> np.ndarray:
    """Load the folder by the code of its README, and return that model's outputs, as `our_outputs` does."""
    torch = importlib.import_module("torch")
    arrays = {name: torch.from_numpy(np.array(x)) for name, x in sample.arrays.items()}
    arrays = {name: x if name == "image" else x.long() for name, x in arrays.items()}
    readme: dict[str, Any] = {}
    with contextlib.chdir(folder), torch.no_grad():
        exec(loading_code(description), readme)
        model = readme["model"].eval()
        if "image" in arrays:
            pixels = arrays["image"].permute(0, 3, 1, 2)
            result = model(pixels.repeat(1, 3, 1, 1) if description.grey else pixels)
            return (result if description.library == "timm" else result.logits).numpy()
        tokens = arrays["tokens"]
        lengths = arrays.get("lengths", torch.full((len(tokens),), tokens.shape[1]))
        mask = (torch.arange(tokens.shape[1])[None] < lengths[:, None]).long()
        types = {"token_type_ids": arrays["types"]} if "types" in arrays else {}
        result = model(input_ids=tokens, attention_mask=mask, **types)
        return (result.logits if "logits" in result else result.last_hidden_state).numpy()


def compare(folder: Path, description: Description, model: ModelSetup, weights: Any, sample: Sample) -> float | None:
    """Return the largest difference of the outputs of our model and an exported folder, relative to the largest output.

    None if the folder cannot be loaded here (`obstacle`). Raises WeightsError if it computes something else.
    """
    if obstacle(description):
        return None
    theirs = their_outputs(folder, description, sample)
    ours = our_outputs(model, weights, sample)
    valid = None
    if "lengths" in sample.arrays and ours.ndim == 3:
        valid = np.arange(ours.shape[1])[None] < sample.arrays["lengths"][:, None]
    advice = f"Do not use the folder; report the config, and the version of {description.library}."
    return check_outputs(ours, theirs, str(folder), advice, valid=valid)


def check_outputs(
    ours: np.ndarray, theirs: np.ndarray, source: str, advice: str, *, valid: np.ndarray | None = None
) -> float:
    """Return the largest difference of the outputs of two models, relative to the largest of `theirs`, from `source`.

    Outputs count where `valid` (B T) is True. Raises WeightsError, with `advice`, if it is not finite or above LIMIT.
    """
    if ours.shape != theirs.shape:
        raise WeightsError(f"{source}: outputs are {theirs.shape}, but the model gives {ours.shape}.")
    if valid is not None:
        ours, theirs = ours[valid], theirs[valid]
    worst = float(np.abs(ours - theirs).max() / np.abs(theirs).max())
    if not worst <= LIMIT:
        raise WeightsError(
            f"{source}: outputs of the two models differ by {worst:.1e} of the largest, more than float32 rounding "
            f"({LIMIT:.0e}). {advice}"
        )
    return worst


def describe(folder: Path, description: Description, model: ModelSetup, weights: Any, sample: Sample) -> str:
    """Return a line with the result of `compare`, or with the reason why the models were not compared."""
    worst = compare(folder, description, model, weights, sample)
    if worst is None:
        return f"Not compared: {obstacle(description)}."
    version = importlib.import_module(description.library).__version__
    return (
        f"Loaded by {description.library} {version}: largest difference of the outputs {worst:.1e} of the largest, on "
        f"{sample.description}."
    )
