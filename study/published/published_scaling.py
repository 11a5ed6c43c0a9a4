"""Tables of trained decoders from two studies of scaling: open_lm's grid and the Gemstones."""

import dataclasses
import math

import numpy as np

from study.published.published import BLOCKS, FLOPS, NATS, PARAMS, Column, Table, column, read


CONTEXT = 2048  # tokens of a training example
OPENLM_VOCABULARY, GEMSTONES_VOCABULARY = 50_432, 50_304
GEMSTONES_LOSSES = ("loss_fineweb_edu", "loss_dclm")


@dataclasses.dataclass(frozen=True)
class OpenLM:
    """Grid of open_lm. Losses are the lowest over warm-ups of a (width, depth, heads).

    Attributes:
        runs: loss by (width, depth, heads, warm-up).
        cells: loss by heads, by (width, depth).
    """

    runs: dict[tuple[int, int, int, int], float]
    cells: dict[tuple[int, int], dict[int, float]]


def openlm() -> OpenLM:
    """Return the decoders of open_lm's grid."""
    runs = {}
    cells: dict[tuple[int, int], dict[int, float]] = {}
    for row in read("openlm_grid"):
        width, depth, heads, warmup = (int(row[key]) for key in ("width", "depth", "num_heads", "warmup"))
        loss = float(row["loss"])
        runs[width, depth, heads, warmup] = loss
        cell = cells.setdefault((width, depth), {})
        cell[heads] = min(loss, cell.get(heads, math.inf))
    return OpenLM(runs, cells)


def openlm_cells(grid: OpenLM) -> Table:
    """Return the best model of each (width, depth), for depth against width."""
    tokens = {(int(r["width"]), int(r["depth"])): float(r["tokens"]) for r in read("openlm_grid")}
    width, depth = np.array([*grid.cells], float).T
    params = np.array([tokens[cell] / 20 for cell in grid.cells])  # checked: every count of the architecture
    blocks = params - 2 * OPENLM_VOCABULARY * width
    flops = _decoder_flops(width, depth, blocks, OPENLM_VOCABULARY) * 20 * params
    return Table(
        name="open_lm",
        kind="decoder",
        unit=NATS,
        score=np.array([min(losses.values()) for losses in grid.cells.values()]),
        width=np.log2(width),
        depth=np.log2(depth),
        heads=None,
        mlp=None,
        sizes=_decoder_sizes(params, blocks, flops),
        params=params,
        varies="width 96 to 1,024, depth 4 to 24, heads 4 to 16, warm-up",
        tied="total width = width, so more heads are narrower and cost no parameter. MLP = 8/3 width, rounded up to "
        "256. Tokens = 20 x parameters. One learning rate and one seed",
    )


def gemstones(loss: str = GEMSTONES_LOSSES[0], tokens: int | None = 350_000_000_000) -> Table:
    """Return the Gemstones after a number of tokens, or all checkpoints; the unit is the shape."""
    rows = [row for row in read("gemstones") if tokens is None or int(row["tokens"]) == tokens]
    width, depth, params = (column(rows, key) for key in ("width", "depth", "params"))
    blocks, seen = params - 2 * GEMSTONES_VOCABULARY * width, column(rows, "tokens")
    flops = _decoder_flops(width, depth, blocks, GEMSTONES_VOCABULARY) * seen
    moments = sorted(set(seen))[1:]
    return Table(
        name=f"Gemstones {'FineWeb-Edu' if loss.endswith('edu') else 'DCLM'}",
        kind="decoder",
        unit=NATS,
        score=column(rows, loss),
        width=np.log2(width),
        depth=np.log2(depth),
        heads=None,
        mlp=None,
        sizes=_decoder_sizes(params, blocks, flops),
        params=params,
        other={f"{x:.0f}": (seen == x).astype(float) for x in moments},
        clusters=np.array([f"{w:.0f}x{d:.0f}" for w, d in zip(width, depth, strict=True)]),
        varies="width 256 to 3,072 and depth 3 to 80",
        tied="head dimension 128, total width = width, MLP = 4 width (gated): heads, total width and width are one "
        "size. Equal tokens. One seed",
    )


def _decoder_sizes(params: Column, blocks: Column, flops: Column) -> dict[str, Column]:
    sizes = {PARAMS: params, BLOCKS: blocks, FLOPS: flops}
    return {name: np.log2(size) for name, size in sizes.items()}


def _decoder_flops(width: Column, depth: Column, blocks: Column, vocabulary: int) -> Column:
    """Return forward matmul FLOPs per token: blocks, the output head, and attention over CONTEXT tokens."""
    return 2 * (blocks + width * vocabulary) + 4 * CONTEXT * width * depth
