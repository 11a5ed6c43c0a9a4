"""Embedding of texts as vectors: `python -m leanformer.embed --workdir=DIR --texts=FILE` prints one JSON line per text.

      ... [--best|--step=N] [--out=FILE.npy]
python -m leanformer.embed --config=configs/minilm.py --weights=FILE.safetensors --tokenizer=FOLDER --texts=FILE
      ... [--config.init_from.layout=huggingface]

The file has one text per line. A JSON line is {"text": ..., "embedding": [...]}. FILE.npy holds all vectors in the same
order, N D. A vector is the mean over the tokens of a text, normalised to length 1, so the dot product of two is their
cosine similarity. --weights are computed in float32. In Python: `leanformer.tasks.embedding.embeddings`.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from leanformer import cli
from leanformer.errors import ConfigError
from leanformer.runtime import files


def read_texts(path: str) -> list[str]:
    """Return the texts in a file, which has one per line.

    Raises:
        ConfigError: the file cannot be read as UTF-8 or is empty, or a line is blank, which has no embedding.
    """
    lines = files.lines(path, "--texts")
    if empty := [number for number, line in enumerate(lines, 1) if not line.strip()]:
        raise ConfigError(
            f"--texts={path}: {len(empty)} of {len(lines)} lines are empty, the first is line {empty[0]}. Remove them."
        )
    return lines


def open_model(f: cli.Values) -> tuple[Any, Any]:
    """Return the model that the flags give, with its weights, and its tokenizer.

    The model is that of a run (--workdir, with EMA weights if it keeps them), or of a config with weights (--config and
    --weights). In the second case the config is changed: dtype is float32, and init_from.path is --weights.

    Args:
        f: values of the flags workdir, step, best, config, weights and tokenizer.

    Raises:
        ConfigError: the flags cannot be combined, or the folder is not that of a run with a tokenizer.
        CheckpointError: the checkpoint does not exist or is damaged.
        DataError: the tokenizer is missing or invalid.
        WeightsError: the weights cannot be read, do not fit the model, or are not finite.
        WorkdirError: the run's config.json is broken.
    """

    from leanformer.data.text import tokenizer as tokenizers
    from leanformer.tasks import artifacts
    from leanformer.training import inference, model_setup

    if (f.workdir is None) == (f.config is None) or (f.config is None) != (f.weights is None):
        raise ConfigError("The model is not specified. Pass --workdir=DIR, or --config=FILE with --weights=FILE.")
    if f.workdir is None and (f.best or f.step is not None):
        raise ConfigError(f"--best and --step select a checkpoint of a run, but --weights={f.weights} is a file.")
    if f.workdir is not None:
        folder = inference.run_folder(f.workdir)
        path = f.tokenizer and Path(f.tokenizer).expanduser()
        tokenizer = artifacts.load_tokenizer(folder) if path is None else tokenizers.read(path)
        return inference.load(f.workdir, step=f.step, best=f.best).model, tokenizer
    c = f.config
    if not (name := f.tokenizer or c.data.get("tokenizer")):
        raise ConfigError(f'task="{c.task}" in --config has no tokenizer. Use a config of texts, or --tokenizer=DIR.')
    tokenizer = tokenizers.read(Path(name).expanduser())
    c.unlock()
    c.dtype, c.init_from.path = "float32", f.weights
    model = model_setup.build(c)
    return model.merge(model.initial_weights()), tokenizer


@cli.command(
    cli.OPTIONAL_CONFIG,
    cli.Flag("workdir", "Folder of a run."),
    cli.Flag("step", "Checkpoint step to use; the newest if neither --step nor --best is given.", int),
    cli.Flag("best", "Use the best checkpoint by validation score.", bool, default=False),
    cli.Flag("weights", "safetensors file with the parameters of --config."),
    cli.Flag("tokenizer", "tokenizer.json or its folder; by default that of the run, or config.data.tokenizer."),
    cli.Flag("texts", "File with one text per line.", required=True),
    cli.Flag("out", "File .npy to write to instead of printing."),
)
def main(f: cli.Values) -> None:
    from leanformer.runtime import phases
    from leanformer.tasks.embedding import embeddings

    texts = read_texts(f.texts)
    if f.out is not None:
        if not f.out.endswith(".npy"):
            raise ConfigError(
                f"--out={f.out}: the vectors are written as a NumPy array. Use a file name ending in .npy."
            )
        files.check_output_file(f.out, [f.texts])
    model, tokenizer = open_model(f)
    with phases.announce(f"Embedding {len(texts)} texts"):
        vectors, cut = embeddings(model, tokenizer, texts)
    if len(cut):
        warning = (
            f"{len(cut)} of {len(texts)} texts were truncated to the model's length, the first in line {cut[0] + 1}"
        )
        print(f"WARNING: {warning}.", file=sys.stderr)
    if f.out is None:
        for text, vector in zip(texts, vectors.tolist(), strict=True):
            print(json.dumps({"text": text, "embedding": vector}, ensure_ascii=False))
        return
    with files.atomic_write(Path(f.out).expanduser()) as draft, draft.open("wb") as file:
        np.save(file, vectors)
    print(f"Wrote {f.out}: {len(vectors):,} vectors of dimension {vectors.shape[1]}.")


if __name__ == "__main__":
    cli.run(main)
