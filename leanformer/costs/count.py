"""What a program costs, by arithmetic on its shapes: parameters, floating-point operations, memory. Nothing runs."""

import math
from typing import Any

import jax
import jax.extend.core as jex


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


def bytes_made(jaxpr: jex.Jaxpr) -> int:
    """Bytes of a program's outputs, each once, without those that are inputs handed on."""
    given = set(jaxpr.invars)
    found = {leaf for leaf in jaxpr.outvars if isinstance(leaf, jex.Var) and leaf not in given}
    return sum(math.prod(leaf.aval.shape) * leaf.aval.dtype.itemsize for leaf in found)


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
