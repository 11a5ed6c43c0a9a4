"""Generated pages of the manual: commands, config keys, models and measures, from the code itself."""

import ast
import importlib
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from leanformer import config
from leanformer import text as words
from leanformer.__main__ import COMMANDS as SUMMARIES
from leanformer.analysis.shapes import set_up_without_data
from leanformer.conditioning import ACTIVATIONS, WEIGHTS
from leanformer.config import SHIPPED, iterate_keys, key_docs
from leanformer.costs import count


ROOT = Path(__file__).parents[1]
SIZES = ("depth", "num_heads", "head_dim", "width", "mlp_dim")
# The end of a description that repeats the sizes, such as ": 7 layers, 16 heads of dimension 64, MLP 1536".
SIZES_IN_WORDS = re.compile(r"[:;] (\d+ layers?|depths?|\d+ heads)\b.*$")


def write(folder: Path) -> None:
    """Write all generated pages; a page that is the same stays as it is, so that Sphinx does not read it again."""
    folder.mkdir(exist_ok=True)
    pages = {"commands": commands(), "config_keys": config_keys(), "models": models(), "measures": measures()}
    pages["quantities"] = quantities()
    for name, lines in pages.items():
        text = "\n".join(lines) + "\n"
        path = folder / f"{name}.md"
        if not path.is_file() or path.read_text() != text:
            path.write_text(text)


def table(titles: Sequence[str], rows: Sequence[Sequence[Any]], right: Container[int] = ()) -> list[str]:
    """Format rows as a Markdown table, with the columns `right` aligned to the right."""
    cells = [titles, ["---:" if i in right else "---" for i in range(len(titles))], *rows]
    return ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in cells] + [""]


def commands() -> Iterator[str]:
    """Yield the page of commands."""
    yield from ["# Commands", "", "`leanformer COMMAND` and `python -m leanformer.COMMAND` are the same.", ""]
    for name, summary in SUMMARIES.items():
        doc = ast.get_docstring(ast.parse((ROOT / "leanformer" / f"{name}.py").read_text()))
        line = importlib.import_module(f"leanformer.{name}").main
        yield from [f"## {name}", "", f"{summary[0].upper()}{summary[1:]}.", "", "```text", doc or "", "```", ""]
        if line.words:
            yield from [f"Takes {line.words}.", ""]
        yield from table(["flag", "meaning"], [[f"`{flag}`", flag.explanation] for flag in line.flags])


def config_keys() -> Iterator[str]:
    """Yield the page of config keys: of images, which most tasks share, then what other tasks add."""
    yield from [
        "# Config keys",
        "",
        "Set a key with `--config.KEY=VALUE`. `python -m leanformer.keys` prints them.",
    ]
    listed: dict[str, Any] = {}
    for title, c in key_docs.defaults():
        yield from ["", f"## {title}", ""]
        yield from _sections(c, title.split('"')[1], listed)


def _sections(c: ConfigDict, name: str, listed: dict[str, Any]) -> Iterator[str]:
    """Yield a table per section of the keys that are not listed yet."""
    texts = key_docs.help_texts(c)
    values = {key: value for key, value in iterate_keys(c) if key not in listed}
    listed |= values
    sections: dict[str, list[Sequence[str]]] = {}
    for key, value in values.items():
        row = [f"`{key}`", f"`{key_docs.format_value(value)}`", key_docs.meaning(texts, key)]
        sections.setdefault(key.rpartition(".")[0] or "the run", []).append(row)
    for section, rows in sections.items():
        yield from [f"### {name}: {section}", "", *table(["key", "default", "meaning"], rows)]


def models() -> Iterator[str]:
    """Yield the page of the configs that ship with leanformer."""
    yield from ["# Models", "", "Configs that ship with leanformer: `--config=NAME`. Parameters are counted exactly."]
    yield from ["`python -m leanformer.cost --config=NAME` adds FLOPs and memory.", ""]
    by_task: dict[str, list[Sequence[Any]]] = {}
    for file in sorted(SHIPPED.glob("*.py")):
        c = config.load(str(file))
        c.model.update({"num_classes": 4} if c.model.get("num_classes") == 0 else {})  # 0: as in the data
        doc = (ast.get_docstring(ast.parse(file.read_text())) or "").splitlines()[0].rstrip(".")
        parameters = count.format_number(float(count.parameters(set_up_without_data(c).state.params)))
        row = [f"`{file.stem}`", parameters, *_format_sizes(c.model), SIZES_IN_WORDS.sub("", doc)]
        by_task.setdefault(c.task, []).append(row)
    for task, rows in by_task.items():
        yield from [f"## {config.KINDS[task].name[0].upper()}{config.KINDS[task].name[1:]}", ""]
        titles = ["config", "parameters", "layers", "heads x dim", "width, MLP", "what"]
        yield from table(titles, rows, right=range(1, len(titles) - 1))


def _format_sizes(model: Mapping[str, Any]) -> list[str]:
    """Return layers, heads x head dimension, and width with MLP width; a line per stage if a model has several."""
    depth, *sizes = (model.get(key, "") for key in SIZES)
    stages = max(len(size) if isinstance(size, tuple) else 1 for size in sizes)
    columns = [size if isinstance(size, tuple) else (size,) * stages for size in sizes]
    rows = [*zip(*columns, strict=True)]
    pairs = [[f"{heads} x {dim}" for heads, dim, *_ in rows], [f"{width}, {mlp}" for *_, width, mlp in rows]]
    layers = depth if isinstance(depth, tuple) else (depth,)
    return ["<br>".join(map(str, dict.fromkeys(lines) if stages == 1 else lines)) for lines in (layers, *pairs)]


def measures() -> Iterator[str]:
    """Yield the page of the measures of conditioning."""
    yield from ["# Measures of conditioning", "", "Names for `probe.measures` and `probe --measures=NAME,NAME`.", ""]
    kinds: Mapping[str, Mapping[str, Any]] = {"Activations": ACTIVATIONS, "Weights": WEIGHTS}
    for title, entries in kinds.items():
        rows = [[f"`{name}`", measure.what, f"`{', '.join(measure.needs)}`"] for name, measure in entries.items()]
        yield from [f"## {title}", "", *table(["name", "matrix or value", "arrays"], rows)]


def quantities() -> Iterator[str]:
    """Yield the page of scores and costs: the words that pages, charts and the terminal use."""
    yield from ["# Scores and costs", "", "Names in `metrics.jsonl`, `summary.json` and `--metric=NAME`.", ""]
    better = {True: "higher is better", False: "lower is better", None: ""}
    rows = [[f"`{name}`", quantity.axis, better[quantity.higher]] for name, quantity in words.QUANTITIES.items()]
    yield from table(["name", "in words", "direction"], rows)
