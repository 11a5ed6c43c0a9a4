"""Six families of Leaner Transformers, small: an original against its lean shape, on packaged data.

    python -m study.heads.families --out=DIR [--seeds=3]
    python -m study.heads.families

With --out, trains two shapes of each family with three seeds, one run after another. Runs are stored in DIR, so the
same command resumes; every finished run is a row of study/data/families.csv. Without it, prints the table.

ViT and GPT have experiments of their own, DeiT was not trained. Shapes follow the paper's: half the layers and twice
the heads (in TNT and BERT two thirds of the layers, in TNT eight heads for five, in DaViT the third stage only), of the
same dimension or narrower as there. Both shapes have the same recipe and steps, and one
learning rate, which was not tuned: a difference may be one of the rate. The primary measure is the score on the
held-out split after the last step. A difference counts if its 95 % interval, paired by seed, excludes 0; intervals
are not corrected for the number of families.

Steps were lowered from 800 to 400, for BERT to 600, after four runs, which were dropped: all would have taken too long.
"""

import datetime
import itertools
import lzma
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from leanformer import cli, config
from leanformer.analysis import statistics
from leanformer.analysis.statistics import Difference
from leanformer.conditioning.spectrum import FLOOR
from leanformer.data import sequences
from leanformer.data.text.documents import BUNDLED, FORM_FEED
from leanformer.runtime import files
from leanformer.training import run_files
from study import common, tables
from study.heads.language import append_row
from study.tables import Estimate


ROWS = Path(__file__).parents[1] / "data" / "families.csv"
FIELDS = ("family", "shape", "seed", "score", "params", "train_flops", "seconds", "log10_condition", "bounds", "date")
PASSAGE = 256  # bytes of a passage of a novel
NOVELS = (0, 50, 78, 99, 154)  # index of each novel's first chapter among those to train on
HELD_OUT = 10  # every tenth chapter is held out, see tools/bundled/make_austen.py


class Family(NamedTuple):
    """Two shapes of one architecture, and the task on which they are trained."""

    task: str
    config: str  # name of the config of the original, with arguments
    original: Mapping[str, Any]  # keys of the section `model`
    lean: Mapping[str, Any]  # keys in which the lean shape differs
    data: str = "bundled:fashion_mnist"  # `data.name`, in which {} is the folder of the data
    recipe: Mapping[str, int] = {}  # of a generated dataset
    steps: int = 400
    batch_size: int = 32
    lr: float = 1e-3


TWO, FOUR = {"depth": 2, "num_heads": 2}, {"depth": 1, "num_heads": 4}  # layers and heads of Nyströmformer
FAMILIES = {
    "XCiT": Family(
        *("images", "xcit_m_24x8"),
        {"patch_size": 4, "width": 64, "depth": 8, "num_heads": 2, "head_dim": 32, "mlp_dim": 256, "layer_scale": 1.0}
        | {"class_depth": 1, "class_heads": 2, "class_head_dim": 32},
        {"depth": 4, "num_heads": 4, "class_heads": 4, "class_head_dim": 16},
    ),
    "TNT": Family(
        *("images", "tnt_b_12x10"),
        {"patch_size": 4, "pixel_stride": 2, "width": 80, "depth": 6, "num_heads": 5, "head_dim": 16, "mlp_dim": 320}
        | {"inner_width": 16, "inner_heads": 2, "inner_head_dim": 8, "inner_mlp_dim": 64},
        {"depth": 4, "num_heads": 8, "head_dim": 10, "mlp_dim": 160},
    ),
    "VOLO": Family(
        *("images", "volo_d3_original"),
        {"patch_size": 2, "stem_width": 16, "stem_stride": 2, "width": (32, 64, 64, 64), "depth": (2, 2, 4, 2)}
        | {"num_heads": (2, 4, 4, 4), "head_dim": (16,) * 4, "mlp_dim": (96, 192, 192, 192)}
        | {"class_depth": 1, "class_heads": 4, "class_head_dim": 16},
        {"depth": (1, 1, 2, 1), "num_heads": (4, 8, 8, 8), "head_dim": (8,) * 4, "class_heads": 8, "class_head_dim": 8},
    ),
    "DaViT": Family(
        *("images", "davit_b_original"),
        {"width": (16, 32, 64, 128), "depth": (1, 1, 5, 1), "num_heads": (1, 2, 4, 8), "window_size": 4}
        | {"head_dim": (16,) * 4, "channel_head_dim": (16,) * 4, "mlp_dim": (64, 128, 256, 512)},
        {"depth": (1, 1, 3, 1), "num_heads": (1, 2, 8, 8)}
        | {"head_dim": (16, 16, 8, 16), "channel_head_dim": (16, 16, 8, 16)},
    ),
    "Crammed BERT": Family(
        *("masked tokens", "quickstart_bert", {"depth": 3, "num_heads": 4, "head_dim": 32}),
        {"depth": 2, "num_heads": 8, "head_dim": 16},
        data="bundled:austen",
        steps=600,
        lr=3e-3,
    ),
    "Nyströmformer, ListOps": Family(
        *("sequences", "nystromformer_listops:landmarks=32", TWO | {"max_length": 128}, FOUR, "listops:{}/listops"),
        {"train": 50_000, "val": 100, "test": 2_000, "min_length": 50, "max_length": 128},
        steps=800,
    ),
    "Nyströmformer, Text": Family(
        *("sequences", "nystromformer_text:landmarks=32", TWO | {"max_length": PASSAGE, "num_classes": 5}, FOUR),
        "text:{}/passages",
        steps=800,
    ),
    "Nyströmformer, Image": Family(
        *("sequences", "nystromformer_image:landmarks=32", TWO | {"max_length": 196}, FOUR),
        "pixels:bundled:fashion_mnist",
        steps=800,
    ),
    "Nyströmformer, Retrieval": Family(
        *("sequences", "nystromformer_retrieval:landmarks=32", TWO | {"max_length": PASSAGE}, FOUR, "pairs:{}/pairs"),
    ),
    "Nyströmformer, Pathfinder": Family(
        *("sequences", "nystromformer_pathfinder:landmarks=32", TWO, FOUR, "pathfinder:{}"),
        batch_size=16,
    ),
}
SHAPES = ("original", "lean")
METRICS = {"images": "top1", "sequences": "top1", "masked tokens": "loss"}
PAIRS = {"train": 20_000, "eval": 100, "test": 2_000}  # examples of retrieval


