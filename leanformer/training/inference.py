"""Loading of trained models from their workdirs, `leanformer.load("runs/quickstart")`, and inference with them.

model.predict(["a.jpg", "b.jpg"])     # class names        model.embed(["a text"])       # vectors, of a BERT
model.probabilities("a.jpg")          # a row per image    model.generate("It is a")     # a completion, of a GPT
model.probe(images)                   # conditioning of every layer
"""

import dataclasses
import functools
import itertools
import operator
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Float
from ml_collections import ConfigDict
from PIL import Image

from leanformer import conditioning, tasks
from leanformer.data.source import EXAMPLE_TYPES, read_content
from leanformer.errors import CheckpointError, ConfigError, DataError
from leanformer.runtime.timing import announce
from leanformer.tasks import Task, generation
from leanformer.tasks.classification import probabilities
from leanformer.tasks.language import TextData
from leanformer.tasks.masked import embeddings
from leanformer.training import model_setup, run_files
from leanformer.training.checkpoint import Checkpoints, RestoredWeights, is_run
from leanformer.training.model_setup import ModelSetup


BATCH = 32  # largest batch of `LoadedModel.scores`, a power of two


class OpenRun(NamedTuple):
    """Workdir of a run, finished or not, opened for reading."""

    workdir: Path
    config: ConfigDict  # without additional evaluations (`eval.more`)
    task: Task
    model: ModelSetup  # its weights are not read yet, see `restore_weights`


def restore_weights(
    workdir: Path, model: ModelSetup, step: int | None = None, *, best: bool = False
) -> RestoredWeights:
    """Return the weights of a checkpoint: of `step`, the best by validation score, or the newest readable one.

    A folder that `convert` wrote from a run has the weights of one checkpoint. If they are EMA weights, both fields
    `weights` and `ema` of the result are these. Raises CheckpointError if the checkpoint does not exist, is damaged or
    does not fit the model, WeightsError if the weights are not finite.
    """
    exported = None if is_run(str(workdir)) else run_files.exported_weights(workdir)
    if exported is None:
        with Checkpoints(workdir / "checkpoints", model.config.checkpoint.keep) as checkpoints:
            chosen = checkpoints.choose(step, best=best)
            only = chosen if best or step is not None else None
            with announce(f"Reading the checkpoint of {workdir}"):
                return checkpoints.restore_weights(model.weights, only)
    if best or step not in (None, exported["step"]):
        flag = "--best" if best else f"--step={step}"
        raise CheckpointError(f"{flag}: {workdir} has the weights of step {exported['step']} alone. Remove {flag}.")
    weights = model.read_weights(str(workdir), "own", finished=True)
    return RestoredWeights(exported["step"], weights, weights if exported["averaged"] else None)


def run_folder(workdir: str | Path) -> Path:
    """Return the path of a run's folder, with ~ expanded. Raises ConfigError if the folder has no config.json."""
    path = Path(workdir).expanduser()
    if not (path / "config.json").is_file():
        raise ConfigError(f"--workdir={workdir} is not the folder of a run: {path / 'config.json'} does not exist.")
    return path


