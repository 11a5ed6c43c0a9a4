"""Whether this host's cores can feed its devices: by arithmetic, from a rate measured here and now."""

import time

from leanformer import data
from leanformer.costs import hardware
from leanformer.data.pool import cores
from leanformer.training.train_setup import TrainSetup


UTILISATION = 0.4  # of the bfloat16 peak, an assumption: where training does better, it needs more cores
SAMPLE = 16  # examples that are read and augmented to see what one takes


def examples_per_core(setup: TrainSetup, source: data.Source) -> float:
    """Training examples that one core reads and augments in a second: its own time, waiting for a disk left out."""
    batches = setup.task.train_batches(source, batch_size=SAMPLE, seed=setup.config.seed, process=0, processes=1)
    batches[0]  # what is read and set up once
    start = time.thread_time()
    batches[1]
    return SAMPLE / max(time.thread_time() - start, 1e-9)


def needed(setup: TrainSetup, local_devices: int) -> float | None:
    """Training examples that this process's devices take in a second; None where their peak is not known."""
    peak = hardware.peak_flops(setup.model.device)
    _, training = setup.flops_per_example
    return peak and UTILISATION * peak * local_devices / training


def told(setup: TrainSetup, source: data.Source, local_devices: int) -> str | None:
    """The line of the start page; None where the devices' peak is not known."""
    wanted = needed(setup, local_devices)
    if wanted is None:
        return None
    each, there = examples_per_core(setup, source), cores()
    enough = wanted / each
    said = (
        f"{wanted:,.0f} examples/s keep {local_devices} x {setup.model.device.device_kind} at {UTILISATION:.0%} of "
        "their peak: "
        f"{enough:.1f} cores at {each:,.0f} examples/s a core, measured now; there are {there}"
    )
    slow = enough > there and setup.config.data.name.partition(":")[0] in ("tfds", "folder")
    return said + (". `leanformer.prepare cache` makes a set that is read faster" if slow else "")
