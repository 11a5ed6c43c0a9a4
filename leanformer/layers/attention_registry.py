"""Attention types by the names of `model.attention`.

A type is a module like `multihead.MultiHeadAttention` with two class attributes: `options`, its keys of config.model
with their types, which its file declares in `Keys`, and `masks`, the parts of a `masks.Mask` that it supports.
"""

from types import MappingProxyType

from leanformer.layers.latent import LatentAttention
from leanformer.layers.multihead import MultiHeadAttention
from leanformer.layers.nystrom import NystromAttention


ATTENTIONS = MappingProxyType({"softmax": MultiHeadAttention, "latent": LatentAttention, "nystrom": NystromAttention})
