"""What the model families share: MLP, stochastic depth, the pre-norm block, and a stack scanned over layers."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from leanformer.attention import Lengths, normal, real, times_weights
from leanformer.mesh import keep_in_order, keep_shared
from leanformer.remat import REMAT


# Maps a block's named arrays to a small pytree, inside the block (see Block).
Tap = Callable[[dict[str, Array]], Any]


class LayerNorm(nnx.Module):
    """LayerNorm, inside in float32 at least. `rngs` is taken as by every layer; nothing here is random.

    Parameters: scale, bias (D).
    """

    def __init__(self, width: int, *, epsilon: float = 1e-6, dtype: Any = jnp.float32, rngs: nnx.Rngs | None = None):
        self.scale, self.bias = nnx.Param(jnp.ones(width)), nnx.Param(jnp.zeros(width))
        self.epsilon, self.dtype = epsilon, dtype

    def __call__(self, x: Float[Array, "*rest d"]) -> Float[Array, "*rest d"]:
        y = _standardise(x.astype(jnp.promote_types(x.dtype, jnp.float32)), self.epsilon)
        scale, bias = (jnp.broadcast_to(p[...], y.shape) for p in (self.scale, self.bias))
        return (y * scale + bias).astype(self.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _standardise(x: Float[Array, "*rest d"], epsilon: float) -> Float[Array, "*rest d"]:
    """(x − mean) / √(variance + ε) over the last axis. Two passes, since E[x²] − E[x]² cancels in float32.

    The gradient in closed form reads the activations half as often as that of mean and variance one by one.
    """
    return _standardise_forward(x, epsilon)[0]


def _standardise_forward(x: Array, epsilon: float) -> tuple[Array, tuple[Array, Array]]:
    centred = x - x.mean(-1, keepdims=True)
    inverse = jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + epsilon)
    return centred * inverse, (centred * inverse, inverse)


def _standardise_backward(_: float, kept: tuple[Array, Array], g: Array) -> tuple[Array]:
    y, inverse = kept
    return (inverse * (g - g.mean(-1, keepdims=True) - y * (g * y).mean(-1, keepdims=True)),)


_standardise.defvjp(_standardise_forward, _standardise_backward)


def gelu(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """x Φ(x), exact, inside in float32 at least. By erf: the erfc of `jax.nn.gelu` takes twice the time on a CPU."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return (0.5 * wide * (1 + jax.lax.erf(wide * wide.dtype.type(0.5**0.5)))).astype(x.dtype)


