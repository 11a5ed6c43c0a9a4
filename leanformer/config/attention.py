"""Config keys of attention in the section `model`, unset by default. A comment beside a key is its help text."""

from typing import Any

from leanformer.config.declare import Literal, Size, dataclass


@dataclass(frozen=True)
class InterventionKeys:
    """Options of attention that change its conditioning, in TNT and VOLO only between patches; no effect if unset."""

    spectral: float | None = None  # λ of the constant λI added to the query, key and value matrices; 0 if unset
    # initialisation of the query, key and value matrices; "spectral" adds U·σ₁·Vᵀ to the default one
    qkv_init: Literal["orthogonal", "spectral"] | None = None
    # matrices that model.spectral and model.qkv_init act on: a subset of "qkv", such as "qk"; "qkv" if unset
    levers_on: str | None = None
    sigma_reparam: bool | None = None  # True: attention matrices are reparametrised as γ·W/σ₁(W), with learned γ


@dataclass(frozen=True)
class LatentKeys:
    """Options of attention="latent" besides SHARED_OPTIONS of attention="softmax"."""

    kv_rank: int | None = None  # channels of the latent that keys and values are computed from
    query_rank: int | None = None  # channels of the latent that queries are computed from; no query latent if unset
    latent_norm: str | None = None  # norm of the key-value and query latents; none if unset


@dataclass(frozen=True)
class SoftmaxKeys:
    """Options of attention="softmax"; no effect if unset."""

    # number of key and value heads, each shared by several query heads, or one per layer; model.num_heads if unset
    num_kv_heads: Size | None = None
    logit_scale: float | None = None  # factor of the attention logits q·k; 1/√head_dim if unset
    temperature: bool | None = None  # True: each head has a learned factor of its attention logits
    soft_cap: float | None = None  # soft cap c of the attention logits: logit becomes c·tanh(logit / c)
    # dropout rate of attention weights in training; not supported by cuDNN's kernel
    attention_dropout: float | None = None
    qk_norm: str | None = None  # norm of each head's queries and keys: "rmsnorm", "layernorm", "unit"; none if unset
    rotary: float | None = None  # base of rotary positions, for example 10000.0; no rotary positions if unset
    rotary_width: int | None = None  # channels of each head that rotary positions rotate; all if unset
    out_bias: bool | None = None  # False: the attention output projection has no bias
    # number of attention modules per layer, each with separate heads, whose outputs are averaged; 1 if unset
    modules: int | None = None


@dataclass(frozen=True)
class NystromKeys:
    """Options of attention="nystrom"."""

    landmarks: int | None = None  # number of landmarks of attention="nystrom"; 64 if unset
    iterations: int | None = None  # iterations of Nyström attention's pseudo-inverse; 6 if unset
    # kernel size (taps) of the convolution over the values in Nyström attention; 0 = none; 35 if unset
    convolution: int | None = None
    # initial scale of Nyström attention's pseudo-inverse, "batch" as in the original; "matrix" if unset
    scale: Literal["matrix", "batch"] | None = None
    # padding tokens in Nyström attention, "zeros" as in the original; "masked" if unset
    padding: Literal["masked", "zeros"] | None = None


OPTIONS = (InterventionKeys, LatentKeys, SoftmaxKeys, NystromKeys)


def landmarks(number: int) -> dict[str, Any]:
    """Return the keys of config.model for Nyström attention with a number of landmarks; for exact attention if 0.

    Attention has no convolution, as in the parameter counts of Leaner Transformers.
    """
    if not number:
        return {"attention": "softmax"}
    return {"attention": "nystrom", "landmarks": number, "convolution": 0}
