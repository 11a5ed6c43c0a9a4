"""Config keys of the section `model` of each architecture. A comment beside a key is its help text."""

from collections.abc import Mapping
from typing import Any

from leanformer.config import declare
from leanformer.config.attention import OPTIONS
from leanformer.config.declare import ConfigDict, Literal, Size, dataclass
from leanformer.errors import ConfigError


PER_LAYER = ("num_heads", "head_dim", "value_dim", "mlp_dim", "num_kv_heads")  # keys of the section model


@dataclass(frozen=True)
class BlockKeys:
    """Keys of the section `model` of all architectures, which add their own and have other defaults."""

    name: str = ""  # model architecture: a module of leanformer/models
    width: Size = 768  # embedding dimension of a token; one number per stage in architectures with stages
    depth: Size = 12  # number of blocks; one number per stage in architectures with stages
    # number of attention heads, or one per layer, as (4,4,8); one per stage in architectures with stages
    num_heads: Size = 12
    head_dim: Size = 64  # head dimension of queries and keys, independent of model.width; also per layer or stage
    value_dim: Size | None = None  # head dimension of values; also per layer or stage; model.head_dim if unset
    mlp_dim: Size | None = 3072  # hidden dimension of the MLP; also per layer or stage
    attention: str = "softmax"  # attention type: "softmax" or another entry of leanformer/layers/model_base.py
    # stochastic-depth rate of the last block; the architecture defines how the rate rises over the blocks
    drop_path: float = 0.0
    # activations recomputed in the backward pass: "none"; "light", norms, GELU and attention matrices (less memory at
    # little or no time); "block", everything (least memory at about a third more time)
    remat: Literal["none", "light", "block"] = "light"
    # layers per iteration of the scan over layers; larger values run faster and compile longer; if unset, 1, and on a
    # single GPU all layers of models of one stage and up to 12 layers
    unroll: int | None = None
    # attention implementation; "auto" selects one, which is logged at start
    backend: Literal["auto", "xla", "cudnn", "naive"] = "auto"


@dataclass(frozen=True)
class ImageKeys(BlockKeys):
    """Keys of all architectures of images."""

    mlp_dim: Size = 3072
    image_size: int | tuple[int, int] = 224  # image side in pixels, or (height, width)
    channels: Literal[1, 3] = 3  # number of image channels: 3 (RGB) or 1 (grey)
    # number of classes (model outputs); 0 = as many as the training split names
    num_classes: int = 1000


@dataclass(frozen=True)
class PlainKeys(BlockKeys):
    """Keys of architectures whose blocks are `layers.blocks.Block`, and that do not read images."""

    width: int = 768
    depth: int = 12
    # initial value of the learned per-channel scales of each residual branch (LayerScale); none if unset
    layer_scale: float | None = None
    mlp_sigma_reparam: bool | None = None  # True: MLP matrices are reparametrised as γ·W/σ₁(W), with learned γ


@dataclass(frozen=True)
class TextKeys(PlainKeys):
    """Keys of architectures of texts."""

    mlp_dim: Size = 3072
    vocabulary: int = 50257  # vocabulary size: one more than the largest token id
    max_length: int = 1024  # sequence length: tokens of a row
    # True: rows of whole documents that do not attend to each other; False: windows of the token stream
    packed: bool = False
    norm: str = "layernorm"  # norm type: "layernorm" or "rmsnorm", see leanformer/layers/norms.py
    epsilon: float = 1e-5  # epsilon of all norms, except for queries, keys and latents
    activation: str = "gelu"  # activation function of the MLP, see leanformer/layers/blocks.py
    gated: bool = False  # True: gated MLP, activation(gate) x up
    mlp_bias: bool = True  # True: the linear layers of the MLP have biases
    qkv_bias: bool = True  # True: query, key and value projections have biases
    dropout: float = 0.0  # dropout rate of embeddings, residual branches and the MLP's hidden layer


@dataclass(frozen=True)
class BertKeys(TextKeys):
    """Keys of model.name="bert"; the defaults are the published BERT-base."""

    vocabulary: int = 30522
    max_length: int = 512
    epsilon: float = 1e-12
    post_norm: bool = True  # True: norms follow the residual sums, as in BERT; False: norms precede attention and MLP
    # position embeddings: "sinusoidal" with a learned scale, initially 1/√D; "learned" as in BERT; "none" with
    # model.rotary
    positions: Literal["learned", "sinusoidal", "none"] = "learned"
    types: int | None = None  # number of token types (segments), 2 in BERT; none if unset
    transform: bool = False  # True: a dense layer and a norm precede the output head, as in BERT
    head_bias: bool = False  # True: the output head, tied to the token embeddings, has a bias, as in BERT
    num_classes: int | None = None  # number of classes; 1 = regression; the head of token logits if unset
    pool: Literal["first", "mean"] = "first"  # input of the classifier: "first" token, or "mean" over valid tokens
    pooler_dim: int | None = None  # output dimension of the dense layer with tanh before the classifier; none if unset


