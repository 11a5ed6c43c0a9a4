"""Published models whose layers differ: the config of each, and its parameters against the count of its table.

    python -m study.published.atlas_models [--row=TABLE:ID]

2026-11-25. Without --row: the parameters of every row of language_models.csv (archai) and vision_autoformer.csv, in
seconds, from the exact polynomial of `plan`. 200 of 200 AutoFormers agree, all parameters. Of archai, where the blocks
are compared, 321 of 321 GPT-2s agree, and 795 rows differ by exactly what Transformer-XL has more than a GPT: its
position projection. 200 of these are the set `random_GPT2_lm1b`, whose counts fit Transformer-XL despite its
name. bert.csv (FlexiBERT) has no counts; 2 of its 500 models consist of layers that exist here.

With --row, such as bert:9, language_models:random_GPT2_wt103/config_0_j0 or vision_autoformer:gt_autoformer-3: the
command that trains the row, and what differs.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from leanformer import cli, config
from leanformer.config import ConfigDict
from leanformer.costs import count
from leanformer.errors import ConfigError
from leanformer.training import model_setup
from study import tables
from study.tables import Row


MODEL = {"language_models": "gpt2", "bert": "bert", "vision_autoformer": "vit_b"}  # table: config
SEARCHED, ENTITLED = "random_GPT2_lm1b", "TransXL"
XL = "Transformer-XL, {more:,} more: a projection of positions (width x width per layer), other biases, no final norm"


class Published(NamedTuple):
    """Row of a table as keys of config.model."""

    table: str
    id: str
    sizes: Mapping[str, Any]
    counted: int | None  # parameters by the table: of the blocks and the final norm in archai, of all in AutoFormer
    expected: int  # parameters by which the table's model differs from ours, of parts that we do not have
    differs: str = ""  # what the model here does not have

    @property
    def config(self) -> ConfigDict:
        """Return the config that trains this model."""
        c = config.load(MODEL[self.table]).unlock()
        c.model.update(self.sizes)
        return c.lock()

    @property
    def command(self) -> str:
        """Return the command that trains this model on the data of its config."""
        keys = [f"--config.model.{key}={_format(value)}" for key, value in self.sizes.items()]
        return " ".join(["python -m leanformer.train", f"--config={MODEL[self.table]}", *keys, "--workdir=DIR"])


def _format(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split()))


def _sizes(width: int, heads: tuple[int, ...], mlp: tuple[int, ...]) -> dict[str, Any]:
    """Return the sizes of a model whose heads share its width; one number where all layers are equal."""
    per_layer = {"num_heads": heads, "head_dim": tuple(width // n for n in heads), "mlp_dim": mlp}
    return {"width": width, "depth": len(heads)} | {
        key: sizes[0] if len({*sizes}) == 1 else sizes for key, sizes in per_layer.items()
    }


def _archai(row: Row) -> Published:
    width, depth, heads = int(row["width"]), int(row["depth"]), _numbers(row["heads"])
    relative = ENTITLED in row["set"] or row["set"] == SEARCHED
    more = depth * (width**2 - 2 * width) - 2 * width if relative else 0
    differs = "embeddings: adaptive in the table, of one width here"
    differs += f"; {XL.format(more=more)}" if relative else ""
    sizes = _sizes(width, heads, _numbers(row["mlp"]))
    return Published("language_models", f"{row['set']}/{row['id']}", sizes, int(row["block_params"]), more, differs)


def _autoformer(row: Row) -> Published:
    width, ratios = int(row["embed_dim"]), [float(x) for x in row["mlp_ratio_per_layer"].split()]
    sizes = _sizes(width, _numbers(row["heads_per_layer"]), tuple(int(width * ratio) for ratio in ratios))
    return Published(
        "vision_autoformer", row["row_id"], sizes | {"num_classes": 100}, int(row["total_params_100cls"]), 0
    )


def _flexibert(row: Row) -> Published:
    layers = [*zip(row["operation"].split(), row["parameter"].split(), _numbers(row["mlps"]), strict=True)]
    other = [(i, *layer) for i, layer in enumerate(layers) if layer != ("SA", "SDP", 1)]
    missing = [f"layer {i} is {kind} {how} with {n} MLPs" for i, kind, how, n in other]
    sizes = _sizes(int(row["width"]), _numbers(row["heads"]), _numbers(row["mlp"]))
    differs = f"{missing[0]}, which does not exist here; layers here are SA SDP with 1 MLP" if missing else ""
    return Published("bert", row["id"], sizes, None, 0, differs)


READERS: Mapping[str, Callable[[Row], Published]] = {
    "language_models": _archai,
    "vision_autoformer": _autoformer,
    "bert": _flexibert,
}


def read(table: str) -> Iterator[Published]:
    """Yield the rows of a table in study/data. Raises ConfigError if there is no such table."""
    if table not in READERS:
        raise ConfigError(f"--row={table}: no such table. Choose from {', '.join(READERS)}.")
    return map(READERS[table], tables.read(table))


def find(name: str) -> Published:
    """Return the row TABLE:ID. Raises ConfigError if there is none."""
    table, _, key = name.partition(":")
    found = [row for row in read(table) if row.id == key]
    if not found:
        raise ConfigError(f"--row={name}: {table}.csv has no row {key!r}. Its first is {next(read(table)).id}.")
    return found[0]


def count_model(model: Published) -> int:
    """Return the parameters of the model of a row that its table counts, by tracing it."""
    c = model.config
    *_, (params, _) = model_setup.abstract_model(c)
    return count.parameters(params if model.table == "vision_autoformer" else [params["blocks"], params["norm"]])


@functools.cache
def _line(table: str, width: int) -> tuple[int, int, int]:
    """Return the parameters outside of the layers, of a layer without an MLP, and per unit of its MLP.

    An attention's parameters depend on the total width only, which is the width in all tables.
    """

    def of(depth: int, mlp: int) -> int:
        sizes = _sizes(width, (1,) * depth, (mlp,) * depth) | (
            {"num_classes": 100} if table == "vision_autoformer" else {}
        )
        return count_model(Published(table, "", sizes, None, 0))

    one, two, wider = of(1, 1), of(2, 1), of(1, 2)
    return 2 * one - two, two - one - (wider - one), wider - one


def count_by_line(model: Published) -> int:
    """Return `count_model` from counts of three small models of that width."""
    outside, layer, per_unit = _line(model.table, model.sizes["width"])
    depth, mlp = model.sizes["depth"], model.sizes["mlp_dim"]
    return outside + layer * depth + per_unit * (sum(mlp) if isinstance(mlp, tuple) else depth * mlp)


def compare(table: str) -> Iterator[tuple[str, int, int, int]]:
    """Yield of each set of a table its name and numbers of rows, of equal counts, and of differences explained."""
    sets: dict[str, list[Published]] = {}
    for model in read(table):
        sets.setdefault(model.id.partition("/")[0] if "/" in model.id else table, []).append(model)
    for name, models in sets.items():
        differences = [(model.counted - count_by_line(model), model.expected) for model in models if model.counted]
        equal = sum(difference == 0 for difference, _ in differences)
        explained = sum(difference == expected != 0 for difference, expected in differences)
        yield name, len(models), equal, explained


def report() -> None:
    """Print how many rows of each table have the parameters of the model here."""
    print(f"{'set':<32} {'rows':>5} {'equal':>6} {'explained':>10} {'unexplained':>12}")
    for table in ("language_models", "vision_autoformer"):
        for name, rows, equal, explained in compare(table):
            print(f"{name:<32} {rows:>5} {equal:>6} {explained:>10} {rows - equal - explained:>12}")
    models = [*read("bert")]
    trainable = sum(not model.differs for model in models)
    print(f"bert: {len(models)} rows without counts, {trainable} of layers that exist here")


@cli.command(cli.Flag("row", "Row of a table, TABLE:ID, whose training command is printed."))
def main(f: cli.Values) -> None:
    if f.row is None:
        report()
        return
    model = find(f.row)
    if model.table == "bert" and model.differs:
        raise ConfigError(f"--row={f.row}: {model.differs}.")
    print(model.command)
    own = count_model(model)
    print(f"Parameters: {own:,} here" + ("." if model.counted is None else f", {model.counted:,} by the table."))
    if model.differs:
        print(f"Differs: {model.differs}.")


if __name__ == "__main__":
    cli.run(main)
