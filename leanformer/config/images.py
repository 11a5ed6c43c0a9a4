"""Config defaults and validation of image classification; the defaults are the recipe of Leaner Transformers."""

from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import FieldReference, placeholder

from leanformer.config.common import common, section
from leanformer.config.per_layer import allow_per_layer
from leanformer.config.rules import SIDE, check_classes, image_sides, require


IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
MAX_RAND_LAYERS = 100


def base() -> ConfigDict:
    """Return the locked config of image classification.

    The defaults are the recipe of Leaner Transformers (Table 6) on ImageNet-1k.

    >>> c = base()
    >>> c.model.name, c.data.name
    ('vit', 'tfds:imagenet2012')
    """
    c = common("images")
    c.model = model(  # model architecture: keyword arguments of leanformer.models.<name>.Model, and the name
        "vit",
        patch_size=16,  # side of a square patch, in pixels
        width=768,  # embedding dimension of a token; one number per stage in architectures with stages
        depth=12,  # number of blocks; one number per stage in architectures with stages
        # number of attention heads, or one per layer, as (4,4,8) or linear:4-12; one per stage in architectures with
        # stages
        num_heads=12,
        head_dim=64,  # head dimension of queries and keys, independent of model.width; also per layer or stage
        value_dim=placeholder(int),  # head dimension of values; also per layer or stage; model.head_dim if unset
        mlp_dim=3072,  # hidden dimension of the MLP; also per layer or stage
        attention="softmax",  # attention type: "softmax" or another entry of leanformer/layers/attention_registry.py
        # input of the classifier: "token", the class token, or "mean" over patches, without a class token
        pool="token",
        epsilon=1e-6,  # epsilon of all norms; 1e-12 in most of Hugging Face's ViTs
        # True: second class token and head as in DeiT; the mean of both heads is trained on the labels, without a
        # teacher
        distilled=False,
        # initial value of the learned per-channel scales of each residual branch (LayerScale); none if unset
        layer_scale=placeholder(float),
    )

    # training data: tfds:<name>, folder:<path>, cache:<path>, idx:<path>, bundled:fashion_mnist or synthetic
    c.data.name = "tfds:imagenet2012"
    c.data.train_split = "train"  # training split: a folder or file stem for folder: and idx:, a TFDS split for tfds:
    # evaluation split: a folder or file stem for folder: and idx:, a TFDS split for tfds:
    c.data.eval_split = "validation"
    c.data.dir = placeholder(str)  # folder of TFDS data; $TFDS_DATA_DIR, or else ~/tensorflow_datasets, if unset
    c.data.mean = (0.5, 0.5, 0.5)  # mean of each channel for normalisation, on a scale of 0 to 1
    c.data.std = (0.5, 0.5, 0.5)  # standard deviation of each channel for normalisation, on a scale of 0 to 1
    # evaluation: images are resized to image_size / crop_fraction with their aspect ratio, then centre-cropped
    c.data.crop_fraction = 0.9

    c.augment = ConfigDict()
    c.augment.crop_scale = (0.08, 1.0)  # (low, high) area of a random resized crop, as a fraction of the image
    # (low, high) aspect ratio (width / height) of a random resized crop, before it is resized
    c.augment.crop_ratio = (3 / 4, 4 / 3)
    c.augment.flip = 0.5  # probability of a horizontal flip
    c.augment.rand_magnitude = 9.0  # magnitude of RandAugment, with timm's increasing set of operations; 0 = off
    c.augment.rand_std = 0.5  # standard deviation of RandAugment's magnitude between operations
    c.augment.rand_layers = 2  # number of RandAugment operations per image
    c.augment.rand_prob = 0.5  # probability of applying each RandAugment operation
    c.augment.color_jitter = 0.0  # strength of colour jitter; 0 = off, as in timm when RandAugment is on
    c.augment.repeats = 1  # repeated augmentation: consecutive views of each image; 1 = off
    c.augment.erase = 0.0  # probability of random erasing
    c.augment.mixup = 0.8  # alpha of mixup's Beta(alpha, alpha); 0 = off
    c.augment.cutmix = 1.0  # alpha of CutMix's Beta(alpha, alpha); 0 = off
    c.augment.mix_prob = 1.0  # probability that mixup or CutMix is applied to a batch
    c.augment.switch_prob = 0.5  # probability of CutMix instead of mixup, if both are on
    c.augment.label_smoothing = 0.1  # label smoothing: fraction of the label mass spread over all classes

    c.loss = "softmax"  # training loss: "softmax" (cross-entropy), or "sigmoid" (independent classes, summed)
    c.optim.update(warmup_epochs=20.0, clip_norm=1.0)
    c.checkpoint.every = 2500
    return c.lock()