@dataclass(frozen=True)
class DavitKeys(ImageKeys):
    """Keys of model.name="davit"; the defaults are DaViT-T. A depth counts units of two blocks."""

    width: tuple[int, ...] = (96, 192, 384, 768)
    depth: tuple[int, ...] = (1, 1, 3, 1)
    num_heads: tuple[int, ...] = (3, 6, 12, 24)
    head_dim: tuple[int, ...] = (32, 32, 32, 32)
    value_dim: tuple[int, ...] | None = None
    mlp_dim: tuple[int, ...] = (384, 768, 1536, 3072)
    # head dimension of the attention between channels, one number per stage; model.head_dim if unset
    channel_head_dim: tuple[int, ...] | None = None
    window_size: int = 7  # side of an attention window, in tokens
    qkv_bias: bool = True  # True: query, key and value projections have biases


@dataclass(frozen=True)
class EncoderKeys(PlainKeys):
    """Keys of model.name="encoder"; the defaults are the model of Amsel et al."""

    width: int = 64
    depth: int = 1
    num_heads: Size = 1  # number of attention heads per attention module
    mlp_dim: Size | None = None  # hidden dimension of the MLP; no MLP if unset
    inputs: int | None = None  # dimension of a vector, read by a linear layer; vectors are the tokens if unset
    outputs: int | None = None  # dimension of an output, computed by a linear layer; tokens are the output if unset
    max_length: int | None = None  # number of learned positions; no positions if unset
    causal: bool = False  # True: a token attends only to itself and the tokens before it
    # output of the model: "none", one per token, or "token", one from a class token in front
    pool: Literal["none", "token"] = "none"
    norm: str = "unit"  # norm type: "unit", "layernorm" or "rmsnorm"
    epsilon: float = 1e-5  # epsilon of all norms
    # True: norms follow each residual sum; False: they precede attention and MLP, with one at the end
    post_norm: bool = True
    activation: str = "relu"  # activation function of the MLP, see leanformer/layers/blocks.py
    gated: bool = False  # True: gated MLP, activation(gate) x up
    # token graying: exponent ε applied to the spectrum of the tokens before the blocks; 1 if unset
    graying: float | None = None
    # spectrum that model.graying flattens: singular values, or cosine coefficients; "svd" if unset
    graying_by: Literal["svd", "dct"] | None = None
    remat: Literal["none", "light", "block"] = "none"


@dataclass(frozen=True)
class GptKeys(TextKeys):
    """Keys of model.name="gpt"; the defaults are the published GPT-2."""

    # activation function of the MLP, "gelu_tanh" in GPT-2 as published, see leanformer/layers/blocks.py
    activation: str = "gelu_tanh"
    positions: Literal["learned", "none"] = "learned"  # position embeddings; "none" with model.rotary
    tied: bool = True  # True: the token embeddings are also the output head
    head_bias: bool = False  # True: the untied output head has a bias
    head_cap: float | None = None  # soft cap c of the output logits, c tanh(logits / c); none if unset


@dataclass(frozen=True)
class NystromformerKeys(PlainKeys):
    """Keys of model.name="nystromformer"."""

    width: int = 64
    depth: int = 2
    num_heads: Size = 2
    head_dim: Size = 32
    mlp_dim: Size = 128
    attention: str = "nystrom"
    vocabulary: int = 32  # vocabulary size: one more than the largest token id
    max_length: int = 2048  # number of positions; shorter examples are padded to it
    num_classes: int = 10  # number of classes
    towers: Literal[1, 2] = 1  # number of sequences per example that are encoded with shared weights: 2 for pairs
    # input of the classifier: "mean" over valid tokens; "padded_mean" over all positions with padding as zeros, as in
    # the original; or class "token"
    pool: Literal["mean", "padded_mean", "token"] = "mean"
    # True: token 0 counts as padding, as in the original, which thereby ignores black pixels
    zero_is_padding: bool = False
    dropout: float = 0.0  # dropout rate of embeddings, residual branches and the MLP's hidden layer


@dataclass(frozen=True)
class TntKeys(ImageKeys):
    """Keys of model.name="tnt"; the defaults are TNT-S."""

    width: int = 384
    depth: int = 12
    num_heads: int = 6
    head_dim: int = 64
    value_dim: int | None = None
    mlp_dim: int = 1536
    patch_size: int = 16  # side of a patch in pixels, a whole multiple of model.pixel_stride
    inner_width: int = 24  # embedding dimension of a pixel token
    inner_heads: int = 4  # number of heads of the attention between pixels
    inner_head_dim: int = 6  # head dimension of the attention between pixels
    inner_mlp_dim: int = 96  # hidden dimension of the MLP of pixel tokens
    pixel_stride: int = 4  # stride of the 7 x 7 convolution that computes pixel tokens
    layout: Literal["original", "patchwise"] = "original"  # model variant, see leanformer/models/tnt.py


