"""Configs of tasks on arrays: images, token sequences, and sets of points."""

from typing import Any

from leanformer.config import architectures, common, declare
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
    return architectures.model_section(name, **{"drop_path": 0.1} | values)


def check_images(c: Any) -> None:
    check_classes(c)
    for name in ("mean", "std"):
        require(
            len(c.data[name]) == c.model.channels,
            f"data.{name}={tuple(c.data[name])}: model.channels={c.model.channels}. Set one number per channel.",
        )
        require(
            all(0 <= x <= 1 and (x > 0 or name == "mean") for x in c.data[name]),
            f"data.{name}={tuple(c.data[name])} must be in 0..1, as pixels are (std above 0). Divide it by 255.",
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
    c.model = architectures.model_section("nystromformer", dropout=0.1)
    return c.lock()


def check_sequences(c: Any) -> None:
    check_classes(c)
    check_length(c)
    require(
        c.data.name.partition(":")[0] not in IMAGE_TYPES or c.data.max_length == c.model.max_length,
        f'data.name="{c.data.name}" yields whole images. Set data.max_length={c.data.max_length} and '
        f"model.max_length={c.model.max_length} both to their number of pixels.",
    )


@dataclass(frozen=True)
class Curriculum:
    every: int = 0  # steps between increases of the problem size; 0 = full size from the start
    dim: int = 5  # initial number of nonzero coordinates of x in "regression"
    dim_step: int = 1  # nonzero coordinates added per increase, up to data.dim
    points: int = 11  # initial number of points of a set; of queried pairs in "regression"
    points_step: int = 2  # points added per increase, up to data.points


@dataclass(frozen=True)
class PointsData(common.Data):
    # point-set task: "nearest", "nearest_query", "nearest_orthonormal", "nearest_biased", "regression" or "retrieval",
    # see leanformer/data/points.py
    name: str = "nearest"
    train_split: str = "train"  # training split: "train", endless examples
    eval_split: str = "held_out"  # evaluation split: any other name, a fixed set of data.examples
    points: int = 16  # number of points of a set; number of (x, y) pairs of "regression"
    dim: int = 64  # dimension of a point
    num_items: int = 4  # number of items of "retrieval"
    bias: float = 0.0  # distance by which the first point is nearer in "nearest_biased"
    examples: int = 2560  # number of evaluation examples; training data are infinite
    workers: int = 0
    # curriculum of "regression" and "retrieval": training starts with small problems, which grow
    curriculum: Curriculum = Curriculum()


@dataclass(frozen=True)
class Points(common.Common):
    task: str = "points"
    dtype: common.Dtype = "float32"
    batch_size: int = 256
    total_epochs: float = 0.0
    total_steps: int = 100_000
    data: PointsData = PointsData()
    optim: common.Optim = common.Optim(lr=0.01, warmup_steps=5000, warmup_lr=0.0, weight_decay=0.0, b2=0.95)
    eval: common.Eval = common.Eval(every=5000, batch_size=256)
    checkpoint: common.Checkpoint = common.Checkpoint(every=5000)
    probe: common.Probe = common.Probe(every=0, measures=("attention_output", "attention_entropy", "largest_logit"))


def points() -> ConfigDict:
    """Return the locked config of point-set tasks.

    The defaults are the nearest-neighbour runs of Amsel et al. 2025, Figure 1: one layer, one head of full rank.

    >>> points().task
    'points'
    """
    c = declare.section(Points())
    c.model = architectures.model_section("encoder", mlp_dim=2048)
    return c.lock()


def heads_of_rank(width: int, rank: int) -> dict[str, int]:
    """Return the keys of config.model for width / rank heads of dimension `rank`.

    >>> heads_of_rank(width=64, rank=16)
    {'num_heads': 4, 'head_dim': 16}
    """
    require(rank >= 1 and width % rank == 0, f"rank={rank}: not a divisor of width={width}.")
    return {"num_heads": width // rank, "head_dim": rank}


def check_points(c: Any) -> None:
    require(
        c.data.train_split == "train" != c.data.eval_split,
        f'data.train_split="{c.data.train_split}" must be "train", and data.eval_split="{c.data.eval_split}" another.',
    )
    name, read = ("width", c.model.width) if c.model.inputs is None else ("inputs", c.model.inputs)
    require(
        read == c.data.dim,
        f"model.{name}={read}: the model's input dimension differs from data.dim={c.data.dim}. Set them equal, or "
        "set model.inputs to read points by a linear layer.",
    )
