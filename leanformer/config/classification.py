"""Configs of image classification and of token-sequence classification."""

from typing import Any

from leanformer.config import common, declare
from leanformer.config.declare import ConfigDict, Literal, dataclass, field
from leanformer.config.rules import check_classes, check_length, require


IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
Pair = tuple[float, float]
IMAGE_TYPES = ("pixels", "pathfinder")  # data types that are images: sequences of equal length, never truncated


@dataclass(frozen=True)
class ImagesData(common.Data):
    # training data: tfds:<name>, folder:<path>, idx:<path>, bundled:fashion_mnist or synthetic
    name: str = "tfds:imagenet2012"
    train_split: str = "train"  # training split: a folder or file stem for folder: and idx:, a TFDS split for tfds:
    # evaluation split: a folder or file stem for folder: and idx:, a TFDS split for tfds:
    eval_split: str = "validation"
    dir: str | None = None  # folder of TFDS data; $TFDS_DATA_DIR, or else ~/tensorflow_datasets, if unset
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)  # mean of each channel for normalisation, on a scale of 0 to 1
    std: tuple[float, ...] = (0.5, 0.5, 0.5)  # standard deviation of each channel for normalisation, likewise
    # evaluation: images are resized to image_size / crop_fraction with their aspect ratio, then centre-cropped
    crop_fraction: float = 0.9


@dataclass(frozen=True)
class ImagesAugment:
    crop_scale: Pair = (0.08, 1.0)  # (low, high) area of a random resized crop, as a fraction of the image
    # (low, high) aspect ratio (width / height) of a random resized crop, before it is resized
    crop_ratio: Pair = (3 / 4, 4 / 3)
    flip: float = 0.5  # probability of a horizontal flip
    rand_magnitude: float = 9.0  # magnitude of RandAugment, with timm's increasing set of operations; 0 = off
    rand_std: float = 0.5  # standard deviation of RandAugment's magnitude between operations
    rand_layers: int = 2  # number of RandAugment operations per image
    rand_prob: float = 0.5  # probability of applying each RandAugment operation
    color_jitter: float = 0.0  # strength of colour jitter; 0 = off, as in timm when RandAugment is on
    repeats: int = 1  # repeated augmentation: consecutive views of each image; 1 = off
    erase: float = 0.0  # probability of random erasing
    mixup: float = 0.8  # alpha of mixup's Beta(alpha, alpha); 0 = off
    cutmix: float = 1.0  # alpha of CutMix's Beta(alpha, alpha); 0 = off
    mix_prob: float = 1.0  # probability that mixup or CutMix is applied to a batch
    switch_prob: float = 0.5  # probability of CutMix instead of mixup, if both are on
    label_smoothing: float = 0.1  # label smoothing: fraction of the label mass spread over all classes


@dataclass(frozen=True)
class Images(common.Common):
    task: str = "images"
    loss: Literal["softmax", "sigmoid"] = "softmax"  # cross-entropy, or independent classes, whose losses are summed
    data: ImagesData = ImagesData()
    augment: ImagesAugment = ImagesAugment()
    optim: common.Optim = common.Optim(warmup_epochs=20.0, clip_norm=1.0)
    checkpoint: common.Checkpoint = common.Checkpoint(every=2500)


def base() -> ConfigDict:
    """Return the locked config of image classification.

    The defaults are the recipe of Leaner Transformers (Table 6) on ImageNet-1k.

    >>> c = base()
    >>> c.model.name, c.data.name
    ('vit', 'tfds:imagenet2012')
    """
    c = declare.section(Images())
    c.model = model("vit")
    return c.lock()


def model(name: str, **values: Any) -> ConfigDict:
    """Return the section `model` of a config of images, by default with drop_path=0.1; see `model_section`."""
    return common.model_section(name, **{"drop_path": 0.1} | values)


def check_images(c: Any) -> None:
    check_classes(c)
    for name in ("mean", "std"):
        require(
            len(c.data[name]) == c.model.channels,
            f"data.{name}={tuple(c.data[name])}: model.channels={c.model.channels}. Set one number per channel.",
        )
    a = c.augment
    for name, most in (("crop_scale", 1.0), ("crop_ratio", float("inf"))):
        low, high = a[name]
        require(0 < low <= high <= most, f"augment.{name}={(low, high)} must be 0 < low <= high <= {most}.")
    require(a.rand_magnitude <= 10, f"augment.rand_magnitude={a.rand_magnitude} must be in 0..10.")


@dataclass(frozen=True)
class SequencesAugment:
    label_smoothing: float = 0.0  # label smoothing: fraction of the label mass spread over all classes


@dataclass(frozen=True)
class SequencesData(common.Data):
    # training data: listops:, pathfinder:, imdb:, text:, pairs: or pixels: and a folder, see leanformer/data/sequences
    name: str = "listops:data/listops"
    train_split: str = "train"  # training split, a name that the type of data.name has
    eval_split: str = "test"  # evaluation split, such as "test", "val" or "eval"
    dir: str | None = None  # folder of TFDS data; $TFDS_DATA_DIR, or else ~/tensorflow_datasets, if unset
    max_length: int = 2000  # tokens kept per example; the rest is cut off
    # parameters: fields of listops.Recipe for generated expressions; contour and seed of pixels.Pathfinder
    recipe: ConfigDict = field(default_factory=ConfigDict)


@dataclass(frozen=True)
class Sequences(common.Common):
    task: str = "sequences"
    batch_size: int = 32
    total_epochs: float = 0.0
    total_steps: int = 5000
    loss: Literal["softmax", "sigmoid"] = "softmax"  # cross-entropy, or independent classes, whose losses are summed
    data: SequencesData = SequencesData()
    augment: SequencesAugment = SequencesAugment()
    optim: common.Optim = common.Optim(
        schedule="linear",
        warmup_steps=1000,
        lr=1e-4,
        warmup_lr=4e-6,
        final_lr=4e-10,
        b1=0.95,
        b1_peak=0.85,
        eps=1e-6,
        weight_decay=0.0,
    )
    eval: common.Eval = common.Eval(every=500, batch_size=32)
    probe: common.Probe = common.Probe(measures=("attention_output", "tokens", "attention_branch"))


def sequences() -> ConfigDict:
    """Return the locked config of token-sequence classification.

    The defaults are the recipe of the released Nyströmformer (Xiong et al. 2021) on the Long Range Arena, in which each
    task sets its own lengths.

    >>> sequences().task
    'sequences'
    """
    c = declare.section(Sequences())
    c.model = common.model_section("nystromformer", dropout=0.1)
    return c.lock()


def landmarks(number: int) -> dict[str, Any]:
    """Return the keys of config.model for Nyström attention with a number of landmarks; for exact attention if 0.

    Attention has no convolution, as in the parameter counts of Leaner Transformers.
    """
    if not number:
        return {"attention": "softmax"}
    return {"attention": "nystrom", "landmarks": number, "convolution": 0}


def check_sequences(c: Any) -> None:
    check_classes(c)
    check_length(c)
    require(
        c.data.name.partition(":")[0] not in IMAGE_TYPES or c.data.max_length == c.model.max_length,
        f'data.name="{c.data.name}" yields whole images. Set data.max_length={c.data.max_length} and '
        f"model.max_length={c.model.max_length} both to their number of pixels.",
    )
