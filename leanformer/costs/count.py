"""Counts of parameters and FLOPs from the shapes in a traced program. Nothing is run."""

import math
from typing import Any

import jax
import jax.extend.core as jex


def parameters(tree: Any) -> int:
    """Return the number of elements in a tree of arrays or shapes.

    `training.model_setup.abstract_model` has the shapes of a model's parameters without building it.

    >>> parameters({"kernel": jax.ShapeDtypeStruct((3, 4), float), "bias": jax.ShapeDtypeStruct((4,), float)})
    16
    """
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def by_module(params: Any, depth: int = 3) -> dict[str, int]:
    """Return the number of parameters of each module, named by the first `depth` names of its path, such as "a.b.c"."""
    counts: dict[str, int] = {}
    for path, leaf in jax.tree.leaves_with_path(params):
        names = jax.tree_util.keystr(path, simple=True, separator=".").split(".")
        name = ".".join(names[: min(depth, len(names) - 1)] or names)
        counts[name] = counts.get(name, 0) + math.prod(leaf.shape)
    return counts


def flops(function: Any, *args: Any) -> int:
    """Return the FLOPs of the matmuls and convolutions of `function(*args)`, 2 per multiply-add.

    They are counted on the traced program, so the count is valid for any model. The body of a scan counts once per
    iteration, unlike in XLA's estimate, and a condition counts as its most expensive branch. Element-wise operations
    are not counted, as usual. Counted is what is computed: Nyström's means over padded rows and its convolution are
    matmuls with zeros here, 6 to 22 % of the FLOPs; 3 x 3 depthwise convolutions are sums, not counted (below 1 %).

    Args:
        function: function that JAX can trace.
        args: its arguments: trees of arrays or shapes.

    Raises:
        NotImplementedError: the program has a while loop with matmuls, whose trip count is dynamic.

    >>> x, w = jax.ShapeDtypeStruct((2, 3), "float32"), jax.ShapeDtypeStruct((3, 5), "float32")
    >>> flops(lambda x, w: x @ w, x, w)  # 2 · 2 · 3 · 5
    60
    """
    return _flops(jax.make_jaxpr(function)(*args).jaxpr)


def _flops(jaxpr: Any) -> int:
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
            # A dilated input, as in the gradient of a strided convolution, has zeros between its rows: no FLOPs.
            zeros = math.prod(params["lhs_dilation"])
            total += 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(kernel) // out_features // zeros
        elif name == "scan":
            total += params["length"] * _flops(params["jaxpr"].jaxpr)
        elif name == "cond":
            total += max(_flops(branch.jaxpr) for branch in params["branches"])
        else:
            inner = sum(_flops(sub) for sub in _inner(params))
            if name == "while" and inner:
                raise NotImplementedError("The trip count of a while loop with matmuls is dynamic.")
            total += inner
    return total


def _inner(params: dict[str, Any]) -> list[jex.Jaxpr]:
    """Return the programs inside an equation (jit, remat, custom derivatives, ...)."""
    items = [item for value in params.values() for item in (value if isinstance(value, tuple | list) else (value,))]
    programs = [item for item in items if isinstance(item, jex.ClosedJaxpr | jex.Jaxpr)]
    return [item.jaxpr if isinstance(item, jex.ClosedJaxpr) else item for item in programs]


def format_number(number: int | float) -> str:
    """Format a number with three digits and a unit prefix: 1234567 as "1.23 M".

    >>> format_number(1234567), format_number(999_600)
    ('1.23 M', '1 M')
    """
    for unit in ("", " k", " M", " G", " T"):
        if abs(number) < (1000 if isinstance(number, int) else 999.5) or unit == " T":
            break
        number /= 1000
    return f"{number:.3g}{unit}" if isinstance(number, float) or unit else str(number)


def format_count(number: int, noun: str) -> str:
    """Format a number of things, with an s unless there is one.

    >>> format_count(1, "run"), format_count(1200, "run")
    ('1 run', '1,200 runs')
    """
    return f"{number:,} {noun}{'s' * (number != 1)}"
