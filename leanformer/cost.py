"""Costs of a config, without training: `python -m leanformer.cost --config=A [--against=B] [--json]`.

Parameters are exact. FLOPs are those of matmuls, 2 per multiply-add, per example. Memory is the peak of the training
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

    from leanformer.analysis import step
    from leanformer.costs import count
    from leanformer.costs.memory import peak_memory

    run = step.build(config)
    forward, training = run.flops_per_example
    return {
        "params": count.parameters(run.state.params),
        "forward_flops": forward,
        "train_flops": training,
        "train_memory_bytes": peak_memory(run.compile_train_step()) if memory else None,
        "batch_size": config.batch_size,
        "device": run.model.device.device_kind,
        "modules": count.by_module(run.state.params),
    }


@cli.command(
    cli.CONFIG,
    cli.Flag("against", "Config file to compare with.", cli.ConfigDict),
    cli.Flag("json", "Print one JSON object instead of a table.", bool, default=False),
)
def main(flags: cli.Values) -> None:
    from leanformer.reports import costs as pages
    from leanformer.runtime import timing

    config, against, name = flags.config, flags.against, flags.files["config"]
    with timing.announce("Compiling the training step"):
        costs = cost(config)
        other = cost(against) if against else None
    if flags.json:
        if other:
            numbers = ("params", "forward_flops", "train_flops", "train_memory_bytes")
            costs |= {"against": other, "ratios": {key: costs[key] / other[key] for key in numbers}}
        print(json.dumps(costs))
    else:
        print(pages.table(name, costs, other, flags.files.get("against", "")))


if __name__ == "__main__":
    cli.run(main)
