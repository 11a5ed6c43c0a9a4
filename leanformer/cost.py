"""Costs of a config, without training: `python -m leanformer.cost --config=A [--against=B] [--json]`.

Parameters are exact. FLOPs count matmuls, 2 per multiply-add, per example. Memory is the peak of the training
step at the configured batch size, compiled for this machine's devices; nothing is allocated.
"""

import json
from typing import Any

from ml_collections import ConfigDict

from leanformer import cli


def cost(config: ConfigDict, *, memory: bool = True) -> dict[str, Any]:
    """Return the costs of a config on this machine's devices.

    The keys are params, forward_flops and train_flops (per example), train_memory_bytes (peak of the training step per
    device), modules (parameters by module), batch_size and device (its type).

    Args:
        config: validated config.
        memory: False to skip the compilation for train_memory_bytes, which is then None.

    Raises:
        ConfigError: the config does not fit the devices.
    """
    from leanformer.analysis import shapes
    from leanformer.costs import count
    from leanformer.costs.devices import peak_memory

    setup = shapes.set_up_without_data(config)
    forward, training = setup.flops_per_example
    return {
        "params": count.parameters(setup.state.params),
        "forward_flops": forward,
        "train_flops": training,
        "train_memory_bytes": peak_memory(setup.compile_train_step()) if memory else None,
        "batch_size": config.batch_size,
        "device": setup.model.device.device_kind,
        "modules": count.by_module(setup.state.params),
    }


def format_costs(name: str, costs: dict[str, Any], other: dict[str, Any] | None, against: str) -> str:
    """Format the costs of the config `name` for a terminal, with ratios to the other config's, `against`, if given."""
    from leanformer import text

    def row(key: str, unit: str = "", where: str = "") -> str:
        value = f"{costs[key]:,}{unit}"
        if other is None:
            return value
        return f"{value:<24} against {other[key]:,}{unit}{where}: {costs[key] / other[key]:.3f}"

    rows = {"parameters": row("params")}
    rows |= {f"  {module}": f"{number:,}" for module, number in costs["modules"].items()}
    rows["forward FLOPs per example"] = row("forward_flops")
    rows["training FLOPs per example"] = row("train_flops")
    batch = f" at batch {other['batch_size']}" if other and other["batch_size"] != costs["batch_size"] else ""
    rows[f"training memory, batch {costs['batch_size']}"] = row("train_memory_bytes", " B", batch)
    name = f"{name} against {against}" if other else name
    return text.page(f"{name}, compiled for {costs['device']}", rows)


@cli.command(
    cli.CONFIG,
    cli.Flag("against", "Config file to compare with.", cli.ConfigDict),
    cli.Flag("json", "Print one JSON object instead of a table.", bool, default=False),
)
def main(flags: cli.Values) -> None:
    from leanformer.runtime import timing

    with timing.announce("Compiling the training step"):
        costs = cost(flags.config)
        other = cost(flags.against) if flags.against else None
    if flags.json:
        if other:
            numbers = ("params", "forward_flops", "train_flops", "train_memory_bytes")
            costs |= {"against": other, "ratios": {key: costs[key] / other[key] for key in numbers}}
        print(json.dumps(costs))
    else:
        print(format_costs(flags.files["config"], costs, other, flags.files.get("against", "")))


if __name__ == "__main__":
    cli.run(main)
