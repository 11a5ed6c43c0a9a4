"""Learning-rate scales of parameters: freezing, layer-wise decay, and the learning rate of the head.

The layers of a stack, or of each of its groups of equal layers, are one leaf with a leading axis L. Here each layer has
a name by its index in the whole stack (`blocks.layers.3`), and a scale.
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
from leanformer.runtime.trees import leaf_names
from leanformer.training.optimizers import is_stacked, split_layer


# Order of an architecture's modules from the input up, by the first parts of the names of their parameters. An entry is
# one level, or one level per layer for a stack. Modules in no entry are above all levels. Missing modules are skipped.
LayerOrder = tuple[tuple[str, ...], ...]


@dataclasses.dataclass(frozen=True)
class LrScales:
    """Learning-rate scales of all parameters.

    Attributes:
        shares: tree like the parameters, with the scale of each leaf: a number, or (L,) for a stack, with one scale per
            layer. 0 freezes the leaf or the layer, 1 is the full learning rate.
    """

    shares: Any

    def stop_frozen_gradients(self, params: Any) -> Any:
        """Return `params`, a tree like `shares`, with the gradient stopped at frozen leaves and layers; values stay."""

        def stop_frozen(share: np.ndarray, leaf: Any) -> Any:
            if share.all():
                return leaf
            frozen = jax.lax.stop_gradient(leaf)
            return jnp.where(_expand(share > 0, leaf), leaf, frozen) if share.any() else frozen

        return jax.tree.map(stop_frozen, self.shares, params)

    def scale_updates(self, optimizer: Any) -> optax.GradientTransformationExtraArgs:
        """Return an optimizer that multiplies the update of each parameter, including weight decay, by its scale.

        Leaves that are frozen entirely have no moments. If all scales are 1, the optimizer is returned unchanged.

        Args:
            optimizer: optimizer without learning rate.
        """
        leaves = jax.tree.leaves(self.shares)
        if all((share == 1).all() for share in leaves):
            return optimizer
        if not all(share.any() for share in leaves):
            optimizer = optax.masked(optimizer, jax.tree.map(lambda share: bool(share.any()), self.shares))

        def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
            direction, state = optimizer.update(grads, state, params, **extra)
            return jax.tree.map(lambda share, d: d * _expand(share, d), self.shares, direction), state

        return optax.GradientTransformationExtraArgs(optimizer.init, update)  # ty: ignore[invalid-argument-type] - optax's protocol fixes names of arguments

    def trained(self, params: Any) -> int:
        """Return the number of scalars that are not frozen in `params`, a tree of parameters or their shapes."""
        counts = jax.tree.map(lambda share, x: np.count_nonzero(share) * (x.size // share.size), self.shares, params)
        return int(sum(jax.tree.leaves(counts)))


def make(
    params: Any,
    *,
    freeze: Sequence[str] = (),
    layer_decay: float = 1.0,
    head: float = 1.0,
    heads: Sequence[str] = (),
    bottom_up: LayerOrder = (),
) -> LrScales:
    """Return the learning-rate scales of a model's parameters.

    Args:
        params: parameters or their shapes.
        freeze: patterns with file-name wildcards for names of parameters or of modules: "patch_embed",
            "blocks.layers.[0-5]", "*.norm?". A pattern that starts with "!" unfreezes. The last matching one decides.
        layer_decay: factor between the scale of a level and that of the level above it; the top has scale 1 (Bao et
            al. 2022).
        head: scale of the classifiers.
        heads: first parts of the names of the classifiers.
        bottom_up: order of the architecture's modules, see `LayerOrder`.

    Raises:
        ConfigError: a pattern matches nothing, nothing is left to train, or `layer_decay` is not 1 and the order of
            the modules is not known.
    """
    if layer_decay != 1 and not bottom_up:
        raise ConfigError(
            f"optim.layer_decay={layer_decay}: this architecture does not declare the order of its modules. Declare "
            "bottom_up (leanformer/layers/model_base.py), or set optim.layer_decay=1."
        )
    names, leaves = leaf_names(params), jax.tree.leaves(params)
    below = _distances(dict(zip(names, leaves, strict=True)), bottom_up)
    shares, all_names = [], set()
    for name, leaf in zip(names, leaves, strict=True):
        by_layer = _layer_names(name, leaf)
        all_names |= set().union(*by_layer)
        trains = [not _is_frozen(freeze, layer_names) for layer_names in by_layer]
        first = name.split(".", 1)[0]
        levels = below.get(first, 0)
        if isinstance(levels, np.ndarray):
            levels = levels[_layers(name, leaf)]
        share = layer_decay**levels * (head if first in heads else 1.0)
        shares.append(np.asarray(share * np.asarray(trains if is_stacked(name) else trains[0]), np.float32))
    for pattern in freeze:
        _check_matches(pattern.removeprefix("!"), all_names)
    if not any(share.any() for share in shares):
        raise ConfigError(f"optim.freeze={tuple(freeze)} leaves nothing to train. Unfreeze a module, as in '!head'.")
    return LrScales(jax.tree.unflatten(jax.tree.structure(params), shares))


def _distances(params: dict[str, Any], bottom_up: LayerOrder) -> dict[str, Any]:
    """Return the number of levels between each module and the top, by first name; (L,) for the layers of a stack."""
    depths: dict[str, int] = {}
    for name, leaf in params.items():
        module, depth = name.split(".", 1)[0], _layers(name, leaf)[-1] + 1 if is_stacked(name) else 0
        depths[module] = max(depth, depths.get(module, 0))
    distances, above = {}, 1
    for entry in reversed(bottom_up):
        present = [name for name in entry if name in depths]
        distances |= {n: np.arange(depths[n])[::-1] + above if depths[n] else above for n in present}
        above += max((max(1, depths[name]) for name in present), default=0)
    return distances


def _layers(name: str, leaf: Any) -> np.ndarray:
    """Return the indices in the whole stack of the layers of a leaf."""
    return split_layer(name)[1] + np.arange(leaf.shape[0])


def _layer_names(name: str, leaf: Any) -> list[set[str]]:
    """Return the names of each layer of a leaf: that of the leaf, also without its group, and that of the layer."""
    if not is_stacked(name):
        return [{name}]
    stack, _, rest = split_layer(name)
    return [{name, f"{stack}.{rest}", f"{stack}.{i}.{rest}"} for i in _layers(name, leaf)]


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


def _expand(share: np.ndarray, leaf: Any) -> np.ndarray:
    return share.reshape(share.shape + (1,) * (leaf.ndim - share.ndim))
