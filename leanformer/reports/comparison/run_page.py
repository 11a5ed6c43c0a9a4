"""The page of one run: what it was, how it went, what it cost, how its matrices are conditioned, and how to go on."""

import shlex
from pathlib import Path
from typing import Any

from leanformer.analysis.runs import Run
from leanformer.conditioning import charts
from leanformer.conditioning import tables as measured
from leanformer.costs.count import human
from leanformer.reports import confusion, plots
from leanformer.reports.comparison import html
from leanformer.runtime import files


CAPTIONS = {
    "loss": "Loss over steps.",
    "accuracy": "Accuracy of the evaluation split over steps.",
    "lr": "Learning rate over steps.",
    "conditioning": "Median condition numbers over steps, a line a layer; dashed: a Gaussian matrix of that shape.",
}
COSTS = {
    "params": ("parameters", "{:,}"),
    "forward_flops": ("FLOPs of an example, forward", None),
    "train_flops": ("FLOPs of an example, training", None),
    "memory_bytes": ("peak memory of a device by the compiled step, bytes", None),
    "together": ("runs trained as one program: its memory and seconds are of all", None),
    "examples_per_s": ("examples a second", "{:,.0f}"),
    "wall_s": ("seconds, all in all", "{:,.1f}"),
    "goodput": ("share of the time that went into steps", "{:.1%}"),
}


def write(run: Run, out: Path) -> Path:
    """Writes run.html into `out`, which is made; returns its path."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / "run.html"
    files.write_text(path, page(run))
    return path


def text(run: Run) -> str:
    """The run in a few lines for a terminal."""
    lines = [f"One run, {run.workdir.name}: no other to compare it with. {_headline(run)}"]
    lines += [f"  {name:<52} {value}" for name, value in _costs(run)]
    return "\n".join(lines) + "\n"


def page(run: Run) -> str:
    """The whole document."""
    figures = plots.of_run([*run.records])
    parts = [html.paragraph(run.made_by, "soft"), html.paragraph(_headline(run), "answer")]
    learning = [name for name in figures if name != "conditioning"]
    drawn = (html.figure(figures[name], CAPTIONS.get(name, f"{name} over steps.")) for name in learning)
    parts += [html.heading("Learning"), html.row(drawn)]
    parts += _confusion(run) + _conditioning(run, figures)
    parts += [html.heading("What it cost"), html.table(["what", "figure"], _costs(run))]
    spent = [[name, f"{seconds:,.1f}"] for name, seconds in (run.cost("seconds") or {}).items()]
    parts += [html.folded("Where the seconds went", html.table(["part", "seconds"], spent))] if spent else []
    parts += [html.heading("Config"), html.table(["key", "value"], _rows(run, "model."))]
    rest = [row for row in _rows(run, "") if not row[0].startswith("model.")]
    parts += [html.folded("All other keys", html.table(["key", "value"], rest))]
    return html.page(run.workdir.name, [*parts, html.heading("How to go on"), html.code(_onward(run))])


def _headline(run: Run) -> str:
    final = {k: v for k, v in run.summary["final"].items() if isinstance(v, float)}
    said = ", ".join(f"{name} {value:.4g}" for name, value in final.items())
    return f"After {run.records[-1]['step']:,} steps: {said}. One seed: no interval can be had from it."


def _confusion(run: Run) -> list[str]:
    path, beside = run.workdir / "confusion.csv", run.workdir / "evaluation.json"
    if not path.is_file() or not beside.is_file():
        return []
    (matrix, classes), told = confusion.read_csv(path), files.read_json(beside)
    of = f"{told['split']}, at step {told['step']:,}"  # whatever `evaluate` was asked last
    caption = f"Which class is taken for which, in percent of the examples with that label: {of}."
    worst = confusion.mistakes(matrix, 5)
    rows = [[classes[label], classes[taken], str(times)] for label, taken, times in worst]
    drawn = html.figure(plots.of_confusion(matrix, classes, ""), caption)
    return [html.heading("Mistakes"), drawn, html.table(["label", "taken for", "times"], rows)]


def _conditioning(run: Run, figures: dict[str, Any]) -> list[str]:
    probes = [record for record in run.records if record["kind"] == "probe"]
    if not probes:
        return []
    last = {name: figures for name, figures in probes[-1].items() if isinstance(figures, dict)}
    layers = charts.by_layer(measured.recorded(last))
    caption = f"Condition numbers by layer at step {probes[-1]['step']}: median and 10-90 % over examples."
    parts = [html.heading("Conditioning")]
    parts += [html.figure(layers, caption)] if layers is not None else []
    parts += [html.figure(figures["conditioning"], CAPTIONS["conditioning"])] if "conditioning" in figures else []
    return parts


def _costs(run: Run) -> list[list[str]]:
    rows = []
    for name, (what, shape) in COSTS.items():
        value = run.cost(name)
        if value is not None and (name, value) != ("together", 1):
            rows.append([what, shape.format(value) if shape else human(float(value))])
    return rows


def _rows(run: Run, prefix: str) -> list[list[str]]:
    return [[key, str(value)] for key, value in run.keys.items() if key.startswith(prefix)]


def _onward(run: Run) -> str:
    workdir = f"--workdir={shlex.quote(str(run.workdir))}"
    steps = {
        "by class too, on any split": f"evaluate {workdir} --best",
        "every measure of every layer": f"probe {workdir}",
        "another seed, for an interval": "train --config=FILE --config.seed=1 --workdir=OTHER",
        "are they different?": f"compare {shlex.quote(str(run.workdir))} OTHER --out=DIR",
        "shapes and seeds at once, with the same page at its end": "sweep --config=FILE --over=model.num_heads=4,8 "
        "--seeds=3 --workdir=SWEEP",
    }
    return "\n".join(f"# {why}\npython -m leanformer.{words}" for why, words in steps.items())
