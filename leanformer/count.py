"""What a program costs, by arithmetic on its shapes: parameters, floating-point operations, memory. Nothing runs."""

import collections
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex


# Dense bfloat16 peaks in FLOP/s by a part of jax's device kind, from the makers' data sheets (SXM where there are two).
PEAKS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10G": 70e12,
    "V100": 125e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
}

# Bytes per second that a device sends, and receives at the same time: to devices of its own host of HOST, over NVLink,
# from the makers' data sheets (half of the figure for both ways); and to other hosts, an assumption: one network card a
# device, 400 Gb/s with the H100 and H200 and 200 Gb/s with the A100, as in the makers' own hosts of eight.
LINKS = {"H200": (450e9, 50e9), "H100": (450e9, 50e9), "A100": (300e9, 25e9)}
HOST = 8


def bandwidth(name: str, group: Sequence[int]) -> float:
    """Bytes per second through each device of a ring over `group`, positions of devices that fill hosts in order.

    A ring that leaves hosts does so once a host, over the cards of all its devices there: rings over each card share
    the work.
    """
    inside, between = LINKS[name]
    hosts = collections.Counter(position // HOST for position in group)
    return inside if len(hosts) == 1 else min(inside, between * min(hosts.values()))


def peak_flops(device: jax.Device) -> float | None:
    """The device's dense bfloat16 peak in FLOP/s, or None where it is not known."""
    return next((peak for name, peak in PEAKS.items() if name in device.device_kind), None)


def parameters(tree: Any) -> int:
    """How many numbers a tree of arrays or shapes holds."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def by_module(params: Any, depth: int = 3) -> dict[str, int]:
    """Parameters of each module, named by the first `depth` names of its path."""
    counts: dict[str, int] = {}
    for path, leaf in jax.tree.leaves_with_path(params):
        names = jax.tree_util.keystr(path, simple=True, separator=".").split(".")
        name = ".".join(names[: min(depth, len(names) - 1)] or names)
        counts[name] = counts.get(name, 0) + math.prod(leaf.shape)
    return counts


def flops(function: Any, *args: Any) -> int:
    """Floating-point operations of the matrix products and convolutions of `function(*args)`, 2 a multiply-add.

    Counted on the traced program, so it holds for any model; a scan counts its body once per turn, which XLA's own
    estimate does not. Element-wise work is left out, as is usual.

    Raises:
        NotImplementedError: the program has a loop of unknown length.
    """
    return _flops(jax.make_jaxpr(function)(*args).jaxpr)


def _flops(jaxpr: jex.Jaxpr) -> int:
    total = 0
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        if name == "dot_general":
            (contracted, _), _ = params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            total += 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[axis] for axis in contracted)
        elif name == "conv_general_dilated":
            kernel = equation.invars[1].aval.shape
            out_features = kernel[params["dimension_numbers"].rhs_spec[0]]
            # Between the rows of a dilated input, as in a strided convolution's gradient, are zeros, which are no work.
            zeros = math.prod(params["lhs_dilation"])
            total += 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(kernel) // out_features // zeros
        elif name == "scan":
            total += params["length"] * _flops(params["jaxpr"].jaxpr)
        elif name == "cond":
            total += max(_flops(branch.jaxpr) for branch in params["branches"])
        else:
            inner = sum(_flops(sub) for sub in _inner(params))
            if name == "while" and inner:
                raise NotImplementedError("A while loop with matrix products: its number of turns is unknown.")
            total += inner
    return total


def _inner(params: dict[str, Any]) -> list[jex.Jaxpr]:
    """The programs inside an equation: of jit, remat, custom derivatives and the like."""
    found = []
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, jex.ClosedJaxpr):
                found.append(item.jaxpr)
            elif isinstance(item, jex.Jaxpr):
                found.append(item)
    return found


def peak_memory(compiled: jax.stages.Compiled) -> int:
    """Bytes that a compiled program needs on each device: arguments, outputs that are not donated, workspace."""
    memory = compiled.memory_analysis()
    kept = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.argument_size_in_bytes + kept + memory.temp_size_in_bytes


def human(number: int | float) -> str:
    """1234567 as "1.23 M"."""
    for unit in ("", " k", " M", " G", " T"):
        if abs(number) < 1000 or unit == " T":
            break
        number /= 1000
    return f"{number:.3g}{unit}" if isinstance(number, float) or unit else str(number)
