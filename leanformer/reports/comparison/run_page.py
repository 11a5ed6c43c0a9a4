"""HTML report of a single run: learning curves, costs, confusion matrix, conditioning, config and next commands."""

import shlex
from pathlib import Path
from typing import Any

from leanformer.analysis import confusion
from leanformer.analysis.runs import Run
from leanformer.conditioning import charts
from leanformer.conditioning import tables as measured
from leanformer.costs.count import format_number
from leanformer.reports import plots
from leanformer.reports.comparison import html
from leanformer.runtime import files


CAPTIONS = {
    "loss": "Loss over steps.",
    "accuracy": "Accuracy of the evaluation split over steps.",
    "lr": "Learning rate over steps.",
    "conditioning": "Median condition numbers over steps, one line per layer. Dashed: random-matrix reference.",
}
COSTS = {
    "params": ("parameters", "{:,}"),
    "forward_flops": ("forward FLOPs per example", None),
    "train_flops": ("training FLOPs per example", None),
    "memory_bytes": ("peak memory per device (compiled step), bytes", None),
    "vmapped_runs": ("runs trained as one program (memory, seconds: totals)", None),
    "examples_per_s": ("examples/s", "{:,.0f}"),
    "wall_s": ("wall-clock seconds", "{:,.1f}"),
    "goodput": ("fraction of the time in training steps (goodput)", "{:.1%}"),
}


def write(run: Run, out: Path) -> Path:
    """Write run.html to the folder `out`, which is created, and return its path."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / "run.html"
    files.write_text(path, page(run))
    return path


def text(run: Run) -> str:
    """Return a summary of a single run for a terminal."""
    lines = [f"A single run, {run.workdir.name}: nothing to compare it with. {_format_headline(run)}"]
    lines += [f"  {name:<52} {value}" for name, value in _format_costs(run)]
    return "\n".join(lines) + "\n"


def page(run: Run) -> str:
    """Return the HTML document."""
    figures = plots.make_run_plots([*run.records])
    parts = [html.paragraph(run.made_by, "soft"), html.paragraph(_format_headline(run), "answer")]
    learning = [name for name in figures if name != "conditioning"]
    drawn = (html.figure(figures[name], CAPTIONS.get(name, f"{name} over steps.")) for name in learning)
    parts += [html.heading("Learning"), html.row(drawn)]
    parts += _confusion(run) + _conditioning(run, figures)
    parts += [html.heading("Costs"), html.table(["cost", "value"], _format_costs(run))]
    spent = [[name, f"{seconds:,.1f}"] for name, seconds in (run.cost("seconds") or {}).items()]
    parts += [html.folded("Seconds by phase", html.table(["phase", "seconds"], spent))] if spent else []
    parts += [html.heading("Config"), html.table(["key", "value"], _format_rows(run, "model."))]
    rest = [row for row in _format_rows(run, "") if not row[0].startswith("model.")]
    parts += [html.folded("All other keys", html.table(["key", "value"], rest))]
    return html.page(run.workdir.name, [*parts, html.heading("Next commands"), html.code(_next_commands(run))])


def _format_headline(run: Run) -> str:
    final = {k: v for k, v in run.summary["final"].items() if isinstance(v, float)}
    values = ", ".join(f"{name} {value:.4g}" for name, value in final.items())
    return f"After {run.records[-1]['step']:,} steps: {values}. One seed gives no confidence interval."


def _confusion(run: Run) -> list[str]:
    path, results = run.workdir / "confusion.csv", run.workdir / "evaluation.json"
    if not path.is_file() or not results.is_file():
        return []
    (matrix, classes), evaluation = confusion.read_csv(path), files.read_json(results)
    source = f"{evaluation['split']}, step {evaluation['step']:,}"  # of the last call of `evaluate`
    caption = f"Confusion matrix in percent of the examples of each label: {source}."
    worst = confusion.most_confused(matrix, 5)
    rows = [[classes[label], classes[predicted], str(times)] for label, predicted, times in worst]
    drawn = html.figure(plots.make_confusion_plot(matrix, classes, ""), caption)
    return [html.heading("Most frequent errors"), drawn, html.table(["label", "prediction", "count"], rows)]


def _conditioning(run: Run, figures: dict[str, Any]) -> list[str]:
    probes = [record for record in run.records if record["kind"] == "probe"]
    if not probes:
        return []
    last = {name: figures for name, figures in probes[-1].items() if isinstance(figures, dict)}
    layers = charts.plot_by_layer(measured.from_record(last))
    caption = f"Condition numbers by layer at step {probes[-1]['step']}: median and 10-90 % range over examples."
    parts = [html.heading("Conditioning")]
    parts += [html.figure(layers, caption)] if layers is not None else []
    parts += [html.figure(figures["conditioning"], CAPTIONS["conditioning"])] if "conditioning" in figures else []
    return parts


def _format_costs(run: Run) -> list[list[str]]:
    rows = []
    for name, (label, template) in COSTS.items():
        value = run.cost(name)
        if value is not None and (name, value) != ("vmapped_runs", 1):
            rows.append([label, template.format(value) if template else format_number(float(value))])
    return rows


def _format_rows(run: Run, prefix: str) -> list[list[str]]:
    return [[key, str(value)] for key, value in run.keys.items() if key.startswith(prefix)]


def _next_commands(run: Run) -> str:
    workdir = f"--workdir={shlex.quote(str(run.workdir))}"
    steps = {
        "Evaluate on any split, with accuracy per class": f"evaluate {workdir} --best",
        "Measure the conditioning of every layer": f"probe {workdir}",
        "Train another seed, for a confidence interval": "train --config=FILE --config.seed=1 --workdir=OTHER",
        "Compare two runs": f"compare {shlex.quote(str(run.workdir))} OTHER --out=DIR",
        "Train several configurations and seeds, and compare them": "sweep --config=FILE "
        "--over=model.num_heads=4,8 --seeds=3 --workdir=SWEEP",
    }
    return "\n".join(f"# {why}\npython -m leanformer.{words}" for why, words in steps.items())
