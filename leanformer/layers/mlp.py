"""MLP of a block: two linear layers with an activation, optionally gated."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from leanformer.errors import ConfigError
from leanformer.layers.attention import normal, times_weights
from leanformer.layers.dropping import dropout
from leanformer.layers.interventions import Linear
from leanformer.runtime.mesh import over_hidden


def gelu(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Return x Φ(x), exact, in float32 or wider inside. `erf` takes half the time of `jax.nn.gelu`'s erfc on a CPU."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return (0.5 * wide * (1 + jax.lax.erf(wide * wide.dtype.type(0.5**0.5)))).astype(x.dtype)


def squared_relu(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Return max(x, 0)² (So et al. 2021)."""
    return jnp.square(jax.nn.relu(x))


ACTIVATIONS = {
    "gelu": gelu,
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "relu2": squared_relu,
    "silu": jax.nn.silu,
}


@dataclasses.dataclass(frozen=True)
class MlpConfig:
    """Settings of the MLP in a block.

    Attributes:
        mlp_dim: F, dimension of the hidden layer.
        activation: key of ACTIVATIONS; "gelu" is exact.
        gated: True for a hidden layer activation(gate) · up (Shazeer 2020).
        mlp_bias: True for biases.
        mlp_sigma_reparam: True to multiply by γ W / σ₁(W), with a learned γ, instead of each matrix W (see
            `interventions.Linear`).
    """

    mlp_dim: int
    activation: str = "gelu"
    gated: bool = False
    mlp_bias: bool = True
    mlp_sigma_reparam: bool | None = None


class Mlp(nnx.Module):
    """Linear layer D → F, an activation, optionally a gate, and a linear layer F → D.

    Parameters: `up` and, if gated, `gate` (D, F), `down` (F, D), each with a bias unless `mlp_bias` is False.

    Args:
        width: D, embedding dimension.
        config: settings of the MLP.
        kernel_init: initialiser of the matrices.

    Raises:
        ConfigError: the activation is unknown.

    >>> Mlp(8, MlpConfig(mlp_dim=32), rngs=nnx.Rngs(0))(jnp.ones((2, 7, 8)))[0].shape
    (2, 7, 8)
    """

    def __init__(
        self,
        width: int,
        config: MlpConfig,
        *,
        kernel_init: nnx.Initializer = normal,
        dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        if config.activation not in ACTIVATIONS:
            raise ConfigError(
                f'model.activation="{config.activation}" is unknown. Choose one of: {", ".join(ACTIVATIONS)}.'
            )
        self.activation, mlp_dim = config.activation, config.mlp_dim
        kind = functools.partial(Linear, sigma=True) if config.mlp_sigma_reparam else nnx.Linear
        common = {"kernel_init": kernel_init, "dot_general": times_weights, "dtype": dtype, "rngs": rngs}
        linear = functools.partial(kind, use_bias=config.mlp_bias, **common)
        inner = {"kernel_metadata": over_hidden(-1), "bias_metadata": over_hidden(-1)}
        self.up = linear(width, mlp_dim, **inner)
        self.down = linear(mlp_dim, width, kernel_metadata=over_hidden(-2))
        self.gate = linear(width, mlp_dim, **inner) if config.gated else None

    def __call__(
        self, x: Float[Array, "b t d"], *, rate: float = 0.0, key: Key[Array, "b"] | None = None
    ) -> tuple[Float[Array, "b t d"], Float[Array, "b t f"]]:
        """Return the output, and for a tap the input of `down`: the hidden layer after activation, gate and dropout."""
        activate, hidden = ACTIVATIONS[self.activation], self.up(x)
        hidden = activate(hidden) if self.gate is None else activate(self.gate(x)) * hidden
        hidden = dropout(hidden, rate, key)
        return self.down(hidden), hidden
