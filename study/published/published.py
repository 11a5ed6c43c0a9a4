"""Tables of trained models from public repositories (study/data), as columns of logarithms.

Every size is log2, the mean over layers if layers differ, so a regression coefficient is the effect of a doubling.
Scores are natural logarithms of an error, or a loss in nats per token: both grow as the model gets worse.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from jaxtyping import Float

from study.shapes import planner
from study.tables import EVIDENCE, Row, read


Column = Float[np.ndarray, " n"]
BERT_VOCABULARY = 30_522
RANGES = (48.0, 96.0)  # upper ends of ranges of the head dimension
NATS, PERCENT = "nats", "% of error"
PARAMS, BLOCKS, FLOPS = "parameters", "parameters without embeddings", "FLOPs"


@dataclasses.dataclass(frozen=True)
class Table:
    """Trained models of one source and one score.

    Attributes:
        name: source and data set.
        kind: "decoder", "text encoder", "image encoder" or "staged image encoder".
        unit: NATS or PERCENT.
        score: score of each model.
        width, depth: log2 of the sizes.
        heads: mean log2 of the heads per layer; None if heads follow from the width.
        mlp: mean log2 of MLP / width; None if it is the same in all models.
        sizes: log2 of each cost at which models are compared.
        params: number of all parameters, embeddings included.
        other: columns of everything else that varies.
        clusters: a label per model; models with the same label are not independent. By default all are.
        by_width: True if the effect of heads is estimated for each width, and not by RANGES of the head dimension.
        comparable: False if depths cannot be compared.
        varies, tied: sentences on the design.
    """

    name: str
    kind: str
    unit: str
    score: Column
    width: Column
    depth: Column
    heads: Column | None
    mlp: Column | None
    sizes: Mapping[str, Column]
    params: Column
    varies: str
    tied: str
    other: Mapping[str, Column] = dataclasses.field(default_factory=dict)
    clusters: np.ndarray | None = None
    by_width: bool = False
    comparable: bool = True

    def __post_init__(self) -> None:
        if self.clusters is None:
            object.__setattr__(self, "clusters", np.arange(len(self.score)))

    @property
    def head_dim(self) -> Column:
        """Return log2 of the head dimension, total width / heads."""
        return self.width - self.heads

    def ranges(self) -> Iterator[tuple[tuple[int, int], float, np.ndarray]]:
        """Yield for each range of models: smallest, largest and mean log2 head dimension after a doubling, and models.

        The step is centred on a model's head dimension, so its result is half a doubling below. With `by_width` it is
        the step from 2 to 4 heads.
        """
        dims = 2**self.head_dim
        if self.by_width:
            for width in sorted(set(self.width)):
                result = round(2**width / 4)
                yield (result, result), math.log2(result), self.width == width
            return
        edges = (dims.min(), *(edge for edge in RANGES if dims.min() < edge < dims.max()), dims.max())
        for low, high in itertools.pairwise(edges):
            inside = (dims <= high) & ((dims > low) | (low == dims.min()))
            yield after_doubling(low, high), float(self.head_dim[inside].mean() - 0.5), inside


def after_doubling(low: float, high: float) -> tuple[int, int]:
    """Return the whole head dimensions half a doubling below a range, without its lower end."""
    return math.floor(low / 2**0.5) + 1, math.floor(high / 2**0.5)


def column(rows: Sequence[Row], name: str) -> Column:
    """Return a column of numbers."""
    return np.array([float(row[name]) for row in rows])


def numbers(text: str) -> np.ndarray:
    """Parse a list per layer."""
    return np.array(text.split(), float)


def layers(rows: Sequence[Row], name: str) -> Column:
    """Return the mean over layers of log2 of a list."""
    return np.array([np.log2(numbers(row[name])).mean() for row in rows])


def language_models() -> list[Table]:
    """Return the decoders of microsoft/archai: five random sets, and the six sets found by searches as one table."""
    rows = read("language_models")
    names = dict.fromkeys(row["set"] for row in rows if row["set"].startswith("random"))
    tables = [_language_models(name.removeprefix("random_"), [r for r in rows if r["set"] == name]) for name in names]
    return [*tables, _language_models("six searches lm1b", [r for r in rows if r["set"].startswith("pareto")])]


def _language_models(name: str, rows: list[Row]) -> Table:
    width, mlp = np.log2(column(rows, "width")), layers(rows, "mlp")
    sets = sorted({row["set"] for row in rows})[1:]
    shapes = np.array([" | ".join(row[key] for key in ("width", "heads", "mlp")) + row["set"][:12] for row in rows])
    return Table(
        name=f"archai {name.replace('_', ' ')}",
        kind="decoder",
        unit=NATS,
        score=np.log(column(rows, "perplexity")),
        width=width,
        depth=np.log2(column(rows, "depth")),
        heads=layers(rows, "heads"),
        mlp=mlp - width,
        sizes={
            PARAMS: np.log2(column(rows, "params")),
            BLOCKS: np.log2(column(rows, "block_params")),
        },
        params=column(rows, "params"),
        other={s: np.array([float(row["set"] == s) for row in rows]) for s in sets},
        clusters=shapes,
        varies="depth, width, heads and MLP of each layer",
        tied="total width = width, so more heads are narrower and cost no parameter. Heads are 2, 4 or 8: head "
        "dimension and width rise together. One learning rate. Context length and FLOPs are not in the table",
    )


def bert() -> list[Table]:
    """Return the encoders of FlexiBERT. Heads count self-attention layers; other mixers are controls."""
    rows = read("bert")
    shapes, errors, _ = planner.read_bert(EVIDENCE / "bert.csv")["BERT GLUE"]
    width, blocks = np.log2([shape.width for shape in shapes]), np.array([float(shape.params) for shape in shapes])
    kinds = sorted({kind for row in rows for kind in _mixers(row)})
    attention = [np.array([kind == "SA" for kind in row["operation"].split()]) for row in rows]
    doubled = [np.log2(np.array(shape.heads) / 2) for shape in shapes]
    heads, others = (
        np.array([(n * (a == of)).mean() for n, a in zip(doubled, attention, strict=True)]) for of in (True, False)
    )
    shares = {kind: np.array([_mixers(row).count(kind) / len(_mixers(row)) for row in rows]) for kind in kinds[1:]}
    return [
        Table(
            name="FlexiBERT GLUE",
            kind="text encoder",
            unit=PERCENT,
            score=np.log(errors).ravel(),
            width=width,
            depth=np.log2(column(rows, "depth")),
            heads=1 + heads,
            mlp=np.array([np.log2(shape.mlp).mean() for shape in shapes]) - width,
            sizes={BLOCKS: np.log2(blocks)},
            params=blocks + BERT_VOCABULARY * 2**width,
            other=shares | {"heads of other mixers": others},
            by_width=True,  # 2 or 4 heads: from 64 to 32 at one width, from 128 to 64 at the other
            varies="mixer, heads (2 or 4) and MLPs (1 or 3 of 512 or 1,024) of each layer; depth 2 or 4; width 128 or "
            "256",
            tied="total width = width. Two values of each size. Parameters of blocks are as in self-attention for "
            "every mixer; embeddings and FLOPs are not in the table",
        )
    ]


def _mixers(row: Row) -> list[str]:
    return [f"{a} {b}" for a, b in zip(row["operation"].split(), row["parameter"].split(), strict=True)]


def autoformer() -> list[Table]:
    """Return the AutoFormers of ViT-Bench-101: the plain recipe on three data sets, and CIFAR-100 with distillation."""
    rows = read("vision_autoformer")
    columns = {"CIFAR-100": "acc_c100_plain", "Flowers": "acc_flowers_plain", "Chaoyang": "acc_chaoyang_plain"}
    columns["CIFAR-100 distilled"] = "acc_c100_kd"
    tables = []
    for name, key in columns.items():
        part = [row for row in rows if row[key]]
        width = np.log2(column(part, "embed_dim"))
        second = np.array([float("_2" in row["source_file"]) for row in part])
        tables.append(
            Table(
                name=f"AutoFormer {name}",
                kind="image encoder",
                unit=PERCENT,
                score=np.log(1 - column(part, key) / 100),
                width=width,
                depth=np.log2(column(part, "depth")),
                heads=layers(part, "heads_per_layer"),
                mlp=layers(part, "mlp_ratio_per_layer"),
                sizes=_vision_sizes(part),
                params=column(part, "total_params_100cls"),
                other={"second file": second} if second.any() else {},
                comparable="distilled" not in name,
                varies="depth 12 to 14, width 192 to 240, heads (3 or 4) and MLP / width (3.5 or 4) of each layer",
                tied="total width = width. All ranges are narrow. Distillation touches the last layer only at depth 12",
            )
        )
    return tables


def pit() -> list[Table]:
    """Return the PiTs of ViT-Bench-101; `width` is the mean over blocks of the width of the block's stage."""
    rows = read("vision_pit")
    stages = np.array([np.log2(numbers(row["width_per_stage"])) for row in rows])
    depths = np.array([numbers(row["depth_per_stage"]) for row in rows])
    width = (stages * depths).sum(axis=1) / depths.sum(axis=1)
    tables = []
    for name, key in {"CIFAR-100": "c100", "Flowers": "flowers", "Chaoyang": "chaoyang"}.items():
        tables.append(
            Table(
                name=f"PiT {name}",
                kind="staged image encoder",
                unit=PERCENT,
                score=np.log(1 - column(rows, f"acc_{key}_plain") / 100),
                width=width,
                depth=np.log2(column(rows, "total_depth")),
                heads=width - np.log2(column(rows, "head_dim")),
                mlp=np.log2(column(rows, "mlp_ratio")),
                sizes=_vision_sizes(rows),
                params=column(rows, "total_params_100cls"),
                other={"taper": stages[:, 2] - stages[:, 0]},
                varies="heads and depth of three stages, head dimension 16 to 40, MLP / width 2 to 8",
                tied="width of a stage = heads x head dimension, one head dimension for all stages",
            )
        )
    return tables


def _vision_sizes(rows: Sequence[Row]) -> dict[str, Column]:
    keys = {PARAMS: "total_params_100cls", BLOCKS: "block_params"}
    keys[FLOPS] = "macs_224"
    return {name: np.log2(column(rows, key)) for name, key in keys.items()}


READERS: tuple[Callable[[], list[Table]], ...] = (language_models, bert, autoformer, pit)
