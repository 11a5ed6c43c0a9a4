"""HTML report of a single run: learning curves, costs, confusion matrix, conditioning, config and next commands."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from leanformer.analysis import confusion
from leanformer.analysis.runs import Run
from leanformer.conditioning import charts
from leanformer.conditioning import tables as measured
from leanformer.conditioning.measures import quantity
from leanformer.costs.count import format_number
from leanformer.quantities import CONDITION, EMA, find
from leanformer.reports import plots
from leanformer.reports.comparison import html
from leanformer.runtime import files, text
from leanformer.tasks import artifacts, scores
from leanformer.training.progress import format_value


CAPTIONS = {
    "loss": "Loss over steps; lower is better. Training examples may be augmented and their labels smoothed, which "
    "raises their loss: the two are not on one scale.",
    "accuracy": "Accuracy on the evaluation split over steps; higher is better.",
    "lr": "Learning rate over steps.",
}
COSTS = {  # formats of `quantities.COSTS` and throughput
    "params": "{:,}",
    "forward_flops": None,
    "train_flops": None,
    "memory_bytes": None,
    "examples_per_s": "{:,.0f}",
    "wall_s": "{:,.1f}",
    "goodput": "{:.1%}",
}
SIZES = {
    "depth": "layers",
    "width": "width",
    "num_heads": "heads",
    "head_dim": "head dimension",
    "mlp_dim": "MLP width",
}
READING = (
    f"{CONDITION.sentence} Lines: median over the evaluated examples (or heads); band: 10-90 % of them. Dashed: a "
    "matrix of independent Gaussian entries of the same shape: a reference, not a target, which trained models mostly "
    "stay far above. κ alone says nothing about accuracy. Letters: T tokens, D width, N heads of dimension H, F hidden "
    "width of the MLP."
)


def write(run: Run, out: Path, back: str | None = None) -> Path:
    """Write the report of a run to run.html in the folder `out`, which is created, and return its path.

    Args:
        run: finished run.
        out: folder of the page.
        back: address of the comparison that the run is part of, relative to `out`, for a link.
    """
    out.mkdir(parents=True, exist_ok=True)
    path = out / "run.html"
    files.write_text(path, page(run, back))
    return path


def summary(run: Run) -> str:
    """Return the final scores and the costs of a single run as text for a terminal."""
    title = f"A single run, {run.workdir.name}: nothing to compare it with. {_format_headline(run)}"
    return text.page(title, ((label, value) for label, _, value in _format_costs(run)))


def page(run: Run, back: str | None = None) -> str:
    """Return the report of a run as an HTML document, with a link to the page `back` if given."""
    figures = plots.make_run_plots([*run.records])
    parts = [f"<p>{html.link(back, 'The comparison that this run is part of')}</p>"] if back else []
    parts += [html.paragraph(_format_model(run)), html.paragraph(_format_headline(run), "answer")]
    learning = [name for name in figures if name != "conditioning"]
    drawn = (html.figures([figures[name]], CAPTIONS.get(name) or find(name).sentence) for name in learning)
    parts += [html.heading("Learning"), html.row(drawn)]
    final = [
        [find(name).label, format_value(name, x), find(name).what, find(name).direction] for name, x in _scores(run)
    ]
    parts += [html.table(["final score", "value", "meaning", "direction"], final)]
    parts += _confusion(run) + _conditioning(run)
    costs = [[label, value, find(name).what] for (label, name, value) in _format_costs(run)]
    parts += [html.heading("Costs"), html.table(["cost", "value", "meaning"], costs)]
    spent = [[name, f"{seconds:,.1f}"] for name, seconds in (run.cost("seconds") or {}).items()]
    parts += [html.folded("Seconds by phase", html.table(["phase", "seconds"], spent))] if spent else []
    parts += [html.heading("Next commands"), html.code(_next_commands(run)), html.heading("Config")]
    parts += [html.folded("Keys of the model", html.table(["key", "value"], _format_rows(run, "model.")))]
    rest = [row for row in _format_rows(run, "") if not row[0].startswith("model.")]
    parts += [html.folded("All other keys", html.table(["key", "value"], rest)), html.paragraph(run.made_by, "soft")]
    return html.page(run.workdir.name, parts)


def _format_model(run: Run) -> str:
    """Return what was trained, in one sentence."""
    sizes = ", ".join(
        f"{words} {run.keys[f'model.{key}']}" for key, words in SIZES.items() if run.keys.get(f"model.{key}")
    )
    params = f"{run.cost('params'):,} parameters"
    train = _describe_split(run, "data.train_split")
    held_out = _describe_split(run, "data.eval_split", run.keys.get("eval.examples", 0))
    data = f"{run.keys.get('data.name')}, split {train}, evaluated on split {held_out}"
    return f"{run.keys.get('model.name')} with {params} ({sizes}), trained on {data}."


def _describe_split(run: Run, key: str, used: int = 0) -> str:
    """Return the name of a split and its number of examples, or of those that were `used` if fewer (0: all)."""
    split = run.keys.get(key)
    examples = artifacts.count_examples(run.workdir, str(split))
    if examples is None:
        return f"{split}"
    return f"{split} ({min(examples, used or examples):,} examples)"


def _scores(run: Run) -> list[tuple[str, float]]:
    """Return the final scores by name, the one that selects checkpoints first."""
    final = {k: v for k, v in run.summary["final"].items() if isinstance(v, float)}
    score = scores.read(run.summary.get("score", {"top1": None}))[0].name
    return sorted(final.items(), key=lambda item: item[0] != score)


def _format_headline(run: Run) -> str:
    score = scores.read(run.summary.get("score", {"top1": None}))[0]
    values = [(record[score.name], record["step"]) for record in run.records if _has_score(record, score.name)]
    (name, final), *others = _scores(run)
    batch = f" of {size:,} examples" if (size := run.keys.get("batch_size")) else ""
    parts = [f"After {run.records[-1]['step']:,} steps{batch}: {find(name).label} {format_value(name, final)}"]
    if values and name == score.name:
        best, step = (max if score.higher else min)(values, key=lambda pair: pair[0])
        parts.append(
            f" (best {format_value(name, best)} at step {step:,}, selected on this split; "
            f"{'higher' if score.higher else 'lower'} is better)"
        )
    parts += [f", {find(key).label} {format_value(key, value)}" for key, value in others if not key.startswith(EMA)]
    return f"{''.join(parts)}. One seed gives no confidence interval."


def _has_score(record: Mapping[str, Any], name: str) -> bool:
    return record["kind"] == "eval" and record.get(name) is not None


def _confusion(run: Run) -> list[str]:
    path, results = run.workdir / "confusion.csv", run.workdir / "evaluation.json"
    if not path.is_file() or not results.is_file():
        return []
    (matrix, classes), evaluation = confusion.read_csv(path), files.read_json(results)
    source = f"{evaluation['split']}, step {evaluation['step']:,}"  # of the last call of `evaluate`
    caption = f"Confusion matrix in percent of the examples of each label: {source}."
    worst = confusion.most_confused(matrix, 5)
    rows = [[classes[label], classes[predicted], str(times)] for label, predicted, times in worst]
    drawn = html.figures([plots.make_confusion_plot(matrix, classes, "")], caption, paper=True)
    return [html.heading("Most frequent errors"), drawn, html.table(["label", "prediction", "count"], rows)]


def _conditioning(run: Run) -> list[str]:
    """Return the part about condition numbers: how to read it, then one matrix after the other."""
    probes = [record for record in run.records if record["kind"] == "probe"]
    if not probes:
        return []
    snapshots = plots.probe_snapshots(run.records)
    parts = [html.heading("Conditioning"), html.paragraph(READING)]
    for name, entry in measured.from_record(plots.measured_values(probes[-1])).items():
        if not entry["shape"]:
            continue
        shape = charts.format_shape(entry["shape"])
        caption = f"{quantity(name).sentence} Here {shape}: rows (tokens, for activations) x columns. "
        caption += f"Left: by layer at step {probes[-1]['step']:,}. Right: over steps, a line per layer."
        drawn = [charts.plot_by_layer({name: entry})]
        drawn += (
            [charts.plot_over_steps([*snapshots], [{name: of[name]} for of in snapshots.values()])] if snapshots else []
        )
        parts.append(html.figures([figure for figure in drawn if figure is not None], caption))
    return parts


def _format_costs(run: Run) -> list[tuple[str, str, str]]:
    """Return label with unit, name and formatted value of each cost that the run recorded."""
    rows = []
    for name, template in COSTS.items():
        value = run.cost(name)
        if value is not None:
            shown = template.format(value) if template else format_number(float(value))
            rows.append((find(name).axis, name, shown))
    return rows


def _format_rows(run: Run, prefix: str) -> list[list[str]]:
    return [[key, str(value)] for key, value in run.keys.items() if key.startswith(prefix)]


def _next_commands(run: Run) -> str:
    workdir = f"--workdir={shlex.quote(str(run.workdir))}"
    steps = {
        "Evaluate on any split, with accuracy per class": f"evaluate {workdir} --best",
        "Measure other matrices, or another split or checkpoint": f"probe {workdir}",
        "Train another seed, for a confidence interval": "train --config=FILE --config.seed=1 --workdir=OTHER",
        "Compare two runs": f"compare {shlex.quote(str(run.workdir))} OTHER --out=DIR",
        "Train several configurations and seeds, and compare them": "sweep --config=FILE "
        "--over=model.num_heads=4,8 --seeds=3 --workdir=SWEEP",
    }
    names = "# FILE: the config file of this run. OTHER, DIR, SWEEP: new folders."
    return "\n".join([*(f"# {why}\npython -m leanformer.{words}" for why, words in steps.items()), names])
