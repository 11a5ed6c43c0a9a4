"""Training step of a config on this machine's devices, to count and to compile."""

from ml_collections import ConfigDict

from leanformer.costs.memory import peak_memory
from leanformer.runtime import mesh as meshes
from leanformer.training import train_setup


NOMINAL_EXAMPLES = 1_281_167  # the epoch length changes no cost, but the schedule needs one


def build(config: ConfigDict) -> train_setup.Setup:
    """Return the training setup of a config. Raises ConfigError if it does not fit the devices."""
    return train_setup.build(config, examples=NOMINAL_EXAMPLES, mesh=meshes.make_mesh(**config.mesh))


def peak_bytes(config: ConfigDict) -> int:
    """Compile a config's training step and return its peak bytes per device; the errors are those of `build`."""
    return peak_memory(build(config).compile_train_step())
