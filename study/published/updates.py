"""Does what narrow heads cost in open_lm shrink with the number of updates?

    python -m study.published.updates

2026-11-28: yes, as far as the grid can tell. Up to a head dimension of 64, the loss per doubling of heads falls by
0.012 nats for each doubling of updates, by 0.011 with the depth held. Depth, tokens and updates move together within a
batch size, so this is suggestive, not causal.

Updates are tokens / (sequences of a batch x 2,048). The grid's `batch` is per GPU, on 8 GPUs: the model of width 96,
depth 8 and 4 heads has `"global_bs": 64` in exp_data/models/c4_original-d=96_l=8_h=4-1.0.json of mlfoundations/scaling
(041eb2f), where the grid has 8 for the same tokens. archai's are `max_step` in the folders of its Transformer-XL sets,
archai/nlp/nas/saved_logs/SET/config_*/j*/model_config.yaml (af79c73); one file of each set was read. The files of its
GPT-2 sets have none; the searches' were not found.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from leanformer import cli
from study import tables
from study.published import effects, published_scaling, regression
from study.published.effects import Pair
from study.tables import Estimate


GPUS = 8
WIDEST = 64  # head dimension after a doubling, up to which open_lm loses
CONTRAST = 288  # width at which depths 4, 8, 12 ran with another batch than depths 16, 24
SINGLE = ((64, 32), (80, 40), (72, 24), (24, 8))  # steps of the head dimension that the page names


class Cell(NamedTuple):
    """What all models of a (width, depth) of open_lm's grid have in common; `batch` is in sequences, of all GPUs."""

    batch: int
    tokens: int
    updates: int


def read_cells() -> dict[tuple[int, int], Cell]:
    """Return the cells of open_lm's grid by (width, depth)."""
    return {
        (int(row["width"]), int(row["depth"])): Cell(GPUS * int(row["batch"]), int(row["tokens"]), int(row["updates"]))
        for row in tables.read("openlm_grid")
    }


def narrow_pairs() -> list[Pair]:
    """Return the doublings of heads that end at a dimension of WIDEST or less."""
    return [pair for pair in effects.list_pairs(published_scaling.openlm()) if pair.after <= WIDEST]


def fit(pairs: Sequence[Pair], *held: str) -> dict[str, Estimate]:
    """Return what a doubling of "updates", and of what is held ("depth", "tokens"), changes the loss per doubling of
    heads by: a level for each step of the head dimension, the (width, depth) as cluster."""
    cells = read_cells()
    about = [cells[pair.width, pair.depth] for pair in pairs]
    columns = {
        "updates": [cell.updates for cell in about],
        "depth": [pair.depth for pair in pairs],
        "tokens": [cell.tokens for cell in about],
    }
    steps = [(pair.before, pair.after) for pair in pairs]
    terms = {name: np.log2(columns[name]) for name in ("updates", *held)}
    terms |= {str(step): np.array([float(s == step) for s in steps]) for step in sorted(set(steps))[1:]}
    clusters = np.array([f"{pair.width}x{pair.depth}" for pair in pairs])
    found = regression.fit(np.array([pair.change for pair in pairs]), terms, clusters)
    return {name: Estimate.of(found[name]) for name in ("updates", *held)}


def by_updates(before: int, after: int) -> list[tuple[int, float]]:
    """Return updates and change of the loss of each pair of a step, the fewest updates first."""
    cells = read_cells()
    pairs = [pair for pair in narrow_pairs() if (pair.before, pair.after) == (before, after)]
    return sorted((cells[pair.width, pair.depth].updates, pair.change) for pair in pairs)


def contrast() -> Mapping[int, list[tuple[int, int, float]]]:
    """Return depth, updates and change of the loss at width CONTRAST by batch, for the step that both batches have."""
    cells, result = read_cells(), {}
    for pair in narrow_pairs():
        if pair.width == CONTRAST and (pair.before, pair.after) == (72, 24):
            cell = cells[pair.width, pair.depth]
            result.setdefault(cell.batch, []).append((pair.depth, cell.updates, pair.change))
    return result


def report() -> Iterator[str]:
    """Yield the lines of the report."""
    counts, pairs = [cell.updates for cell in read_cells().values()], narrow_pairs()
    cells = {(pair.width, pair.depth) for pair in pairs}
    yield f"open_lm: {min(counts):,} to {max(counts):,} updates in {len(counts)} cells"
    yield f"{len(pairs)} doublings to a dimension of {WIDEST} or less, in {len(cells)} cells"
    for held in ((), ("depth",), ("depth", "tokens")):
        found = ", ".join(f"{name} {estimate:+.4f}" for name, estimate in fit(pairs, *held).items())
        yield f"Change of the loss per doubling of heads, for each doubling of: {found}"
    wide = [pair for pair in effects.list_pairs(published_scaling.openlm()) if pair.after > WIDEST]
    yield f"Above {WIDEST}, {len(wide)} doublings: updates {fit(wide)['updates']:+.4f}"
    for step in SINGLE:
        yield "{} to {}: ".format(*step) + ", ".join(f"{n:,} updates {change:+.3f}" for n, change in by_updates(*step))
    for batch, rows in contrast().items():
        line = ", ".join(f"depth {d}, {n:,} updates {change:+.3f}" for d, n, change in rows)
        yield f"Width {CONTRAST}, 72 to 24, {batch} sequences a batch: {line}"


@cli.command()
def main(_: cli.Values) -> None:
    print(*report(), sep="\n")


if __name__ == "__main__":
    cli.run(main)