@dataclass(frozen=True)
class VitKeys(ImageKeys):
    """Keys of model.name="vit"."""

    width: int = 768
    depth: int = 12
    patch_size: int = 16  # side of a square patch, in pixels
    # input of the classifier: "token", the class token, or "mean" over patches, without a class token
    pool: Literal["token", "mean"] = "token"
    epsilon: float = 1e-6  # epsilon of all norms; 1e-12 in most of Hugging Face's ViTs
    # True: second class token and head as in DeiT; the mean of both heads is trained on the labels, without a teacher
    distilled: bool = False
    # initial value of the learned per-channel scales of each residual branch (LayerScale); none if unset
    layer_scale: float | None = None
    mlp_sigma_reparam: bool | None = None  # True: MLP matrices are reparametrised as γ·W/σ₁(W), with learned γ
    # token graying: exponent ε applied to the spectrum of the tokens before the blocks; 1 if unset
    graying: float | None = None
    # spectrum that model.graying flattens: singular values, or cosine coefficients; "svd" if unset
    graying_by: Literal["svd", "dct"] | None = None


@dataclass(frozen=True)
class VoloKeys(ImageKeys):
    """Keys of model.name="volo"; the defaults are VOLO-D1."""

    width: tuple[int, ...] = (192, 384, 384, 384)
    depth: tuple[int, ...] = (4, 4, 8, 2)
    num_heads: tuple[int, ...] = (6, 12, 12, 12)
    head_dim: tuple[int, ...] = (32, 32, 32, 32)
    value_dim: tuple[int, ...] | None = None
    mlp_dim: tuple[int, ...] = (576, 1152, 1152, 1152)
    patch_size: int = 8  # side of a token of stage 1 in pixels; tokens of later stages have twice the side
    class_heads: int = 12  # number of heads of the class-attention blocks
    class_head_dim: int = 32  # head dimension of the class-attention blocks
    class_depth: int = 2  # number of class-attention blocks
    class_mlp_dim: int | None = None  # hidden dimension of the class-attention MLP; as in the last stage if unset
    stem_width: int = 64  # channels of the stem's convolutions
    stem_stride: int = 2  # stride of the stem's first convolution, a divisor of model.patch_size
    # True: the token-labelling head, trained on image labels: half its largest logits are added to the class logits
    token_head: bool = True


@dataclass(frozen=True)
class XcitKeys(ImageKeys):
    """Keys of model.name="xcit"; the defaults are XCiT-S24."""

    width: int = 384
    depth: int = 24
    num_heads: Size = 8
    head_dim: Size = 48
    mlp_dim: Size = 1536
    attention: str = "cross_covariance"
    # side of a patch in pixels, a power of 2: the stem has one convolution per halving; published: 16, 8
    patch_size: int = 16
    class_heads: int = 8  # number of heads of the class-attention blocks
    class_head_dim: int = 48  # head dimension of the class-attention blocks
    class_depth: int = 2  # number of class-attention blocks
    class_mlp_dim: int | None = None  # hidden dimension of the class-attention MLP; model.mlp_dim if unset
    layer_scale: float = 1e-5  # initial value of the learned per-channel scales; published: 1e-5 with 24 layers, else 1
    tokens_norm: bool = True  # True: the second norm of class-attention blocks also normalises the patches


ARCHITECTURES: dict[str, Any] = {
    "bert": BertKeys,
    "davit": DavitKeys,
    "encoder": EncoderKeys,
    "gpt": GptKeys,
    "nystromformer": NystromformerKeys,
    "tnt": TntKeys,
    "vit": VitKeys,
    "volo": VoloKeys,
    "xcit": XcitKeys,
}


def keys_of(name: str) -> Any:
    """Return the declaration of the keys of an architecture."""
    if name not in ARCHITECTURES:
        raise ConfigError(f'model.name="{name}": unknown architecture. Choose one of: {", ".join(ARCHITECTURES)}.')
    return ARCHITECTURES[name]


def model_section(name: str, **values: Any) -> ConfigDict:
    """Return the section `model`: an architecture's defaults, overridden by `values`, and unset attention options."""
    m = declare.section(keys_of(name)(name=name))
    for options in OPTIONS:
        m.update(declare.section(options()))
    m.update(values)
    return m


def model_meanings(name: str) -> dict[str, str]:
    """Return {dotted key: meaning} of the section `model` of an architecture."""
    texts: dict[str, str] = {}
    for keys in (keys_of(name), *OPTIONS):
        texts |= {key: text for key, text in declare.meanings(keys, "model.").items() if key not in texts}
    return texts


def listed_per_layer(m: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return {key: numbers} of the sizes that a section `model` gives per layer; {} for an architecture with stages."""
    several = {name: m[name] for name in PER_LAYER if isinstance(m.get(name), tuple | list)}
    return {name: tuple(sizes) for name, sizes in several.items()} if isinstance(m.get("depth"), int) else {}