def open_run(workdir: str | Path, *, mesh: Mesh | None = None, **data: Any) -> OpenRun:
    """Open a run to use its model, by default on the first device; `data` replaces values of the section `data`."""
    folder = run_folder(workdir)
    c = run_files.load_config(folder)
    run_files.use_saved_tokenizer(folder, c)
    c.unlock()
    c.eval.more = ConfigDict()  # these splits may no longer exist
    c.data.update(data)
    return OpenRun(folder, c, tasks.build_task(c), model_setup.set_up_model(c, mesh=mesh))


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """Trained model with its config and preprocessing.

    Attributes:
        model: model; `model(*inputs)` returns (logits B V or B T V, taps) and is deterministic, without a key.
        config: config of the run.
        task: task of the run: `task.data` prepares an example on the host, `task.objective` makes inputs on the device.
        step: step of the checkpoint.
        averaged: True if the weights are EMA weights.
        classes: names of the classes in the order of the outputs, or their numbers if the data have no names; empty if
            the outputs are not classes.
        workdir: folder of the run.
    """

    model: nnx.Module
    config: ConfigDict
    task: Task
    step: int
    averaged: bool
    classes: tuple[str, ...]
    workdir: Path

    def prepare(self, example: Any) -> dict[str, np.ndarray]:
        """Return the arrays of one example by the names of the model's inputs, prepared as in evaluation.

        An example is the path of a file, or its content as bytes. For a model of images it is also a PIL image, or a
        uint8 array (height, width[, channels]). A language model takes the first row of a text, of model.max_length
        tokens. Raises DataError if the example has another type, or cannot be read.
        """
        content: Any = read_content(example, images=self.takes_images)
        data = self.task.data
        try:
            whole = data.read_text(content, self.tokenizer) if isinstance(data, TextData) else data.read(content)
            return data.prepare(whole)
        except DataError as error:
            error.add_note(f"It is the example {str(example)[:200]}.")
            raise

    def preprocess(self, examples: Any) -> tuple[jax.Array, ...]:
        """Return the positional arguments of `model` for one or several examples, device arrays with leading axis B.

        Examples and errors are as in `probabilities`.
        """
        return self._batch(self._prepare_all(examples))

    def probabilities(self, examples: Any) -> Float[np.ndarray, "b v"]:
        """Return the probability of each class, one row per example: by softmax, or independent for loss="sigmoid".

        Args:
            examples: one example as in `prepare` (a path, bytes, or an image), a list of examples, or an array of
                images (B height width channels).

        Raises:
            ConfigError: the model has no classes.
            CorruptExample, DataError: an example has another type, or cannot be read.
        """
        self.check_classes()
        return self.scores(self._prepare_all(examples))

    def predict(self, examples: Any) -> list[str]:
        """Return the name of the most likely class of each example; also a list for a single example."""
        return [self.classes[i] for i in self.probabilities(examples).argmax(axis=1)]

    @functools.cached_property
    def tokenizer(self) -> Any:
        """Tokenizer of a text model, `data.text.tokenizer.Tokenizer`. Raises DataError if the run has none."""
        return run_files.load_tokenizer(self.workdir)

    def embed(self, texts: str | Sequence[str]) -> Float[np.ndarray, "n d"]:
        """Return one vector per text, scaled to norm 1. Warns if texts are truncated to the model's length.

        Raises ConfigError if the model is not a bidirectional language model (BERT).
        """
        if not hasattr(self.model, "decoded"):
            raise ConfigError(f'{self.workdir} is no bidirectional language model, which has model.name="bert".')
        several = [texts] if isinstance(texts, str) else list(texts)
        vectors, cut = embeddings(self.model, self.tokenizer, several)
        if len(cut):
            message = f"{len(cut)} of {len(several)} texts were truncated to the model's length, the first is texts"
            warnings.warn(f"{message}[{cut[0]}]: {several[cut[0]][:40]!r}.", stacklevel=2)
        return vectors

    def generate(
        self,
        prompt: str,
        tokens: int | None = None,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
    ) -> str:
        """Return a sampled completion of a text, of at most `tokens` tokens, without the text itself.

        For the settings see `tasks.generation.Sampling`. Raises ConfigError if the model is not a causal language
        model, the text is too long for it, or a setting is out of range.
        """
        self.check_causal()
        tokenizer, how = self.tokenizer, generation.Sampling(temperature, top_k, top_p)
        given = np.append(np.int32(tokenizer.end), tokenizer.encode([prompt])[0])
        number = generation.tokens_available({"prompt": given}, self.config.model.max_length, tokens)
        key = jax.random.key(seed)
        columns = generation.generate(self.model, [given], number, end=tokenizer.end, key=key, how=how)
        return tokenizer.decode(column[0] for column in columns)

    def check_classes(self) -> None:
        """Raise ConfigError unless the outputs of the model are classes."""
        if not self.classes:
            raise ConfigError(
                f'{self.workdir}: task="{self.config.task}" has no classes. With m = leanformer.load(workdir), use '
                "m.generate, m.embed, or numbers, m.model(*m.preprocess(texts))[0]."
            )

    def check_causal(self) -> None:
        """Raise ConfigError unless the model is a causal language model, which can generate."""
        if not hasattr(self.model, "extend"):
            raise ConfigError(f'{self.workdir}: task="{self.config.task}" has no causal language model to generate.')

    def probe(
        self, examples: Any, measures: str | Sequence[str] = ("attention_output",)
    ) -> dict[str, list[dict[str, Any]]]:
        """Return the conditioning of every layer on examples: {measure: [one dictionary per layer]}.

        The dictionaries are `conditioning.digest`'s, with keys such as "median", "q10" and "q90". If the model has
        several stacks, such as stages, the measures of each are named "stack.measure". Measures are names in
        `conditioning.ACTIVATIONS`; examples are as in `probabilities`. They are computed in float32.
        """
        names = (measures,) if isinstance(measures, str) else tuple(measures)
        weights = nnx.state(self.model, nnx.Param), nnx.state(self.model, nnx.BatchStat)
        exact = model_setup.set_up_model(self.config).in_float32().merge(weights)
        measured = _measure(exact, self.preprocess(examples), names)
        return {name: conditioning.digest(jax.device_get(summary)) for name, summary in measured.items()}

    def _prepare_all(self, examples: Any) -> list[dict[str, np.ndarray]]:
        array = hasattr(examples, "__array__") and not isinstance(examples, Image.Image)
        several = np.ndim(examples) == 4 if array else not isinstance(examples, EXAMPLE_TYPES)
        return [self.prepare(example) for example in (examples if several else [examples])]

    def scores(self, prepared: Iterable[Mapping[str, np.ndarray]]) -> Float[np.ndarray, "b v"]:
        """Return the probability of each class for results of `prepare`, one row per example, taken as needed.

        A batch has BATCH examples, or a smaller power of two: every other size would be compiled again, and one image
        in a batch of 32 takes 15 times as long on a CPU (vit_b_7x16).
        """
        loss, rows = self.config.get("loss", "softmax"), []
        for some in itertools.batched(prepared, BATCH):
            padded = [*some, *some[:1] * ((1 << (len(some) - 1).bit_length()) - len(some))]
            rows.append(np.asarray(probabilities(_logits(self.model, self._batch(padded)), loss))[: len(some)])
        return np.concatenate(rows) if rows else np.zeros((0, len(self.classes)), np.float32)

    def _batch(self, prepared: Sequence[Mapping[str, np.ndarray]]) -> tuple[Any, ...]:
        names = self.task.data.input_specs()
        return self.task.objective.inputs({name: jnp.stack([row[name] for row in prepared]) for name in names})

    @property
    def takes_images(self) -> bool:
        """True if the files that `prepare` reads are images, False if they are texts."""
        return "image" in self.task.data.input_specs() or self.config.data.name.startswith("pixels:")


