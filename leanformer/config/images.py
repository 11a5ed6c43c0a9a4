"""The base config, documented key by key: images, by the recipe of Leaner Transformers; and the rules for images."""

from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import FieldReference, placeholder

from leanformer.config.common import common, section
from leanformer.config.rules import SIDE, check_classes, require, sides


IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def base() -> ConfigDict:
    """Return every key with its meaning. Defaults: the recipe of Leaner Transformers (Table 6) on ImageNet-1k."""
    c = common("images")
    c.model = model(  # keyword arguments of leanformer.models.<name>.Model, and the name
        "vit",
        patch_size=16,  # pixels of a patch, a side
        width=768,  # of a token; one a stage where there are stages, and so for the next four
        depth=12,  # blocks
        num_heads=12,  # of attention
        head_dim=64,  # of queries and keys; set apart from width, so heads can be traded against rank
        value_dim=placeholder(int),  # of values, per head; head_dim if unset
        mlp_dim=3072,  # hidden width of the MLP
        attention="softmax",  # or another of leanformer/layers/kinds.py
        pool="token",  # or "mean": no class token
        distilled=False,  # DeiT's second token and head; the mean of both heads learns the labels, without a teacher
        layer_scale=placeholder(float),  # start of the vectors that scale each branch; none if unset
    )

    c.data.name = "tfds:imagenet2012"  # or folder:<path>, cache:<path>, idx:<path>, bundled:fashion_mnist, synthetic
    c.data.train_split = "train"  # a folder or file stem for folder: and idx:, a TFDS split for tfds:
    c.data.eval_split = "validation"  # the same, to evaluate on
    c.data.dir = placeholder(str)  # where TFDS data are; else $TFDS_DATA_DIR, else ~/tensorflow_datasets
    c.data.mean = (0.5, 0.5, 0.5)  # of the normalisation, on a 0..1 scale
    c.data.std = (0.5, 0.5, 0.5)  # of the normalisation, on the same scale
    c.data.crop_fraction = 0.9  # evaluation: resized to image_size / crop_fraction, shape kept, then centre crop

    c.augment = ConfigDict()
    c.augment.crop_scale = (0.08, 1.0)  # share of the area in a random resized crop
    c.augment.crop_ratio = (3 / 4, 4 / 3)  # of its width to its height, whatever image it is resized to
    c.augment.flip = 0.5  # probability of a mirror image
    c.augment.rand_magnitude = 9.0  # RandAugment, timm's increasing set; 0 = off
    c.augment.rand_std = 0.5  # of the magnitude, from operation to operation
    c.augment.rand_layers = 2  # operations an image
    c.augment.rand_prob = 0.5  # probability of each of them
    c.augment.color_jitter = 0.0  # timm switches it off when RandAugment is on
    c.augment.repeats = 1  # repeated augmentation: views of each image in a row of the order
    c.augment.erase = 0.0  # probability of random erasing
    c.augment.mixup = 0.8  # alpha of Beta(alpha, alpha); 0 = off
    c.augment.cutmix = 1.0  # alpha, as of mixup; 0 = off
    c.augment.mix_prob = 1.0  # probability that a batch is mixed at all
    c.augment.switch_prob = 0.5  # probability of cutmix when both are on
    c.augment.label_smoothing = 0.1  # share of a label that is spread over all classes

    c.loss = "softmax"  # or "sigmoid": independent classes, summed
    c.optim.update(warmup_epochs=20.0, clip_norm=1.0)
    c.checkpoint.every = 2500
    return c.lock()


def model(name: str, **arguments: Any) -> ConfigDict:
    """Return a model section: keys that every family of image models has, then its own arguments."""
    m = section(name)
    m.image_size = FieldReference(224, field_type=object)  # side in pixels, or (height, width)
    m.channels = 3  # of the image: 3, or 1 for grey
    m.num_classes = 1000  # outputs
    m.drop_path = 0.1
    m.landmarks = placeholder(int)  # of attention="nystrom", which every family takes instead of its own; 64 if unset
    m.update(arguments)
    return m


FAMILIES = {  # keys of `model` that some families have besides
    "stem_width": "VOLO: channels of the stem's convolutions",
    "stem_stride": "VOLO: of the stem's first convolution",
    "token_head": "VOLO: whether the token-labelling head adds to the logits; it learns image labels through them",
    "class_depth": "VOLO, XCiT: blocks of class attention",
    "class_heads": "VOLO, XCiT: their heads",
    "class_head_dim": "VOLO, XCiT: width of these",
    "class_mlp_dim": "VOLO, XCiT: hidden width of their MLP; that of the blocks before if unset",
    "tokens_norm": "XCiT: whether the class blocks' second norm acts on the patches too",
    "inner_width": "TNT: of a pixel token",
    "inner_heads": "TNT: heads of the pixels' attention",
    "inner_head_dim": "TNT: width of these",
    "inner_mlp_dim": "TNT: hidden width of the pixels' MLP",
    "pixel_stride": "TNT: of the convolution that makes pixel tokens",
    "layout": 'TNT: "original" or "patchwise", see leanformer/models/tnt.py',
    "channel_head_dim": "DaViT: head width of the attention between channels; head_dim if unset",
    "window_size": "DaViT: side of a window, in tokens",
    "qkv_bias": "DaViT: whether queries, keys and values have biases",
}


def check(c: Any) -> None:
    """Raises ConfigError on the first rule for images that `c` breaks."""
    check_classes(c)
    found = c.model.channels
    require(found in (1, 3), f"model.channels={found}: images are grey (1) or RGB (3).")
    for name in ("mean", "std"):
        _check_numbers(f"data.{name}", c.data[name])
        found = c.data[name]
        require(
            len(found) == c.model.channels,
            f"data.{name}={tuple(found)} has {len(found)} numbers, model.channels={c.model.channels}; "
            "give one a channel.",
        )
    require(min(c.data.std) > 0, f"data.std={tuple(c.data.std)} must be positive.")
    share, largest = c.data.crop_fraction, max(sides(c.model.image_size))
    require(0 < share <= 1, f"data.crop_fraction={share} must be in (0, 1].")
    require(
        largest / share <= SIDE,
        f"data.crop_fraction={share} cuts {largest} pixels out of {largest / share:.2g}, {SIDE:,} at most.",
    )
    a = c.augment
    for name in ("crop_scale", "crop_ratio"):
        _check_numbers(f"augment.{name}", a[name])
        require(len(a[name]) == 2, f"augment.{name}={tuple(a[name])} must be two numbers, (low, high).")
        low, high = a[name]
        require(0 < low <= high, f"augment.{name}={tuple(a[name])} must be (low, high) with 0 < low <= high.")
    require(a.crop_scale[1] <= 1, f"augment.crop_scale={tuple(a.crop_scale)} are shares of the area: at most 1.")
    require(0 <= a.rand_magnitude <= 10, f"augment.rand_magnitude={a.rand_magnitude} must be in 0..10.")
    for name in ("flip", "rand_prob", "erase", "mix_prob", "switch_prob"):
        require(0 <= a[name] <= 1, f"augment.{name}={a[name]} is a probability: 0 to 1.")
    for name in ("rand_std", "rand_layers", "mixup", "cutmix", "color_jitter"):
        require(a[name] >= 0, f"augment.{name}={a[name]} must not be negative; 0 switches it off.")
    require(a.repeats >= 1, f"augment.repeats={a.repeats} must be at least 1; 1 switches it off.")


def _check_numbers(name: str, found: Any) -> None:
    ok = all(isinstance(x, int | float) and not isinstance(x, bool) for x in found)
    require(ok, f"{name}={tuple(found)} must be numbers.")
