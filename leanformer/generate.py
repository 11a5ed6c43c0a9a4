"""Text generation with a trained language model: `python -m leanformer.generate --workdir=DIR --prompt="It is a"`.

      ... [--best|--step=N] [--tokens=N] [--temperature=0.8] [--top_k=40] [--top_p=0.95] [--seed=N]
      ... --prompts=FILE [--out=FILE]

The completion of a --prompt is streamed until the end of the document or the model's maximal length. --prompts has one
prompt per line; the output is one JSON line per prompt, {"prompt": ..., "text": ...}, at the end.
"""

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from leanformer import cli
from leanformer.errors import ConfigError
from leanformer.runtime import files


BROKEN = "�"  # an incomplete character decodes to this


def stream_text(tokenizer: Any, tokens: Iterable[int]) -> Iterator[str]:
    """Yield the text of token ids, piece by piece as they arrive; a piece never ends within a character."""
    received: list[int] = []
    printed = ""
    for token in tokens:
        received.append(token)
        text = tokenizer.decode(received)
        if not text.endswith(BROKEN):
            yield text[len(printed) :]
            printed = text
    yield tokenizer.decode(received)[len(printed) :]


def read_prompts(flags: cli.Values) -> dict[str, str]:
    """Return {place for messages: prompt} of --prompt, or of the lines of --prompts that are not blank."""
    if (flags.prompt is None) == (flags.prompts is None) or (flags.out is not None and flags.prompts is None):
        raise ConfigError('Pass exactly one of --prompt="..." and --prompts=FILE; --out requires --prompts.')
    if flags.prompts is None:
        return {"--prompt": flags.prompt}
    lines = Path(flags.prompts).expanduser().read_text(encoding="utf-8-sig").split("\n")
    prompts = {f"{flags.prompts}, line {number}": line for number, line in enumerate(lines, 1) if line.strip()}
    if not prompts:
        raise ConfigError(f"--prompts={flags.prompts}: no line has a prompt.")
    return prompts


@cli.command(
    cli.Flag("workdir", "Folder of the run.", required=True),
    cli.Flag("step", "Checkpoint step to use; the newest if neither --step nor --best is given.", int),
    cli.Flag("best", "Use the best checkpoint by validation score.", bool, default=False),
    cli.Flag("prompt", "Text to complete; empty for a new document."),
    cli.Flag("prompts", "File with one prompt per line."),
    cli.Flag("tokens", "Maximal number of generated tokens; by default up to the model's length.", int, minimum=1),
    cli.Flag("temperature", "Sampling temperature; 0 takes the most likely token (greedy).", float, default=1.0),
    cli.Flag("top_k", "Sample from this many of the most likely tokens.", int),
    cli.Flag("top_p", "Sample from the most likely tokens that have this total probability.", float),
    cli.Flag("seed", "Seed of the sampling.", int, default=0, minimum=0, maximum=2**31 - 1),
    cli.Flag("out", "File to write the completions of --prompts to instead of printing them."),
)
def main(flags: cli.Values) -> None:
    import jax

    from leanformer.tasks import generation
    from leanformer.tasks.generation import NOTHING, Sampling
    from leanformer.training import inference

    prompts, sampling = read_prompts(flags), Sampling(flags.temperature, flags.top_k, flags.top_p)
    if flags.out is not None:
        files.check_output_file(flags.out, [flags.prompts])
    model = inference.load(flags.workdir, step=flags.step, best=flags.best)
    model.check_causal()
    tokenizer = model.tokenizer
    given = [np.append(np.int32(tokenizer.end), tokens) for tokens in tokenizer.encode([*prompts.values()])]
    numbers = generation.tokens_available(
        dict(zip(prompts, given, strict=True)), model.config.model.max_length, flags.tokens
    )
    key = jax.random.key(flags.seed)
    columns = generation.generate(model.model, given, numbers, end=tokenizer.end, key=key, how=sampling)
    if flags.prompts is None:
        print(flags.prompt, end="", flush=True)
        for piece in stream_text(tokenizer, (int(column[0]) for column in columns)):
            print(piece, end="", flush=True)
        print()
        return
    texts = [tokenizer.decode(row[row != NOTHING]) for row in np.stack([*columns], axis=1)]
    records = [{"prompt": prompt, "text": text} for prompt, text in zip(prompts.values(), texts, strict=True)]
    lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    if flags.out is None:
        sys.stdout.write(lines)
    else:
        files.write_text(Path(flags.out).expanduser(), lines)
        print(f"Wrote {flags.out}: {len(texts)} texts, step {model.step} of {flags.workdir}.")


if __name__ == "__main__":
    cli.run(main)