def model(name: str, **arguments: Any) -> ConfigDict:
    """Return the section `model` of a config: the keys of all image architectures, then those of one.

    Args:
        name: architecture, a module of `leanformer.models`.
        arguments: values of keys, among them those that only this architecture has (FAMILIES).
    """
    m = section(name)
    m.image_size = FieldReference(224, field_type=object)  # image side in pixels, or (height, width)
    m.channels = 3  # number of image channels: 3 (RGB) or 1 (grey)
    m.num_classes = 1000  # number of classes (model outputs); 0 = that of the training split, if its classes are named
    m.drop_path = 0.1
    # number of landmarks of attention="nystrom", which every image architecture supports; 64 if unset
    m.landmarks = placeholder(int)
    m.update(arguments)
    return allow_per_layer(m)


FAMILIES = {  # keys of `model` that only some architectures have, with their help texts
    "stem_width": "VOLO: channels of the stem's convolutions",
    "stem_stride": "VOLO: stride of the stem's first convolution",
    "token_head": "VOLO: True: the token-labelling head, trained on image labels, contributes to the logits",
    "class_depth": "VOLO, XCiT: number of class-attention blocks",
    "class_heads": "VOLO, XCiT: number of heads of the class-attention blocks",
    "class_head_dim": "VOLO, XCiT: head dimension of the class-attention blocks",
    "class_mlp_dim": "VOLO, XCiT: hidden dimension of the class-attention MLP; that of the preceding blocks if unset",
    "tokens_norm": "XCiT: True: the second norm of class-attention blocks also normalises the patches",
    "inner_width": "TNT: embedding dimension of a pixel token",
    "inner_heads": "TNT: number of heads of the attention between pixels",
    "inner_head_dim": "TNT: head dimension of the attention between pixels",
    "inner_mlp_dim": "TNT: hidden dimension of the MLP of pixel tokens",
    "pixel_stride": "TNT: stride of the convolution that computes pixel tokens",
    "layout": 'TNT: model variant, "original" or "patchwise", see leanformer/models/tnt.py',
    "channel_head_dim": "DaViT: head dimension of the attention between channels; model.head_dim if unset",
    "window_size": "DaViT: side of an attention window, in tokens",
    "qkv_bias": "DaViT: True: query, key and value projections have biases",
}


def check(c: Any) -> None:
    """Raise ConfigError at the first invalid key of an image config."""
    check_classes(c)
    channels = c.model.channels
    require(channels in (1, 3), f"model.channels={channels}: invalid value. Set 1 (grey) or 3 (RGB).")
    for name in ("mean", "std"):
        _check_numbers(f"data.{name}", c.data[name])
        values = c.data[name]
        require(
            len(values) == c.model.channels,
            f"data.{name}={tuple(values)} has {len(values)} numbers, model.channels={c.model.channels}. "
            "Set one number per channel.",
        )
    require(min(c.data.std) > 0, f"data.std={tuple(c.data.std)} must be positive.")
    share, largest = c.data.crop_fraction, max(image_sides(c.model.image_size))
    require(0 < share <= 1, f"data.crop_fraction={share} must be in (0, 1].")
    require(
        largest / share <= SIDE,
        f"data.crop_fraction={share}: {largest} pixels would be cropped out of {largest / share:.2g}. The limit is "
        f"{SIDE:,}.",
    )
    a = c.augment
    for name in ("crop_scale", "crop_ratio"):
        _check_numbers(f"augment.{name}", a[name])
        require(len(a[name]) == 2, f"augment.{name}={tuple(a[name])} must be two numbers, (low, high).")
        low, high = a[name]
        require(0 < low <= high, f"augment.{name}={tuple(a[name])} must be (low, high) with 0 < low <= high.")
    require(a.crop_scale[1] <= 1, f"augment.crop_scale={tuple(a.crop_scale)} must be fractions of the area, at most 1.")
    require(0 <= a.rand_magnitude <= 10, f"augment.rand_magnitude={a.rand_magnitude} must be in 0..10.")
    for name in ("flip", "rand_prob", "erase", "mix_prob", "switch_prob"):
        require(0 <= a[name] <= 1, f"augment.{name}={a[name]} must be a probability, 0 to 1.")
    require(a.rand_layers <= MAX_RAND_LAYERS, f"augment.rand_layers={a.rand_layers} must be at most {MAX_RAND_LAYERS}.")
    for name in ("rand_std", "rand_layers", "mixup", "cutmix", "color_jitter"):
        require(a[name] >= 0, f"augment.{name}={a[name]} must not be negative. 0 = off.")
    require(a.repeats >= 1, f"augment.repeats={a.repeats} must be at least 1. 1 = off.")


def _check_numbers(name: str, values: Any) -> None:
    ok = all(isinstance(x, int | float) and not isinstance(x, bool) for x in values)
    require(ok, f"{name}={tuple(values)} must be numbers.")