def get_config(name: str, shape: str, seed: int, folder: Path) -> config.ConfigDict:
    """Return the config of a run, with data in `folder`."""
    family = FAMILIES[name]
    images = family.task == "images"
    c = config.load("quickstart" if images else family.config).unlock()
    if images:
        c.model = config.load(family.config).model.unlock()
        c.model.update(image_size=28, channels=1, num_classes=10, drop_path=0.0)
        c.optim.warmup_epochs = 0.0
    elif family.task == "sequences":
        c.data.recipe.update(family.recipe)
        c.model.dropout = 0.0
    c.model.update(family.original)
    c.model.update(family.lean if shape == "lean" else {})
    c.update(total_epochs=0.0, total_steps=family.steps, batch_size=family.batch_size, seed=seed, dtype="float32")
    c.update(loggers=(), log_every=100)
    c.data.update(name=family.data.format(folder), workers=0)
    if family.task == "sequences":
        c.data.max_length = c.model.max_length
        c.data.update(train_split="train", eval_split="t10k" if "fashion_mnist" in family.data else "test")
    c.optim.update(lr=family.lr, warmup_steps=family.steps // 10)
    c.eval.update(every=0, batch_size=100)
    c.probe.update(every=common.NEVER, measures=("attention_output",))  # at the start and at the end
    c.checkpoint.update(every=500, keep=1)
    return c.lock()


def read_passages(split: str) -> list[tuple[int, str]]:
    """Return the passages of a split of the bundled novels, each with the index of its novel."""
    packed = (BUNDLED / f"austen-{split}.txt.xz").read_bytes()
    result = []
    for index, chapter in enumerate(lzma.decompress(packed).decode().split(FORM_FEED)):
        # Chapters are numbered from 0 through both splits, and numbers 9, 19, ... are held out.
        place = index if split == "train" else (HELD_OUT - 1) * (index + 1) - 1
        novel = int(np.searchsorted(NOVELS, place, side="right")) - 1
        text = " ".join(chapter.split()).encode("ascii", "ignore").decode()
        starts = range(0, len(text) - PASSAGE + 1, PASSAGE)
        result += [(novel, text[start : start + PASSAGE]) for start in starts]
    return result


def write_passages(folder: Path) -> None:
    """Write the data of Text, labelled with the novel, and of Retrieval, pairs of passages of one or of two novels."""
    for name in ("passages", "pairs"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        lines = [f"{novel}\t{text}" for novel, text in read_passages(split)]
        files.write_text(folder / "passages" / f"{split}.tsv", "\n".join(["label\ttext", *lines, ""]))
    for seed, (split, count) in enumerate(PAIRS.items()):
        passages, rng = read_passages("train" if split == "train" else "test"), np.random.default_rng(seed)
        novels = np.array([novel for novel, _ in passages])
        lines = []
        for first in rng.integers(len(passages), size=count):
            same = bool(rng.integers(2))
            second = rng.choice(np.flatnonzero((novels == novels[first]) == same))
            lines.append(f"{same:d}\t{first}\t{second}\t{passages[first][1]}\t{passages[second][1]}")
        files.write_text(folder / "pairs" / f"new_aan_pairs.{split}.tsv", "\n".join([*lines, ""]))


def build_data(c: config.ConfigDict, folder: Path) -> None:
    """Write the data of a config that are not packaged, once."""
    if not (folder / "pairs" / "new_aan_pairs.test.tsv").is_file():
        write_passages(folder)
    sequences.build_sequences(c.data.name, None, c.data.recipe.to_dict())


def run(name: str, shape: str, seed: int, out: Path) -> dict[str, Any]:
    """Train one run, or read it if it is finished, and return its row."""
    c = get_config(name, shape, seed, out / "data")
    if FAMILIES[name].task == "sequences":
        build_data(c, out / "data")
    workdir = out / f"{name.lower().replace(', ', '-').replace(' ', '-')}-{shape}-seed={seed}"
    summary = common.train(c, workdir)
    return {
        **{
            "family": name,
            "shape": shape,
            "seed": seed,
            "score": f"{summary['final'][METRICS[FAMILIES[name].task]]:.5f}",
        },
        **{"params": summary["params"], "train_flops": summary["train_flops"]},
        **{"seconds": f"{summary['seconds']['steps']:.1f}", **read_condition(workdir)},
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%MZ"),
    }


def read_condition(workdir: Path) -> dict[str, str]:
    """Return the median over layers of the last probe's median log10 κ, and the share of layers where that is a bound.

    Inner layers of TNT, whose matrices have one row per pixel of a patch, are left out.
    """
    probed = run_files.read_records(workdir, "probe")[-1]
    layers = [
        median
        for name, values in probed.items()
        if name.endswith("attention_output") and ".inner." not in name
        for median in values["median"]
    ]
    bounds = np.mean([median * FLOOR > 0.999 for median in layers])
    return {"log10_condition": f"{np.median(np.log10(layers)):.4f}", "bounds": f"{bounds:.4f}"}


class Result(NamedTuple):
    """Result of one family: lean minus original, paired by seed."""

    family: str
    seeds: int
    scores: Mapping[str, float]  # mean by shape: top-1 in percent, or nats per masked token
    difference: Difference
    params: Mapping[str, int]
    train_flops: Mapping[str, float]  # per example
    kappa: Mapping[str, str]  # log10 κ, median over seeds; "≥" if at least half the layers of a run have a bound

    @property
    def unit(self) -> str:
        """The unit of the scores."""
        return "%" if METRICS[FAMILIES[self.family].task] == "top1" else "nats"

    @property
    def verdict(self) -> str:
        """The word for the difference: better, worse, or not shown."""
        interval = self.difference.interval()
        if interval.contains(0.0):
            return "not shown"
        return "better" if (interval.low > 0) == (self.unit == "%") else "worse"


def summarise(rows: Sequence[Mapping[str, str]]) -> Iterator[Result]:
    """Yield the results of the families whose two shapes have two common seeds or more."""
    for name, family in FAMILIES.items():
        runs = {shape: {r["seed"]: r for r in rows if (r["family"], r["shape"]) == (name, shape)} for shape in SHAPES}
        seeds = sorted(set.intersection(*map(set, runs.values())))
        if len(seeds) < 2:
            continue

        def read(shape: str, key: str, runs: Any = runs, seeds: Sequence[str] = seeds) -> np.ndarray:
            return np.array([float(runs[shape][seed][key]) for seed in seeds])

        scale = 100 if METRICS[family.task] == "top1" else 1
        scores = {shape: scale * read(shape, "score") for shape in SHAPES}
        yield Result(
            *(name, len(seeds), {shape: float(scores[shape].mean()) for shape in SHAPES}),
            statistics.paired(scores["lean"], scores["original"]),
            *({shape: int(read(shape, key)[0]) for shape in SHAPES} for key in ("params", "train_flops")),
            {
                shape: "≥ " * bool(read(shape, "bounds").max() >= 0.5)
                + f"{np.median(read(shape, 'log10_condition')):.1f}"
                for shape in SHAPES
            },
        )


def read_rows() -> list[dict[str, str]]:
    """Return the rows of finished runs."""
    return tables.read(ROWS) if ROWS.is_file() else []


def report(rows: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """Yield the lines of the table."""
    for r in summarise(rows):
        original, lean = (f"{r.params[shape]:,} parameters {r.scores[shape]:.3f}" for shape in SHAPES)
        yield (
            f"{r.family} ({r.unit}): {original}; lean {lean}; {Estimate.of(r.difference):+.3f}, {r.seeds} seeds: "
            f"{r.verdict}; log10 κ {r.kappa['original']}, lean {r.kappa['lean']}"
        )


@cli.command(
    cli.Flag("out", "Folder for data and runs; without it the table is printed."),
    cli.Flag("seeds", "Seeds of each shape.", int, default=3),
)
def main(f: cli.Values) -> None:
    for seed, name, shape in itertools.product(range(f.seeds) if f.out else (), FAMILIES, SHAPES):
        if (name, shape, str(seed)) not in {(row["family"], row["shape"], row["seed"]) for row in read_rows()}:
            row = run(name, shape, seed, Path(f.out).expanduser())
            append_row(row, ROWS, FIELDS)
            print(*row.values(), flush=True)
    print(*report(read_rows()), sep="\n")


if __name__ == "__main__":
    cli.run(main)