@nnx.jit
def _logits(model: nnx.Module, inputs: tuple[jax.Array, ...]) -> jax.Array:
    return model(*inputs)[0]


@functools.partial(nnx.jit, static_argnames="measures")
def _measure(model: nnx.Module, inputs: tuple[jax.Array, ...], measures: tuple[str, ...]) -> dict[str, Any]:
    with jax.default_matmul_precision("highest"):  # as in a probe
        _, taps = model(*inputs, tap=conditioning.tap(measures))
    return conditioning.by_name(taps, measures)


def load(workdir: str | Path, *, step: int | None = None, best: bool = False) -> LoadedModel:
    """Return the trained model of a run, with EMA weights if the run keeps them.

    Args:
        workdir: folder of the run.
        step: step of the checkpoint; the newest readable one if neither `step` nor `best` is given.
        best: True for the best checkpoint by validation score; not with `step`.

    Raises:
        ConfigError: the folder is not one of a run.
        CheckpointError: the checkpoint does not exist or is damaged.
        WeightsError: the weights are not finite.
    """
    run = open_run(workdir)
    step = None if step is None else operator.index(step)  # Orbax takes no NumPy integers
    restored = restore_weights(run.workdir, run.model, step, best=best)
    model = run.model.merge(restored.ema or restored.weights)
    names: Sequence[str] = ()
    if not getattr(run.task.data, "numbers", False):
        names = run_files.output_names(run_files.load_classes(run.workdir), run.config.model.get("num_classes", 0))
    return LoadedModel(model, run.config, run.task, restored.step, restored.ema is not None, tuple(names), run.workdir)
