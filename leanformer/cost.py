"""What a config costs, without training: `python -m leanformer.cost --config=A [--against=B] [--json]`.

Parameters are exact. FLOPs count matrix products, 2 a multiply-add, per example. Memory is that of the training step
at the configured batch, from the program compiled for this machine's devices; shapes only, nothing is allocated.
"""

import json
from typing import Any

import jax
from absl import flags
from ml_collections import ConfigDict

from leanformer import cli, count, experiment, report
from leanformer import mesh as meshes


JSON = flags.DEFINE_bool("json", False, "Print one JSON object instead of a table.")
NOMINAL_EXAMPLES = 1_281_167  # an epoch's length changes no cost, but a schedule needs one


def cost(c: ConfigDict) -> dict[str, Any]:
    """The figures of one config: params, forward_flops, train_flops, train_memory_bytes, modules."""
    run = experiment.build(c, examples=NOMINAL_EXAMPLES, mesh=meshes.make_mesh(**c.mesh))
    forward, training = run.flops_per_example
    return {
        "params": count.parameters(run.like.params),
        "forward_flops": forward,
        "train_flops": training,
        "train_memory_bytes": count.peak_memory(run.compile_train_step()),
        "batch_size": c.batch_size,
        "device": jax.devices()[0].device_kind,
        "modules": count.by_module(run.like.params),
    }


def table(name: str, costs: dict[str, Any], other: dict[str, Any] | None) -> str:
    """Rows for a terminal, with the ratio to `other` where there is one."""

    def row(key: str, unit: str = "") -> str:
        text = f"{costs[key]:,}{unit}"
        return text if other is None else f"{text:<24} against {other[key]:,}{unit}: {costs[key] / other[key]:.3f}"

    rows = {"parameters": row("params")}
    rows |= {f"  {module}": f"{number:,}" for module, number in costs["modules"].items()}
    rows["forward FLOPs an example"] = row("forward_flops")
    rows["training FLOPs an example"] = row("train_flops")
    rows[f"training memory, batch {costs['batch_size']}"] = row("train_memory_bytes", " B")
    return report.page(f"{name}, compiled for {costs['device']}", rows)


def main() -> None:
    costs = cost(cli.config())
    other = cost(against) if (against := cli.config("against")) else None
    if JSON.value:
        ratios = (
            {key: costs[key] / other[key] for key in costs if key.startswith(("params", "forward", "train"))}
            if other
            else None
        )
        print(json.dumps(costs | ({"against": other, "ratios": ratios} if other else {})))
    else:
        print(table(flags.FLAGS["config"].config_filename, costs, other))


if __name__ == "__main__":
    cli.config_flag()
    cli.config_flag("against", required=False, help="Config file to compare with.")
    cli.run(main)