class Mlp(nnx.Module):
    """Linear D → F, exact (erf) GELU, Linear F → D, both with bias."""

    def __init__(
        self,
        width: int,
        mlp_dim: int,
        *,
        kernel_init: nnx.Initializer = normal,
        dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        linear = functools.partial(
            nnx.Linear, kernel_init=kernel_init, dot_general=times_weights, dtype=dtype, rngs=rngs
        )
        self.up = linear(width, mlp_dim)
        self.down = linear(mlp_dim, width)

    def __call__(
        self, x: Float[Array, "b t d"], *, rate: float = 0.0, key: Key[Array, "b"] | None = None
    ) -> tuple[Float[Array, "b t d"], Float[Array, "b t f"]]:
        """The output, and the hidden layer after its GELU, and its dropout, for a tap."""
        hidden = dropout(gelu(self.up(x)), rate, key)
        return self.down(hidden), hidden


def dropout(x: Float[Array, "b *rest"], rate: float, key: Key[Array, "b"] | None) -> Float[Array, "b *rest"]:
    """Zeroes each number with probability `rate`, to 16 bits, else divides it by 1 − rate; x itself without a key.

    Each example has its own key, and what a token loses does not depend on how many tokens come after it.
    """
    if key is None or not rate:
        return x
    *tokens, width = x.shape[1:]
    of = 1 << 16

    def draw(key: Key[Array, ""]) -> Bool[Array, "*rest"]:
        words = jax.random.bits(key, (*tokens, -(-width // 2)), jnp.uint32)  # two numbers each: bits cost most here
        halves = jax.lax.bitcast_convert_type(words, jnp.uint16).reshape(*tokens, -1)[..., :width]
        return halves >= round(rate * of)

    kept = checkpoint_name(jax.vmap(draw)(key), "dropout")
    return jnp.where(kept, x / (1 - round(rate * of) / of), 0)


def path_scales(key: Key[Array, "b"], rates: Float[np.ndarray, "l"], branches: int) -> Float[Array, "l {branches} b"]:
    """What each example's residual branches are multiplied by: 0 with a layer's rate, else 1 / (1 − rate).

    Stochastic depth (Huang et al. 2016). Each example has its own key, so what is dropped does not depend on its
    batch mates, on gradient accumulation or on the number of devices.
    """
    keep = 1 - jnp.asarray(rates)

    def draw(key: Key[Array, ""], keep: Float[Array, ""], index: Int[Array, ""]) -> Float[Array, ""]:
        return jax.random.bernoulli(jax.random.fold_in(key, index), keep) / keep

    index = jnp.arange(len(rates) * branches).reshape(len(rates), branches)
    over_examples = jax.vmap(draw, (0, None, None))
    return jax.vmap(jax.vmap(over_examples, (None, None, 0)), (None, 0, 0))(key, keep, index)


def drop_path(branch: Float[Array, "b *rest"], scale: Float[Array, "b"] | None) -> Float[Array, "b *rest"]:
    """Multiplies each example's branch by its scale; None leaves it as it is."""
    if scale is None:
        return branch
    return branch * scale.astype(branch.dtype).reshape(-1, *(1,) * (branch.ndim - 1))


class Block(nnx.Module):
    """Pre-norm transformer block: x + attention(LN(x)), then x + MLP(LN(x)).

    With `dropout`, both branches and the MLP's hidden layer lose that share of their numbers in training.
    With `layer_scale`, each branch is multiplied by a learned vector that starts from it (Touvron et al. 2021b).

    A tap sees the block's arrays by name and returns a small pytree; it reduces inside the layer, so nothing of the
    size L B T D is ever kept:

        tokens     B T D     entering the block
        normed     B T D     what attention reads, LN(tokens)
        q, k, v    B T N H   and out, B T N H, the heads before the output projection
        attention  B T D     attention's branch, before its skip
        middle     B T D     tokens + attention
        hidden     B T F     the MLP's hidden layer after GELU
        block      B T D     leaving the block

    Padding is zeros in all of them: rows that change no singular value while as many tokens are real as there are
    columns. Without q and k, which would be taken for keys.
    """

    branches = 2  # residual branches, each with its own stochastic depth

    def __init__(
        self,
        attention: nnx.Module,
        width: int,
        mlp_dim: int,
        *,
        epsilon: float = 1e-6,
        layer_scale: float | None = None,
        dropout: float = 0.0,
        kernel_init: nnx.Initializer = normal,
        dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.dropout = dropout
        self.norm1 = LayerNorm(width, epsilon=epsilon, dtype=dtype, rngs=rngs)
        self.attention = attention
        self.norm2 = LayerNorm(width, epsilon=epsilon, dtype=dtype, rngs=rngs)
        self.mlp = Mlp(width, mlp_dim, kernel_init=kernel_init, dtype=dtype, rngs=rngs)
        if layer_scale is not None:
            self.gamma1, self.gamma2 = (nnx.Param(jnp.full(width, layer_scale)) for _ in range(2))

    def __call__(
        self,
        x: Float[Array, "b t d"],
        *,
        scales: Float[Array, "2 b"] | None = None,
        train: bool = False,
        tap: Tap | None = None,
        key: Key[Array, "b"] | None = None,
        lengths: Lengths | None = None,
    ) -> tuple[Float[Array, "b t d"], Any]:
        """The output and what `tap` made of the arrays; None without a tap, and then no array is kept for it.

        `scales` are those of stochastic depth, of the attention's branch and of the MLP's; `train` is for blocks that
        hold batch statistics; `key` is for dropout; `lengths` tells attention which tokens are no padding.
        """
        first, second = (None, None) if scales is None else scales
        tokens, normed = x, self.norm1(x)
        attention, arrays = self.attention(normed) if lengths is None else self.attention(normed, lengths)
        keys = (None,) * 3 if key is None else jax.vmap(functools.partial(jax.random.split, num=3), out_axes=1)(key)
        attention = dropout(self._scaled("gamma1", attention), self.dropout, keys[0])
        middle = tokens + drop_path(attention, first)
        branch, hidden = self.mlp(self.norm2(middle), rate=self.dropout, key=keys[1])
        branch = dropout(self._scaled("gamma2", branch), self.dropout, keys[2])
        block = middle + drop_path(branch, second)
        if tap is None:
            return block, None
        own = {"tokens": tokens, "normed": normed, "attention": attention, "middle": middle}
        own |= {"hidden": hidden, "block": block}
        if lengths is not None:
            own |= {name: arrays[name] for name in ("v", "out")}
            own = {name: jnp.where(_kept(lengths, x), x, 0) for name, x in own.items()}
        return block, tap(arrays | own)

    def _scaled(self, name: str, branch: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
        gamma = getattr(self, name, None)
        return branch if gamma is None else branch * gamma[...].astype(branch.dtype)[None, None]


def _kept(lengths: Lengths, x: Float[Array, "b t *rest"]) -> Bool[Array, "b t *ones"]:
    return real(lengths, x.shape[1]).reshape(*x.shape[:2], *(1,) * (x.ndim - 2))


class Stack(nnx.Module):
    """`depth` equal blocks as one scan over stacked parameters, so compile time does not grow with depth.

    Args:
        make_block: builds one block from `nnx.Rngs`, called as `block(x, scales=, train=, tap=)` and returning the
            next x and the tap's result; it says how many residual `branches` it has. A block with a `dropout` above 0
            is also given a `key` an example in training, and where the stack is given `lengths` so is the block.
        depth: L.
        drop_path: stochastic depth rate of each layer; one number stands for a linear rise from 0 to it.
        remat: what the backward pass computes again, a key of REMAT.
    """

    def __init__(
        self,
        make_block: Callable[[nnx.Rngs], nnx.Module],
        depth: int,
        *,
        drop_path: float | Sequence[float] = 0.0,
        remat: str = "light",
        rngs: nnx.Rngs,
    ):
        rates = np.linspace(0, drop_path, depth) if isinstance(drop_path, int | float) else np.asarray(drop_path)
        self.rates, self.remat = tuple(map(float, rates)), remat
        self.layers = nnx.vmap(make_block)(rngs.split(depth))

    def __call__(
        self,
        x: PyTree[Float[Array, "b ..."]],
        *,
        key: Key[Array, "b"] | None = None,
        tap: Tap | None = None,
        lengths: Lengths | None = None,
    ) -> tuple[PyTree[Float[Array, "b ..."]], Any]:
        """Returns the output and the tap's results stacked over layers (leading axis L).

        `key`, one an example, means training: drop path and dropout are drawn, and batch statistics are taken and
        moved.
        """
        graphdef, params, statistics = nnx.split(self.layers, nnx.Param, ...)
        train, scales = key is not None, None
        if train and max(self.rates) > 0:
            # Drawn before the scan: inside, the compiler puts the generator into loops over every activation.
            scales = path_scales(key, np.asarray(self.rates, np.float32), self.layers.branches)
        drawn = {"scales": scales}
        if train and getattr(self.layers, "dropout", 0):
            drawn["key"] = self._dropout_keys(key)
        fixed = {"train": train, "tap": tap} | ({} if lengths is None else {"lengths": lengths})

        def body(x: Any, layer: tuple[Any, Any, dict[str, Array | None]]) -> tuple[Any, Any]:
            params, statistics, drawn = layer
            block = nnx.merge(graphdef, params, statistics)
            x, taps = block(keep_in_order(keep_shared(x)), **drawn, **fixed)
            return keep_in_order(keep_shared(x)), (taps, nnx.state(block, nnx.BatchStat) if train else None)

        if self.remat != "none":
            # The backward pass is a loop of its own; barriers between the two would only have slices copied.
            body = jax.checkpoint(body, policy=REMAT[self.remat], prevent_cse=False)
        x, (taps, moved) = jax.lax.scan(body, x, (params, statistics, drawn))
        if train:
            nnx.update(self.layers, moved)
        return x, taps

    def _dropout_keys(self, key: Key[Array, "b"]) -> Key[Array, "l b"]:
        """A key for each layer and example, none of which drop path uses."""
        first = len(self.rates) * self.layers.branches
        fold = jax.vmap(jax.random.fold_in, in_axes=(0, None))
        return jax.vmap(fold, in_axes=(None, 0))(key, first + jnp.arange(len(self.rates)))
