"""Texts as vectors: `python -m leanformer.embed --workdir=DIR --texts=FILE` has a line of JSON for each.

      ... [--best|--step=N] [--out=FILE.npy]
python -m leanformer.embed --config=configs/minilm.py --weights=FILE.safetensors --tokenizer=FOLDER --texts=FILE
      ... [--config.init_from.layout=huggingface]

The file has a text a line. A line of JSON is {"text": ..., "embedding": [...]}; FILE.npy holds all of them, N D, in
their order. Vectors are means over the tokens of a text and of length 1: the product of two is their cosine. Outside
weights run in float32. In Python: `leanformer.tasks.embedding.embeddings`.
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from leanformer import cli
from leanformer.data.text import Tokenizer
from leanformer.data.text import tokenizer as tokenizers
from leanformer.errors import ConfigError
from leanformer.runtime import files
from leanformer.tasks import artifacts
from leanformer.tasks.embedding import embeddings
from leanformer.training import inference, model_setup


def read_texts(path: str) -> list[str]:
    """A text a line, so that vectors are as the lines are. Raises ConfigError for a file that cannot be read, or has a
    line without text, whose vector nobody could tell from others."""
    lines = files.lines(path, "--texts")
    if empty := [number for number, line in enumerate(lines, 1) if not line.strip()]:
        where = f"{len(empty)} of {len(lines)} lines, the first of them line {empty[0]}"
        raise ConfigError(f"--texts={path} has no text, so no vector, in {where}. Take these lines out first.")
    return lines


def opened(f: cli.Values) -> tuple[Any, Tokenizer]:
    """The model and its tokenizer. Raises ConfigError for flags that do not go together, and as they are read."""
    if (f.workdir is None) == (f.config is None) or (f.config is None) != (f.weights is None):
        raise ConfigError("Give --workdir=DIR, or --config=FILE with --weights=FILE: the model of the embeddings.")
    if f.workdir is None and (f.best or f.step is not None):
        raise ConfigError(f"--best and --step are of a run's checkpoints, and --weights={f.weights} is a file.")
    if f.workdir is not None:
        folder = inference.run_folder(f.workdir)
        own = (
            artifacts.load_tokenizer(folder) if f.tokenizer is None else tokenizers.read(Path(f.tokenizer).expanduser())
        )
        return inference.load(f.workdir, step=f.step, best=f.best).model, own
    c = f.config
    tokenizer = tokenizers.read(Path(f.tokenizer or c.data.tokenizer).expanduser())
    c.unlock()
    c.dtype, c.init_from.path = "float32", f.weights
    model = model_setup.build(c)
    return model.merge(model.initial_weights()), tokenizer


@cli.command(
    dataclasses.replace(cli.CONFIG, required=False),
    cli.Flag("workdir", "Folder of a run."),
    cli.Flag("step", "Checkpoint to take; the newest if neither this nor --best is given.", int),
    cli.Flag("best", "Take the best checkpoint by evaluation during training.", bool, default=False),
    cli.Flag("weights", "safetensors file with the parameters of the --config."),
    cli.Flag("tokenizer", "tokenizer.json or its folder; the run's, or config.data.tokenizer, if unset."),
    cli.Flag("texts", "File with a text a line.", required=True),
    cli.Flag("out", "File .npy to write to instead of printing."),
)
def main(f: cli.Values) -> None:
    texts = read_texts(f.texts)
    if f.out is not None:
        if not f.out.endswith(".npy"):
            raise ConfigError(f"--out={f.out}: the vectors are written as an array, to a file named .npy.")
        files.check_writable(Path(f.out).expanduser().parent)
    model, tokenizer = opened(f)
    found, cut = embeddings(model, tokenizer, texts)
    if len(cut):
        words = f"{len(cut)} of {len(texts)} texts, from line {cut[0] + 1} on, were cut to the model's length."
        print(words, file=sys.stderr)
    if f.out is None:
        for text, vector in zip(texts, found.tolist(), strict=True):
            print(json.dumps({"text": text, "embedding": vector}, ensure_ascii=False))
        return
    with files.asked(f.out) as draft, draft.open("wb") as file:
        np.save(file, found)
    print(f"Wrote {f.out}: {len(found):,} texts, {found.shape[1]} numbers each.")


if __name__ == "__main__":
    cli.run(main)
