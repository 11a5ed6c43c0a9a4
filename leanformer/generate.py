"""Texts that a trained language model goes on with: `python -m leanformer.generate --workdir=DIR --prompt="It is a"`.

      ... [--best|--step=N] [--tokens=N] [--temperature=0.8] [--top_k=40] [--top_p=0.95] [--seed=N]
      ... --prompts=FILE [--out=FILE]

A prompt is printed with what follows it, as it comes, up to the end of a document or as many tokens as the model can
see. A file has a prompt a line; each gives a line of JSON, {"prompt": ..., "text": ...}, when all are done.
"""

import io
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import jax
import numpy as np

from leanformer import cli
from leanformer.data.text import Tokenizer
from leanformer.errors import ConfigError
from leanformer.runtime import files
from leanformer.tasks import artifacts, generation
from leanformer.tasks.generation import NOTHING, Sampling
from leanformer.training import inference


BROKEN = "�"  # what a part of a character is decoded to


def pieces(tokenizer: Tokenizer, tokens: Iterable[int]) -> Iterator[str]:
    """The text of tokens as it comes, never a part of a character."""
    seen: list[int] = []
    said = ""
    for token in tokens:
        seen.append(token)
        text = tokenizer.decode(seen)
        if not text.endswith(BROKEN):
            yield text[len(said) :]
            said = text
    yield tokenizer.decode(seen)[len(said) :]


def read_prompts(f: cli.Values) -> list[str]:
    """Those of the flags. Raises ConfigError for none or both, and for a file that has none."""
    if (f.prompt is None) == (f.prompts is None):
        raise ConfigError('Give one of --prompt="..." and --prompts=FILE: what is to be gone on with.')
    if f.out is not None and f.prompts is None:
        raise ConfigError("--out goes with --prompts: a single prompt is printed.")
    if f.prompts is None:
        try:
            f.prompt.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"--prompt is not UTF-8: {error}. Convert it.") from error
        return [f.prompt]
    return [line for line in files.lines(f.prompts, "--prompts") if line.strip()]


def room(prompts: Sequence[np.ndarray], most: int, asked: int | None) -> int:
    """How many tokens are to follow. Raises ConfigError for more than the model sees, prompt and end token included."""
    longest = max(map(len, prompts))
    wanted = most - longest if asked is None else asked
    if wanted < 1 or longest + wanted > most:
        raise ConfigError(
            f"The model sees model.max_length={most} tokens, and the longest prompt has {longest}, with the one that "
            f"begins a document. Ask for {max(most - longest, 0)} more at most (--tokens), or shorten it."
        )
    return wanted


@cli.command(
    cli.Flag("workdir", "Folder of the run.", required=True),
    cli.Flag("step", "Checkpoint to take; the newest if neither this nor --best is given.", int),
    cli.Flag("best", "Take the best checkpoint by evaluation during training.", bool, default=False),
    cli.Flag("prompt", "Text to go on with; empty for a new document."),
    cli.Flag("prompts", "File with a text a line."),
    cli.Flag("tokens", "Most that follow a prompt; as many as the model sees if unset.", int),
    cli.Flag("temperature", "0: the likeliest token; 1: drawn as it was learned.", float, default=1.0),
    cli.Flag("top_k", "Draw from so many tokens, the likeliest.", int),
    cli.Flag("top_p", "Draw from the likeliest tokens with this share of the probability.", float),
    cli.Flag("seed", "Of what is drawn.", int, default=0),
    cli.Flag("out", "File to write to instead of printing, of --prompts."),
)
def main(f: cli.Values) -> None:
    prompts, how = read_prompts(f), Sampling(f.temperature, f.top_k, f.top_p)
    if f.out is not None:
        files.check_writable(Path(f.out).expanduser().parent)
    tokenizer = artifacts.load_tokenizer(inference.run_folder(f.workdir))
    model = inference.load(f.workdir, step=f.step, best=f.best)
    if tokenizer.vocabulary > model.config.model.vocabulary:
        raise ConfigError(
            f"{f.workdir} holds a tokenizer of {tokenizer.vocabulary:,} tokens, and the model knows "
            f"model.vocabulary={model.config.model.vocabulary}. Put back the tokenizer that it was trained with."
        )
    given = [np.append(np.int32(tokenizer.end), tokens) for tokens in tokenizer.encode(prompts)]
    number = room(given, model.config.model.max_length, f.tokens)
    key = jax.random.key(f.seed)
    columns = generation.generate(model.model, given, number, end=tokenizer.end, key=key, how=how)
    if f.prompts is None:
        print(f.prompt, end="", flush=True)
        for piece in pieces(tokenizer, (int(column[0]) for column in columns)):
            print(piece, end="", flush=True)
        print()
        return
    rows = np.stack([*columns], axis=1)
    texts = [tokenizer.decode(row[row != NOTHING]) for row in rows]
    lines = [json.dumps({"prompt": p, "text": t}, ensure_ascii=False) for p, t in zip(prompts, texts, strict=True)]
    if f.out is None:
        print("\n".join(lines))
    else:
        with files.asked(f.out) as draft:
            draft.write_text("\n".join([*lines, ""]), encoding="utf-8")
        print(f"Wrote {f.out}: {len(lines)} texts, step {model.step} of {f.workdir}.")


if __name__ == "__main__":
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")
    cli.run(main)
