"""Frozen parameters (`optim.freeze`): whole leaves, or single layers of a stack, which is one leaf with axis L first.

A layer is named by its index in the whole stack (`blocks.layers.3`), also if it is in a group of unequal layers.
"""

import dataclasses
import difflib
import itertools
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from leanformer.errors import ConfigError
from leanformer.runtime.mesh import leaf_names
from leanformer.training.optimizers import is_stacked, split_layer


@dataclasses.dataclass(frozen=True)
class Freezing:
    """Which parameters are trained.

    Attributes:
        trained: tree like the parameters: 1.0 if a leaf is trained, 0.0 if it is frozen; (L,) numbers for a stack.
    """

    trained: Any

    def stop_gradients(self, params: Any) -> Any:
        """Return the parameters with the gradient stopped at frozen leaves and layers; values stay."""

        def stop(trained: np.ndarray, leaf: Any) -> Any:
            if trained.all():
                return leaf
            frozen = jax.lax.stop_gradient(leaf)
            return jnp.where(_expand(trained > 0, leaf), leaf, frozen) if trained.any() else frozen

        return jax.tree.map(stop, self.trained, params)

    def freeze(self, optimizer: Any) -> optax.GradientTransformationExtraArgs:
        """Return the optimizer without updates of frozen parameters, weight decay included.

        Leaves that are frozen entirely have no moments. If nothing is frozen, the optimizer is returned unchanged.
        """
        leaves = jax.tree.leaves(self.trained)
        if all(trained.all() for trained in leaves):
            return optimizer
        if not all(trained.any() for trained in leaves):
            optimizer = optax.masked(optimizer, jax.tree.map(lambda trained: bool(trained.any()), self.trained))

        def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
            direction, state = optimizer.update(grads, state, params, **extra)
            return jax.tree.map(lambda trained, d: d * _expand(trained, d), self.trained, direction), state

        return optax.GradientTransformationExtraArgs(optimizer.init, update)  # ty: ignore[invalid-argument-type] - optax's protocol fixes names of arguments

    def count(self, params: Any) -> int:
        """Return the number of trained scalars in a tree of parameters or their shapes."""
        counts = jax.tree.map(lambda x, leaf: np.count_nonzero(x) * (leaf.size // x.size), self.trained, params)
        return int(sum(jax.tree.leaves(counts)))


def make(params: Any, patterns: Sequence[str]) -> Freezing:
    """Return which parameters are trained.

    Args:
        params: parameters or their shapes.
        patterns: patterns with file-name wildcards for names of parameters or of modules: "patch_embed",
            "blocks.layers.[0-5]", "*.norm?". A pattern that starts with "!" unfreezes. The last matching one decides.

    Raises:
        ConfigError: a pattern matches nothing, or nothing is left to train.
    """
    trained, all_names = [], set()
    for name, leaf in zip(leaf_names(params), jax.tree.leaves(params), strict=True):
        names = _layer_names(name, leaf)
        all_names |= set().union(*names)
        trains = [not _is_frozen(patterns, names_of_layer) for names_of_layer in names]
        trained.append(np.asarray(trains if is_stacked(name) else trains[0], np.float32))
    for pattern in patterns:
        _check_matches(pattern.removeprefix("!"), all_names)
    if not any(x.any() for x in trained):
        raise ConfigError(f"optim.freeze={tuple(patterns)} leaves nothing to train. Unfreeze a module, as in '!head'.")
    return Freezing(jax.tree.unflatten(jax.tree.structure(params), trained))


def _layer_names(name: str, leaf: Any) -> list[set[str]]:
    """Return the names of each layer of a leaf: the leaf's, also without its group, and the layer's own."""
    if not is_stacked(name):
        return [{name}]
    stack, first, rest = split_layer(name)
    return [{name, f"{stack}.{rest}", f"{stack}.{i}.{rest}"} for i in range(first, first + leaf.shape[0])]


def _is_frozen(patterns: Sequence[str], names: set[str]) -> bool:
    matching = [pattern for pattern in patterns if any(_matches(pattern.removeprefix("!"), name) for name in names)]
    return bool(matching) and not matching[-1].startswith("!")


def _matches(pattern: str, name: str) -> bool:
    return any(fnmatchcase(prefix, pattern) for prefix in _list_prefixes(name))


def _list_prefixes(name: str) -> list[str]:
    """Return the names of the modules that contain a parameter, from the outermost in, and its own name."""
    return list(itertools.accumulate(name.split("."), "{}.{}".format))


def _check_matches(pattern: str, names: set[str]) -> None:
    if any(_matches(pattern, name) for name in names):
        return
    modules = sorted({prefix for name in names for prefix in _list_prefixes(name)})
    near = difflib.get_close_matches(pattern, modules, n=5, cutoff=0.5) or [name for name in modules if "." not in name]
    raise ConfigError(f'optim.freeze: "{pattern}" matches no parameter and no module. Similar: {", ".join(near)}.')


def _expand(trained: np.ndarray, leaf: Any) -> np.ndarray:
    return trained.reshape(trained.shape + (1,) * (leaf.ndim - trained.ndim))
