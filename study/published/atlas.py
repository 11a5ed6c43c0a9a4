"""Effects of heads, depth and MLP in published tables of trained models.

    python -m study.published.atlas [--out=DIR] [--write]

2026-11-25. Twice the heads at the same total width: open_lm's decoders lose 0.035 to 0.135 nats per token if the heads
get a dimension of 48 or less, and nothing at 65 and above. archai's decoders lose nothing at any dimension; a gain of
0.007 to 0.02 depends on the form of the regression up to 33. Deeper instead of wider gains at equal parameters, but not
without embeddings or at equal FLOPs.

Prints every effect (effects.py) of the tables of published.py in about 10 s. --out writes effects.csv, tables.md and
the picture. --write writes the picture of docs/ and study/data/published_effects.csv, which docs/published_models.md
discusses.

An effect is the change of the score when a size doubles; positive is worse. It is in nats per token for decoders and in
percent of the error for other models. Intervals are 95 %, by the jackknife over independent units: the (width, depth)
in open_lm, the shape in Gemstones and in archai's searches, the model elsewhere. Each effect is estimated in two or
three functional forms. p belongs to the first form, corrected over the first forms of all questions (Holm).

`python -m study.published.atlas_models` prints the command that trains a row, and compares parameter counts.
"""

import dataclasses
import textwrap
from collections.abc import Iterable
from pathlib import Path

from leanformer import cli
from study import tables as evidence
from study.figures.front_picture import DOCS
from study.published import atlas_page, atlas_picture, published, published_scaling, reruns, small_vits, updates
from study.published import effects as estimates
from study.published import published_effects as library
from study.published.effects import DEPTH, HEADS, MLP, STEP, Effect
from study.published.published import Table


FACTS = """\
QK-norm. open_lm: the keys of the grid do not say. All 104 models of the same study outside the grid have it, and 101 of
them the grid's learning rate and weight decay (mlfoundations/scaling at a003c49, exp_data/models). It is one LayerNorm
over all heads together, so it does not equalise heads (mlfoundations/open_lm at 9bb92ef, open_lm/model.py).
archai: its GPT-2 is Hugging Face's attention, without QK-norm.

Lists per layer enter as the mean log2 over layers. Ranges of the head dimension are those after a doubling of heads.
The means of open_lm's pairs equal the means of the neighbouring head counts within each (width, depth); the interval is
Student's over (width, depth) cells, which is wider than a bootstrap over pairs where there are few."""


def tables() -> list[Table]:
    """Return every published table, open_lm first."""
    first = [published_scaling.openlm_cells(published_scaling.openlm())]
    first += [published_scaling.gemstones(loss) for loss in published_scaling.GEMSTONES_LOSSES]
    return first + [table for read in published.READERS for table in read()]


def effects() -> list[Effect]:
    """Return every effect of every published table."""
    openlm, *others = tables()
    result = [*estimates.estimate_openlm(published_scaling.openlm(), openlm)]
    for table in (openlm, *others):
        result += estimates.estimate_heads(table)
        result += [effect for question in (DEPTH, MLP) for effect in estimates.estimate_trade(table, question)]
    result += estimates.estimate_checkpoints(published_scaling.gemstones(tokens=None))
    return estimates.correct(result)


def select_rows(results: Iterable[Effect]) -> list[library.Effect]:
    """Return the rows of published_effects.csv: heads by range in the main form, and steps."""
    by_name = {table.name: table for table in tables()}
    rows = []
    for e in results:
        table = by_name[e.table]
        by_range = e.question == HEADS and e.main and not e.at
        if (by_range or e.question == STEP) and table.comparable and e.kind in library.KINDS.values():
            extents = {
                name: estimates.extent(x)
                for name, x in (("width", 2**table.width), ("depth", 2**table.depth), ("params", table.params))
            }
            ends = {name: round(getattr(e, name), 5) for name in ("value", "low", "high")}
            rows.append(
                library.Effect(
                    kind=e.kind,
                    source=e.table,
                    unit=e.unit,
                    models=e.models,
                    units=e.units,
                    dims=e.dims,
                    exact=e.question == STEP,
                    measured=e.widths,
                    **ends,
                    **extents,
                )
            )
    return rows


def write(path: Path, rows: Iterable[Effect | library.Effect]) -> None:
    """Write dataclasses as a CSV file; pairs of numbers are separated by a space."""
    records = [
        {k: " ".join(map(str, v)) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(row).items()}
        for row in rows
    ]
    evidence.write(path, records)


def format_row(e: Effect) -> str:
    """Format a line of the report."""
    where = ", ".join(filter(None, (e.at, e.dims and " to ".join(map(str, e.dims)))))
    counts, worse = f"{e.models:>5} {e.units:>5}", "" if e.worse is None else f"{e.worse} worse"
    change = f"{atlas_page.format_effect(e):<28} {worse:<9} {atlas_page.format_p(e)}"
    return f"{e.table:<32} {where:<30} {e.form:<24} {counts}  {change}".rstrip()


def report(results: list[Effect], small: list[Effect]) -> None:
    """Print the design of each table, and every effect."""
    designs: dict[tuple[str, str], list[Table]] = {}
    for table in tables():
        designs.setdefault((table.varies, table.tied), []).append(table)
    for (varies, tied), group in designs.items():
        names = ", ".join(f"{table.name} ({len(table.score)} {table.kind}s)" for table in group)
        print(textwrap.fill(f"{names}. Varies: {varies}. Tied: {tied}.", 120) + "\n")
    print(FACTS)
    for question in dict.fromkeys(e.question for e in results):
        group = [e for e in results if e.question == question]
        print(f"\n{question}: change per doubling\n")
        heading = f"{'table':<32} {'held equal, head dimension':<30} {'form':<24} {'n':>5} {'units':>5}"
        print(f"{heading}  {'change (95 %)':<28} {'pairs':<9} p")
        print(*map(format_row, group), sep="\n")
    print("\nthis project's own ViTs, heads at fixed total width: change per doubling\n")
    print(*map(format_row, small), sep="\n")
    print("\nnumbers of updates (study/published/updates.py)\n", *updates.report(), sep="\n")
    print("\nreruns by strangers (study/published/reruns.py)\n", *reruns.report(), sep="\n")


@cli.command(
    cli.Flag("out", "Folder for the effects and the picture."),
    cli.Flag("write", "Write the picture of docs/ and the table of the package.", bool, default=False),
)
def main(f: cli.Values) -> None:
    results, small = effects(), small_vits.estimate()
    report(results, small)
    if f.out is not None:
        folder = Path(f.out).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        write(folder / "effects.csv", [*results, *small])
        text = f"{atlas_page.head_table([*results, *small])}\n\n{atlas_page.trade_table(results)}\n"
        (folder / "tables.md").write_text(text, encoding="utf-8")
        atlas_picture.draw(folder, [*results, *small])
    if f.write:
        write(library.PATH, select_rows(results))
        atlas_picture.draw(DOCS, [*results, *small])


if __name__ == "__main__":
    cli.run(main)
