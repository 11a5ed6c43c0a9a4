"""Memory of a compiled program per device, by XLA's buffer assignment and the shardings of its arguments."""

import math
from collections.abc import Mapping
from typing import Any

import jax


def peak_memory(compiled: jax.stages.Compiled) -> int:
    """Return the bytes that a compiled program needs per device: arguments, non-donated outputs and temporaries.

    Raises NotImplementedError if the backend does not report them.
    """
    memory = _analyse(compiled)
    outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.argument_size_in_bytes + outputs + memory.temp_size_in_bytes


def memory_by_content(compiled: jax.stages.Compiled, contents: Mapping[str, Any]) -> dict[str, int]:
    """Return the bytes per device of the program's arguments by name, of "temporaries", and of the peak as "all".

    Args:
        compiled: program.
        contents: its arguments by name: trees of arrays or shapes with shardings.

    Raises:
        NotImplementedError: the backend does not report the memory of a program.
    """
    sizes = {name: count_bytes(tree) for name, tree in contents.items()}
    return sizes | {"temporaries": _analyse(compiled).temp_size_in_bytes, "all": peak_memory(compiled)}


def _analyse(compiled: jax.stages.Compiled) -> Any:
    if (memory := compiled.memory_analysis()) is None:
        raise NotImplementedError("This backend does not report the memory of a compiled program.")
    return memory


def count_bytes(tree: Any) -> int:
    """Return the bytes per device of a tree of arrays or shapes with shardings."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)
