"""Text generation with a trained language model: `python -m leanformer.generate --workdir=DIR --prompt="It is a"`.

      ... [--best|--step=N] [--tokens=N] [--temperature=0.8] [--top_k=40] [--top_p=0.95] [--seed=N]
      ... --prompts=FILE [--out=FILE]

The completion of a --prompt is streamed until the end of the document or the model's maximal length. --prompts has one
prompt per line; the output is one JSON line per prompt, {"prompt": ..., "text": ...}, at the end.
"""

import io
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
    """Yield the text of tokens, piece by piece as they arrive; a piece never ends within a character.

    Args:
        tokenizer: tokenizer of the model.
        tokens: token ids, as they are generated.
    """
    received: list[int] = []
    printed = ""
    for token in tokens:
        received.append(token)
        text = tokenizer.decode(received)
        if not text.endswith(BROKEN):
            yield text[len(printed) :]
            printed = text
    yield tokenizer.decode(received)[len(printed) :]


def read_prompts(f: cli.Values) -> list[str]:
    """Return the prompts that --prompt or --prompts gives; empty lines of the file are left out.

    Raises:
        ConfigError: not exactly one of the two is given, --out is given without --prompts, or a prompt or the file is
            not UTF-8, or the file is empty.
    """
    if (f.prompt is None) == (f.prompts is None):
        raise ConfigError('Pass exactly one of --prompt="..." and --prompts=FILE.')
    if f.out is not None and f.prompts is None:
        raise ConfigError("--out requires --prompts; the completion of a single --prompt is only printed.")
    if f.prompts is None:
        try:
            f.prompt.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"--prompt is not UTF-8: {error}. Convert it to UTF-8.") from error
        return [f.prompt]
    return [line for line in files.lines(f.prompts, "--prompts") if line.strip()]


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
def main(f: cli.Values) -> None:
    import jax

    from leanformer.costs.count import format_count
    from leanformer.runtime import phases
    from leanformer.tasks import artifacts, generation
    from leanformer.tasks.generation import NOTHING, Sampling
    from leanformer.training import inference

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", errors=sys.stdout.errors)
    prompts, how = read_prompts(f), Sampling(f.temperature, f.top_k, f.top_p)
    if f.out is not None:
        files.check_output_file(f.out, [f.prompts])
    tokenizer = artifacts.load_tokenizer(inference.run_folder(f.workdir))
    model = inference.load(f.workdir, step=f.step, best=f.best)
    model.check_causal()
    if tokenizer.vocabulary > model.config.model.vocabulary:
        raise ConfigError(
            f"model.vocabulary={model.config.model.vocabulary}: the tokenizer in {f.workdir} has "
            f"{tokenizer.vocabulary:,} tokens. Restore the tokenizer with which the model was trained."
        )
    given = [np.append(np.int32(tokenizer.end), tokens) for tokens in tokenizer.encode(prompts)]
    number = generation.tokens_available(given, model.config.model.max_length, f.tokens)
    key = jax.random.key(f.seed)
    columns = generation.generate(model.model, given, number, end=tokenizer.end, key=key, how=how)
    columns = phases.announce_first(columns, "Compiling, and generating the first token")
    if f.prompts is None:
        print(f.prompt, end="", flush=True)
        for piece in stream_text(tokenizer, (int(column[0]) for column in columns)):
            print(piece, end="", flush=True)
        print()
        return
    rows = np.stack([*columns], axis=1)
    texts = [tokenizer.decode(row[row != NOTHING]) for row in rows]
    lines = [json.dumps({"prompt": p, "text": t}, ensure_ascii=False) for p, t in zip(prompts, texts, strict=True)]
    if f.out is None:
        print("\n".join(lines))
    else:
        with files.atomic_write(Path(f.out).expanduser()) as draft:
            draft.write_text("\n".join([*lines, ""]), encoding="utf-8")
        print(f"Wrote {f.out}: {format_count(len(lines), 'text')}, step {model.step} of {f.workdir}.")


if __name__ == "__main__":
    cli.run(main)
