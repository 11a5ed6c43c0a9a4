"""Costs of a config for a terminal."""

from typing import Any

from leanformer.runtime import text


def table(name: str, costs: dict[str, Any], other: dict[str, Any] | None = None, against: str = "") -> str:
    """Format the costs of a config for a terminal, with ratios to those of another config if given.

    Args:
        name: name of the config.
        costs: costs of the config, from `leanformer.cost.cost`.
        other: costs of the other config.
        against: name of the other config.
    """

    def row(key: str, unit: str = "", of: str = "") -> str:
        value = f"{costs[key]:,}{unit}"
        return (
            value if other is None else f"{value:<24} against {other[key]:,}{unit}{of}: {costs[key] / other[key]:.3f}"
        )

    rows = {"parameters": row("params")}
    rows |= {f"  {module}": f"{number:,}" for module, number in costs["modules"].items()}
    rows["forward FLOPs per example"] = row("forward_flops")
    rows["training FLOPs per example"] = row("train_flops")
    of = f" at batch {other['batch_size']}" if other and other["batch_size"] != costs["batch_size"] else ""
    rows[f"training memory, batch {costs['batch_size']}"] = row("train_memory_bytes", " B", of)
    name = f"{name} against {against}" if other else name
    return text.page(f"{name}, compiled for {costs['device']}", rows)
