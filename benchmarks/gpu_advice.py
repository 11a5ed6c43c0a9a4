"""What the measurements of gpu.py say to change in a config, in the code or on the machine."""

from collections.abc import Iterator
from typing import Any


FASTER = 1.03  # ratio of speeds from which a setting is worth changing
PRODUCTS = 0.6  # least share of peak of large bfloat16 matmuls on a machine in order
FED = 0.95  # least share of the speed of a training step with data from files


def advise(results: dict[str, Any]) -> list[str]:
    """Return sentences; the first ones are about wrong results."""
    tiny = results["machine"].get("tiny")
    sentences = [*_wrong(results), *(("Models are tiny: their speeds mean nothing.",) if tiny else _slow(results))]
    return sentences or ["Nothing, by what was measured so far."]


def _rows(results: dict[str, Any], table: str) -> list[dict[str, Any]]:
    return [row for r in results["rows"].values() if r["table"] == table for row in r.get("rows", ())]


def _wrong(results: dict[str, Any]) -> Iterator[str]:
    for row in _rows(results, "attention"):
        for backend in ("xla", "cudnn"):
            value = row[backend]
            if isinstance(value, float) and value > row["limit"]:
                yield (
                    f"Attention of {row['attention']} in {row['dtype']} by {backend} is wrong: error {value:.2g}, at "
                    f"most {row['limit']:.2g}. Use another model.backend, and report it."
                )
            if backend == "cudnn" and row["dtype"] == "bfloat16" and isinstance(value, str):
                yield f"cuDNN's attention of {row['attention']} is {value}. Expected on a CPU, an old or a new card."
    for row in _rows(results, "agree"):
        if not row["agrees"]:
            yield (
                f"{row['config']}: the loss differs from the CPU's by {row['largest difference']}, more than "
                f"{row['limit']:g}. Find the layer before training."
            )
    for row in _rows(results, "watch"):
        if not row.get("agrees", True):
            yield (
                f"watch of {row['model']} differs from the CPU's by {row['largest difference']}, more than "
                f"{row['limit']:g}. Do not trust it on this GPU."
            )
    for row in _rows(results, "resume"):
        if row["deterministic"] and row["equal arrays"] < row["arrays"]:
            yield "deterministic=True does not resume bit for bit: README and docs/gpus.md must say so."
        if not row["deterministic"] and row["equal arrays"] == row["arrays"]:
            yield "A small run resumes bit for bit without deterministic=True too."
    for result in results["rows"].values():
        if result["status"] == "failed":
            yield f"{result['name']} failed ({result['note']}): read its log first."


def _slow(results: dict[str, Any]) -> Iterator[str]:
    share = results["machine"].get("share of peak")
    if share and share < PRODUCTS:
        yield f"Large matmuls reach {share:.0%} of the peak: check clocks, power limit and other users of the GPU."
    speeds = {
        result["name"]: result["rows"][0]["examples/s"]
        for result in results["rows"].values()
        if result["table"] == "train" and result.get("rows") and result["rows"][0].get("examples/s")
    }
    for name, speed in speeds.items():
        default = " ".join([*name.split(" ")[:3], "auto"])
        if name != default and default in speeds and speed > FASTER * speeds[default]:
            yield f"{name}: {speed / speeds[default]:.2f} times as fast as the default. Change it for this GPU."
    for row in _rows(results, "peer"):
        if row.get("ours : best") and row["ours : best"] < 1:
            yield f"{row['config']}: {row['ours : best']} of PyTorch's speed. Profile a step."
    steps = {row["config"]: row.get("examples/s") for row in reversed(_rows(results, "train"))}
    for row in _rows(results, "pipeline"):
        speed = steps.get(row["config"])
        if speed and row["fed/s"] < FED * speed:
            yield (
                f"{row['config']}: {row['fed/s']:g} images/s with files, {speed:g} without. More data.workers (now "
                f"{row['workers']}), or `prepare shrink`."
            )
