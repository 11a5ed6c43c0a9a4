"""Encoder of sets and sequences of vectors, with independent attention dimensions.

The defaults are the model of Amsel, Yehudai & Bruna (2025), whose nearest-neighbour runs show the effect of head rank:
blocks with a norm after each sum, unit vectors times one learned scale; attention as the mean of several independent
multi-head modules; an MLP with ReLU; neither positions nor a mask. With `causal`, positions, LayerNorm before each
branch and GELU it is the trunk of Garg et al. (2022), GPT-2 over vectors.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from leanformer.errors import ConfigError
from leanformer.layers.attention import fan_in, normal
from leanformer.layers.attention_registry import ATTENTIONS
from leanformer.layers.blocks import BlockConfig
from leanformer.layers.context import PLAIN, Context, Tap
from leanformer.layers.interventions import check_flattening
from leanformer.layers.masks import Mask
from leanformer.layers.model_base import Family
from leanformer.layers.multihead import MultiHeadAttention, check_shared
from leanformer.layers.stack import Stack
from leanformer.runtime import sharing


class AveragedAttention(MultiHeadAttention):
    """The mean of the outputs of independent modules of multi-head attention, as one module of all their heads.

    Parameters: those of `MultiHeadAttention` with N = modules × heads; with several modules, output biases are `bias`
    (modules, D).

    Args:
        width, head_dim, value_dim: as of `MultiHeadAttention`.
        num_heads: number of query heads of each module.
        num_kv_heads: number of key and value heads of each module; `num_heads` if None.
        out_bias: True for an output bias of each module.
        modules: number of modules, initialised like separate modules.
        arguments: further arguments of `MultiHeadAttention`.

    Raises:
        ConfigError: `modules` is below 1, or an error of `MultiHeadAttention`.
    """

    options = MappingProxyType(MultiHeadAttention.options | {"modules": int})

    def __init__(
        self,
        width: int,
        num_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        *,
        modules: int = 1,
        num_kv_heads: int | None = None,
        out_bias: bool = True,
        **arguments: Any,
    ):
        if modules < 1:
            raise ConfigError(f"model.modules={modules} must be at least 1.")
        check_shared(num_heads, num_kv_heads or num_heads)
        several = modules > 1
        super().__init__(
            width,
            modules * num_heads,
            head_dim,
            value_dim,
            num_kv_heads=num_kv_heads and modules * num_kv_heads,
            out_bias=out_bias and not several,
            **arguments,
        )
        self.modules = modules
        if several:
            self.out.kernel[...] *= modules**0.5  # initialised for the fan-in of all heads together
        if several and out_bias:
            self.bias = nnx.Param(jnp.zeros((modules, width)), **sharing.REPLICATED)

    def __call__(
        self, x: Float[Array, "b t d"], context: Context = PLAIN
    ) -> tuple[Float[Array, "b t d"], dict[str, Array], Any]:
        """Return output, arrays and cache as in `MultiHeadAttention`."""
        projected, arrays, cache = super().__call__(x, context)
        if self.modules > 1:
            projected = projected / self.modules
        if hasattr(self, "bias"):
            projected = projected + self.bias[...].mean(axis=0).astype(projected.dtype)[None, None]
        return projected, arrays, cache


class Model(Family):
    """Encoder of sets or sequences of vectors, B T inputs, with one output vector per token or one per example.

    Called with vectors, it returns outputs, B T `outputs`, or B 1 `outputs` for one per example; and the tap results.

    Args:
        inputs: dimension of an input vector, read by a linear layer; None if vectors of dimension D are the tokens.
        outputs: dimension of an output, computed by a linear layer; None for the tokens of the last block.
        max_length: number of learned positions, added to the tokens; None for none.
        causal: True if a token attends only to itself and the tokens before it.
        pool: "none", one output per token; "token", only that of a class token in front.
        blocks: settings of the blocks; attention is one module or the mean of several (option `modules`). Without
            `post_norm` there is one more norm at the end.

    Raises:
        ConfigError: a value is unknown, token graying is invalid, or a causal model has a class token or graying.
    """

    # Parameters exempt from weight decay, in addition to biases and norms.
    no_decay = ("cls_token", "pos_embed", "gamma1", "gamma2")
    classifiers = ("read_out",)
    attentions = MappingProxyType(dict(ATTENTIONS) | {"softmax": AveragedAttention})
    takes = MappingProxyType(
        {
            **{"mlp_dim": None, "norm": "unit", "epsilon": 1e-5, "post_norm": True, "activation": "relu"},
            **{"gated": False, "mlp_sigma_reparam": None, "layer_scale": None, "graying": None, "graying_by": None},
            **{"remat": "none"},
        }
    )
    fixed = MappingProxyType({"kernel_init": fan_in})

    @classmethod
    def mask_parts(cls, arguments: Mapping[str, Any]) -> tuple[str, ...]:
        """Return ("causal",) for a causal model, else ()."""
        return ("causal",) if arguments.get("causal", False) else ()

    def __init__(
        self,
        *,
        inputs: int | None = None,
        outputs: int | None = None,
        max_length: int | None = None,
        causal: bool = False,
        pool: str = "none",
        blocks: BlockConfig,
        rngs: nnx.Rngs,
    ):
        if pool not in ("none", "token"):
            raise ConfigError(
                f'model.pool="{pool}": unknown value. Choose none (one output per token), or token (class token).'
            )
        if causal and pool == "token":
            raise ConfigError(
                'model.causal=True: not supported with model.pool="token": the class token in front sees no other.'
            )
        check_flattening(blocks.graying, blocks.graying_by, causal=causal)
        self.dtype, self.mask, width = blocks.dtype, Mask(causal=causal), blocks.width

        extra = int(pool == "token")
        if inputs is not None:
            self.read_in = blocks.make_linear(inputs, width, rngs)
        if extra:
            self.cls_token = nnx.Param(normal(rngs.params(), (1, 1, width)))
        if max_length is not None:
            self.pos_embed = nnx.Param(normal(rngs.params(), (max_length + extra, width)))
        self.blocks = Stack.from_config(blocks, rngs=rngs)
        if not blocks.post_norm:
            self.norm = blocks.make_norm(rngs)
        if outputs is not None:
            self.read_out = blocks.make_linear(width, outputs, rngs)

    def __call__(
        self, vectors: Float[Array, "b t di"], *, key: Key[Array, "b"] | None = None, tap: Tap | None = None
    ) -> tuple[Float[Array, "b #t do"], Any]:
        """Return outputs, one per token or one in all, and {"blocks": tap results stacked over layers}.

        `key`, one per example, switches training on, with drop path.

        Raises:
            ConfigError: there are more tokens than positions.
        """
        x = vectors.astype(self.dtype)
        if hasattr(self, "read_in"):
            x = self.read_in(x)
        if hasattr(self, "cls_token"):
            token = jnp.broadcast_to(self.cls_token[...].astype(self.dtype), (x.shape[0], 1, x.shape[-1]))
            x = jnp.concatenate([token, x], axis=1)
        if hasattr(self, "pos_embed"):
            x = x + self._positions(x.shape[1])
        x, taps = self.blocks(x, Context(key=key, tap=tap, mask=self.mask))
        x = x[:, :1] if hasattr(self, "cls_token") else x
        x = self.norm(x) if hasattr(self, "norm") else x
        return self.read_out(x) if hasattr(self, "read_out") else x, {"blocks": taps}

    def _positions(self, tokens: int) -> Float[Array, "1 t d"]:
        if tokens > len(self.pos_embed[...]):
            raise ConfigError(
                f"{tokens} tokens exceed the {len(self.pos_embed[...])} positions. Increase model.max_length."
            )
        return self.pos_embed[...].astype(self.dtype)[None, :tokens]
