"""Which parameters train, and each at what share of the learning rate: freezing, layer-wise decay, the head's own.

The layers of a stack are one leaf with a leading axis L. Here they have names of their own, `blocks.layers.3.mlp`, and
a share each.
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


# The first names of a family's parameters, from the input up: its stacks, and what comes before each of them. An entry
# is one level, or of a stack a level a layer; what no entry has is above them all. Names that a model lacks are passed.
BottomUp = tuple[tuple[str, ...], ...]


@dataclasses.dataclass(frozen=True)
class Rates:
    """A tree like the parameters: the share of the learning rate that a leaf has, (), or each of its layers, (L,).
    What has 0 is frozen."""

    shares: Any

    def hold(self, params: Any) -> Any:
        """The parameters, with a gradient of zero for what is frozen."""

        def held(share: np.ndarray, leaf: Any) -> Any:
            if share.all():
                return leaf
            still = jax.lax.stop_gradient(leaf)
            return jnp.where(_over(share > 0, leaf), leaf, still) if share.any() else still

        return jax.tree.map(held, self.shares, params)

    def applied(self, optimizer: optax.GradientTransformationExtraArgs) -> optax.GradientTransformationExtraArgs:
        """The optimizer with each direction, weight decay and all, times its share; without moments for leaves that
        are frozen whole. The optimizer as it is where every share is 1."""
        leaves = jax.tree.leaves(self.shares)
        if all((share == 1).all() for share in leaves):
            return optimizer
        if not all(share.any() for share in leaves):
            optimizer = optax.masked(optimizer, jax.tree.map(lambda share: bool(share.any()), self.shares))

        def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
            direction, state = optimizer.update(grads, state, params, **extra)
            return jax.tree.map(lambda share, d: d * _over(share, d), self.shares, direction), state

        return optax.GradientTransformationExtraArgs(optimizer.init, update)

    def trained(self, params: Any) -> int:
        """How many of the parameters are not frozen."""
        counts = jax.tree.map(lambda share, x: np.count_nonzero(share) * (x.size // share.size), self.shares, params)
        return int(sum(jax.tree.leaves(counts)))


def of(
    params: Any,
    *,
    freeze: Sequence[str] = (),
    layer_decay: float = 1.0,
    head: float = 1.0,
    heads: Sequence[str] = (),
    bottom_up: BottomUp = (),
) -> Rates:
    """The rates of a model's parameters, or of their shapes.

    Args:
        freeze: patterns with the wildcards of file names, of parameters or of modules they are in: "patch_embed",
            "blocks.layers.[0-5]", "*.norm?"; one that starts with "!" takes back. The last that fits decides.
        layer_decay: each level's share of that of the level above it; what is above all has 1 (Bao et al. 2022).
        head: the share of the classifiers, whose first names are `heads`.
        bottom_up: the family's, see BottomUp.

    Raises:
        ConfigError: a pattern that fits nothing; nothing is left to train; a decay by level, where the family does not
            say its levels.
    """
    if layer_decay != 1 and not bottom_up:
        raise ConfigError(
            f"optim.layer_decay={layer_decay}: the family of this model does not say what comes before what. Declare "
            "its bottom_up (leanformer/layers/families.py), or leave optim.layer_decay=1."
        )
    names, leaves = leaf_names(params), jax.tree.leaves(params)
    below = _distances(dict(zip(names, leaves, strict=True)), bottom_up)
    shares, called = [], set()
    for name, leaf in zip(names, leaves, strict=True):
        each = [{name, own} for own in _layer_names(name, leaf)]
        called |= set().union(*each)
        kept = [not _frozen(freeze, of_layer) for of_layer in each]
        first = name.split(".", 1)[0]
        share = layer_decay ** below.get(first, 0) * (head if first in heads else 1.0)
        shares.append(np.asarray(share * np.asarray(kept if _stacked(name) else kept[0]), np.float32))
    for pattern in freeze:
        _check_fits(pattern.removeprefix("!"), called)
    if not any(share.any() for share in shares):
        raise ConfigError(f"optim.freeze={tuple(freeze)} leaves nothing to train. Take something back: '!head'.")
    return Rates(jax.tree.unflatten(jax.tree.structure(params), shares))


def _distances(params: dict[str, Any], bottom_up: BottomUp) -> dict[str, Any]:
    """By first name, how many levels a module is below the top; of a stack, each of its layers, (L,)."""
    depths = {name.split(".", 1)[0]: leaf.shape[0] if _stacked(name) else 0 for name, leaf in params.items()}
    found, above = {}, 1
    for entry in reversed(bottom_up):
        present = [name for name in entry if name in depths]
        found |= {n: np.arange(depths[n])[::-1] + above if depths[n] else above for n in present}
        above += max((max(1, depths[name]) for name in present), default=0)
    return found


def _layer_names(name: str, leaf: Any) -> list[str]:
    if not _stacked(name):
        return [name]
    return [f".layers.{i}.".join(name.split(".layers.", 1)) for i in range(leaf.shape[0])]


def _frozen(patterns: Sequence[str], names: set[str]) -> bool:
    fits = [pattern for pattern in patterns if any(_fits(pattern.removeprefix("!"), name) for name in names)]
    return bool(fits) and not fits[-1].startswith("!")


def _fits(pattern: str, name: str) -> bool:
    return any(fnmatchcase(room, pattern) for room in _rooms(name))


def _rooms(name: str) -> list[str]:
    """A parameter's name, and those of the modules it is in."""
    return list(itertools.accumulate(name.split("."), "{}.{}".format))


def _check_fits(pattern: str, names: set[str]) -> None:
    if any(_fits(pattern, name) for name in names):
        return
    rooms = sorted({room for name in names for room in _rooms(name)})
    near = difflib.get_close_matches(pattern, rooms, n=5, cutoff=0.5) or [room for room in rooms if "." not in room]
    raise ConfigError(f'optim.freeze has "{pattern}", which fits no parameter and no module. Near: {", ".join(near)}.')


def _stacked(name: str) -> bool:
    return "layers" in name.split(".")


def _over(share: np.ndarray, leaf: Any) -> np.ndarray:
    return share.reshape(share.shape + (1,) * (leaf.ndim - share.ndim))
