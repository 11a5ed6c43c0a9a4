"""What matters on one GPU, in the order of its worth, in as many minutes as there are.

    python benchmarks/gpu.py --minutes=20 --out=DIR [--only=PATTERN,...]     # patterns of names, as a shell has them
    python benchmarks/gpu.py --minutes=20 --out=DIR --tiny                   # to try it, on a CPU too: tiny models
    python benchmarks/gpu.py --list

Every measurement is a process of its own with a limit of time: one that fails is a row that says so, and the rest goes
on. DIR/results.json and DIR/table.md have each row as soon as it is had. The same command goes on with what is missing,
then tries again what failed; what there is no time for is a row too. Several GPUs: the first that
CUDA_VISIBLE_DEVICES names. Logs are in DIR/logs.

peak GB is the most that the device's memory held, 10⁹ bytes; compile s the time to trace, lower and compile the
training step, without a cache; MFU the share of the maker's bfloat16 peak. What fits no memory has no figures.
"""

import argparse
import dataclasses
import fnmatch
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import zoo
from gpu_rows import ANSWER, REACHED

from leanformer.runtime import files


SCRIPT = Path(__file__).with_name("gpu_rows.py")
LEAN, ORIGINAL = "vit_b_7x16", "vit_b_12x12"
BATCH = 256  # of what is compared across tables
MEASURED, FAILED, NO_TIME = "measured", "failed", "no time left"
TABLES = {
    "training": "Training steps of ViT-B, lean (7x16) and original (12x12)",
    "peer": "timm's ViT-B/16 (12x12) in PyTorch, the same step",
    "quickstart": f"The quickstart, which is to reach {100 * REACHED:.0f} %",
    "resume": "A run with deterministic=True that was killed and went on, against one left alone",
    "probe": "The probe, every so many steps, and its share of training",
    "factorisations": "Singular values of one layer's matrices, milliseconds for all",
    "pipeline": "JPEG files decoded, augmented and fed to the training step",
    "families": "Every family of Table 4, lean against original",
}
SHARED = ("platform", "device", "runtime", "git", "versions")  # by all rows of a folder


@dataclasses.dataclass(frozen=True)
class Measurement:
    """A row to be had: a function of gpu_rows with its arguments, seconds it needs at least, and may take at most."""

    name: str
    table: str
    function: str
    arguments: dict[str, Any]
    needs: int = 45
    limit: int = 240


def wanted(out: Path) -> list[Measurement]:
    """All of them, what is worth most first."""
    runs = out / "runs"

    def train(config: str, batch: int, attention: str, table: str = "training") -> Measurement:
        arguments = {"config": config, "batch": batch, "attention": attention}
        return Measurement(f"{table} {config} {batch} {attention}", table, "train", arguments)

    def timm(compiled: bool) -> Measurement:
        name = f"peer timm {BATCH} {'compiled' if compiled else 'eager'}"
        return Measurement(name, "peer", "timm", {"batch": BATCH, "compiled": compiled})

    def run(function: str, needs: int) -> Measurement:
        return Measurement(function, function, function, {"folder": str(runs / function)}, needs, 420)

    feeding = {"config": LEAN, "batch": BATCH, "folder": str(runs / "pipeline")}
    families = [train(row.config, 128, "auto", "families") for row in zoo.TABLE]
    return [
        *(train(config, BATCH, "cudnn") for config in (LEAN, ORIGINAL)),
        timm(compiled=True),
        run("quickstart", 60),
        run("resume", 90),
        *(Measurement(f"probe {config}", "probe", "probe", {"config": config}) for config in (LEAN, ORIGINAL)),
        Measurement("factorisations", "factorisations", "factorisations", {}),
        Measurement("pipeline", "pipeline", "pipeline", feeding, 60),
        *(train(config, BATCH, "xla") for config in (LEAN, ORIGINAL)),
        timm(compiled=False),
        *families,
        *(train(config, batch, "cudnn") for batch in (512, 128, 64) for config in (LEAN, ORIGINAL)),
        *(train(config, batch, "xla") for batch in (512, 128, 64) for config in (LEAN, ORIGINAL)),
    ]


def measure(m: Measurement, log: Path, left: float, tiny: bool) -> dict[str, Any]:
    """The row of a measurement that has so many seconds left, whatever becomes of it."""
    row = {"name": m.name, "table": m.table}
    if left < m.needs:
        return row | {"status": NO_TIME}
    limit, begun = min(m.limit, left), time.monotonic()
    log.parent.mkdir(parents=True, exist_ok=True)
    status = _run([m.function, json.dumps(m.arguments | {"tiny": tiny})], log, limit)
    row |= {"status": FAILED, "seconds": round(time.monotonic() - begun, 1)} | ({"tiny": True} if tiny else {})
    lines = log.read_text(errors="replace").splitlines()
    answers = [line for line in lines if line.startswith(ANSWER)]
    if answers:
        return row | {"status": MEASURED} | json.loads(answers[-1].removeprefix(ANSWER))
    if status is not None:
        said = next((line.strip() for line in reversed(lines) if line.strip()), "nothing")
        return row | {"note": f"ended with status {status}: {said[:300]}"}
    if limit < m.limit:
        return row | {"status": NO_TIME, "note": f"stopped after {limit:.0f} s"}
    return row | {"note": f"stopped after {limit:.0f} s, its limit"}


def _run(words: list[str], log: Path, limit: float) -> int | None:
    """Exit status of a measurement; None if it took too long. Nothing of it is left running."""
    environ = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    command = [sys.executable, str(SCRIPT), *words]
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environ, start_new_session=True)
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            os.killpg(process.pid, signal.SIGKILL) if process.poll() is None else None
            process.wait()


