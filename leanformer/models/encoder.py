"""Encoder of sets and sequences of vectors, with independent attention dimensions.

The defaults are the model of Amsel, Yehudai & Bruna (2025), whose nearest-neighbour runs show the effect of head rank:
blocks with a norm after each sum, unit vectors times one learned scale; attention as the mean of several independent
multi-head modules; an MLP with ReLU; neither positions nor a mask. With `causal`, positions, LayerNorm before each
branch and GELU it is the trunk of Garg et al. (2022), GPT-2 over vectors.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from flax import nnx
from jaxtyping import Array, Float, Key

from leanformer.config.architectures import EncoderKeys
from leanformer.config.rules import require
from leanformer.layers.attention import fan_in, normal
from leanformer.layers.blocks import BlockConfig
from leanformer.layers.interventions import check_flattening
from leanformer.layers.masks import Context, Mask, Tap
from leanformer.layers.model_base import ATTENTIONS, Family
from leanformer.layers.multihead import AveragedAttention
from leanformer.layers.positions import check_length, prepend
from leanformer.layers.stack import Stack


class Model(Family):
    """Encoder of vectors, B T inputs, with one output vector per token (B T outputs) or one per example (B 1 outputs).

    Without `post_norm` there is one more norm at the end.
    """

    keys = EncoderKeys
    no_decay = ("cls_token", "pos_embed", "gamma1", "gamma2")
    classifiers = ("read_out",)
    attentions = MappingProxyType({**ATTENTIONS, "softmax": AveragedAttention})
    fixed = MappingProxyType({"kernel_init": fan_in})

    @classmethod
    def mask_parts(cls, arguments: Mapping[str, Any]) -> tuple[str, ...]:
        return ("causal",) if arguments.get("causal", False) else ()

    def __init__(self, keys: EncoderKeys, blocks: BlockConfig, *, rngs: nnx.Rngs):
        pool, causal = keys.pool, keys.causal
        blind = causal and pool == "token"
        require(not blind, 'model.causal=True hides all tokens from the class token of model.pool="token". Unset one.')
        check_flattening(blocks.graying, blocks.graying_by, causal=causal)
        self.dtype, self.mask, width = blocks.dtype, Mask(causal=causal), blocks.width

        extra = int(pool == "token")
        if keys.inputs is not None:
            self.read_in = blocks.make_linear(keys.inputs, width, rngs)
        if extra:
            self.cls_token = nnx.Param(normal(rngs.params(), (1, 1, width)))
        if keys.max_length is not None:
            self.pos_embed = nnx.Param(normal(rngs.params(), (keys.max_length + extra, width)))
        self.blocks = Stack.from_config(blocks, rngs=rngs)
        if not blocks.post_norm:
            self.norm = blocks.make_norm(rngs)
        if keys.outputs is not None:
            self.read_out = blocks.make_linear(width, keys.outputs, rngs)

    def __call__(
        self, vectors: Float[Array, "b t di"], *, key: Key[Array, "b"] | None = None, tap: Tap | None = None
    ) -> tuple[Float[Array, "b #t do"], Any]:
        """Return outputs, one per token or one in all, and {"blocks": tap results stacked over layers}."""
        x = vectors.astype(self.dtype)
        if hasattr(self, "read_in"):
            x = self.read_in(x)
        if hasattr(self, "cls_token"):
            x = prepend(self.cls_token, x)
        if hasattr(self, "pos_embed"):
            check_length(x.shape[1], len(self.pos_embed[...]))
            x = x + self.pos_embed[...].astype(self.dtype)[None, : x.shape[1]]
        x, taps = self.blocks(x, Context(key=key, tap=tap, mask=self.mask))
        x = x[:, :1] if hasattr(self, "cls_token") else x
        x = self.norm(x) if hasattr(self, "norm") else x
        return self.read_out(x) if hasattr(self, "read_out") else x, {"blocks": taps}