def go(out: Path, todo: list[Measurement], deadline: float, tiny: bool, found: dict[str, Any]) -> None:
    """Measures what is missing of `todo`, then again what failed, and writes every row as it comes."""
    rows = {row["name"]: row for row in found["rows"]}
    left = [m for m in todo if rows.get(m.name, {}).get("status") != MEASURED]
    for m in sorted(left, key=lambda m: rows.get(m.name, {}).get("status", NO_TIME) != NO_TIME):
        shutil.rmtree(out / "runs", ignore_errors=True)
        log = out / "logs" / f"{m.name.replace(' ', '_')}.log"
        rows[m.name] = measure(m, log, deadline - time.monotonic(), tiny)
        found["rows"] = list(rows.values())
        files.write_json(out / "results.json", found)
        files.write_text(out / "table.md", page(found))
        shown = {key: value for key, value in rows[m.name].items() if key not in ("name", "table", "device")}
        print(f"{m.name}: {', '.join(f'{key} {value}' for key, value in shown.items())}", flush=True)
    shutil.rmtree(out / "runs", ignore_errors=True)


def page(found: dict[str, Any]) -> str:
    """All rows as Markdown tables; what was not measured stands below its table, with the reason."""
    facts, about = found["machine"], {row["name"]: row for row in found["rows"]}
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items() if version)
    lines = [f"# {facts['device']}", "", f"{versions}; {facts['runtime']}; commit {facts['git']}.", ""]
    if found["tiny"]:
        lines += ["**Tiny models: no figure here says anything about speed.**", ""]
    extras = ("memory GB", "products TFLOP/s", "share of peak")
    lines += [", ".join(f"{name} {facts[name]}" for name in extras if facts[name] is not None) + ".", ""]
    for name, title in TABLES.items():
        rows = [row for row in about.values() if row["table"] == name]
        shown = [row for row in rows if row["status"] == MEASURED]
        lines += [f"## {title}", ""] if rows else []
        lines += _table(beside(name, shown, about)) if shown else []
        others = [row for row in rows if row["status"] != MEASURED]
        lines += [f"- {row['name']}: {row['status']}. {row.get('note', '')}".rstrip() for row in others]
        lines += [""] if others else []
    return "\n".join(lines)


def beside(table: str, rows: list[dict[str, Any]], about: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of a table with what follows from those of others."""
    compared = [row for name, row in about.items() if name.startswith("training ") and f" {BATCH} cudnn" in name]
    rates = {row["config"]: row["examples/s"] for row in compared if row["status"] == MEASURED}
    if table == "families":
        return zoo.beside_print(rows)
    if table == "peer":
        return [row | {"it over ours": _ratio(row["examples/s"], rates.get(ORIGINAL))} for row in rows]
    if table == "probe":
        return [row | {f"share at batch {BATCH}": _share(row, rates.get(row["config"]))} for row in rows]
    if table == "pipeline":
        return [row | {"of the step alone": _ratio(row["fed examples/s"], rates.get(row["config"]))} for row in rows]
    return rows


def _ratio(figure: float, other: float | None) -> float | None:
    return round(figure / other, 3) if other else None


def _share(row: dict[str, Any], rate: float | None) -> str | None:
    return f"{100 * row['probe s'] / (row['every'] * BATCH / rate + row['probe s']):.3f} %" if rate else None


def _table(rows: list[dict[str, Any]]) -> list[str]:
    """Lines of a Markdown table of the figures, and an empty one. A dash: not known, or it does not fit."""
    hidden = ("name", "table", "status", "seconds", "tiny")
    columns = list(dict.fromkeys(key for row in rows for key in row if key not in hidden))
    cells = [["-" if row.get(column) is None else str(row[column]) for column in columns] for row in rows]
    return [*("".join(f"| {cell} " for cell in line) + "|" for line in (columns, ["---"] * len(columns), *cells)), ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--out", type=Path, help="folder of the results")
    parser.add_argument("--only", default="*", help="patterns of names, by commas")
    parser.add_argument("--tiny", action="store_true", help="tiny models and few steps; runs on a CPU too")
    parser.add_argument("--list", action="store_true", help="print the names, and stop there")
    options = parser.parse_args()
    out, deadline = (options.out or Path()).expanduser().resolve(), time.monotonic() + 60 * options.minutes
    todo = [m for m in wanted(out) if any(fnmatch.fnmatch(m.name, pattern) for pattern in options.only.split(","))]
    if options.list:
        print("\n".join(m.name for m in todo))
        return
    if options.out is None:
        parser.error("--out=DIR is wanted.")
    if not todo:
        parser.error(f"--only={options.only} names nothing; see --list.")
    facts = measure(Measurement("machine", "", "machine", {}, 0, 120), out / "logs" / "machine.log", 120, options.tiny)
    if facts["status"] != MEASURED:
        parser.error(f"The device cannot be used: {facts['note']}")
    found = {"machine": facts, "tiny": options.tiny, "rows": []}
    if (out / "results.json").is_file():
        before = json.loads((out / "results.json").read_text())
        then, now = ({key: f["machine"][key] for key in SHARED} | {"tiny": f["tiny"]} for f in (before, found))
        if then != now:
            parser.error(f"{out} has rows of {then}, and this is {now}. Take another folder.")
        found = before
    go(out, todo, deadline, options.tiny, found)
    print(f"\n{page(found)}\nIn {out}: results.json and table.md")


if __name__ == "__main__":
    main()
