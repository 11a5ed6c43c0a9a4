"""The base config, documented key by key, and `check`, which refuses what cannot work before any device is touched.

A file in `configs/` is a difference against `base()`. On the command line every key can be set:
`--config.model.num_heads=16`. Library code never sees this tree whole; it gets plain keyword arguments.
"""

import math
import runpy
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from leanformer.errors import ConfigError
from leanformer.rules import check_mesh
from leanformer.rules import nearest_divisors as _nearest_divisors
from leanformer.rules import require as _require


IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def base() -> ConfigDict:
    """Every key with its meaning. Defaults: the recipe of Leaner Transformers (Table 6) on ImageNet-1k."""
    c = ConfigDict()
    c.seed = 0  # fixes initial weights, data order, augmentation, mixup and drop path
    c.batch_size = 1024  # global: over all devices, processes and accumulation steps
    c.accumulate = 1  # micro-batches per step; changes memory, not the result
    c.total_epochs = 300.0  # exactly one of total_epochs and total_steps is above 0
    c.total_steps = 0
    c.dtype = "bfloat16"  # of activations; parameters, softmax, norms and loss are float32 always. Or "float32"
    c.log_every = 50  # steps between train records
    c.hang_seconds = 600.0  # without progress for so long, a run prints all stacks and ends; 0 = wait for ever
    c.deterministic = False  # the same bits on the same GPUs; see leanformer/determinism.py for what it costs

    c.model = model(  # keyword arguments of leanformer.models.<name>.Model, and the name
        "vit",
        patch_size=16,
        width=768,
        depth=12,
        num_heads=12,
        head_dim=64,  # of queries and keys; set apart from width, so heads can be traded against rank
        value_dim=placeholder(int),  # of values, per head; head_dim if unset
        mlp_dim=3072,
        attention="softmax",  # or "nystrom", with landmarks, iterations, convolution, scale, padding (nystrom.py)
        landmarks=placeholder(int),
        pool="token",  # or "mean": no class token
        distilled=False,  # DeiT's second token and head
        layer_scale=placeholder(float),  # start of the vectors that scale each branch; none if unset
    )

    c.data = ConfigDict()
    c.data.name = "tfds:imagenet2012"  # tfds:<name>, folder:<path>, idx:<path>, bundled:fashion_mnist, synthetic
    c.data.train_split = "train"  # a folder or file stem for folder: and idx:, a TFDS split for tfds:
    c.data.eval_split = "validation"
    c.data.dir = placeholder(str)  # where TFDS data are; else $TFDS_DATA_DIR, else ~/tensorflow_datasets
    c.data.mean = (0.5, 0.5, 0.5)  # of the normalisation, on a 0..1 scale
    c.data.std = (0.5, 0.5, 0.5)
    c.data.crop_fraction = 0.9  # evaluation: short side to image_size / crop_fraction, then centre crop
    c.data.workers = 8  # processes per host that read and augment; 0 = a thread of this process
    c.data.prefetch = 2  # batches that each worker keeps ready
    c.data.max_corrupt = 0.001  # share of the examples that may be unreadable before training stops

    c.augment = ConfigDict()
    c.augment.crop_scale = (0.08, 1.0)  # share of the area in a random resized crop
    c.augment.crop_ratio = (3 / 4, 4 / 3)
    c.augment.flip = 0.5
    c.augment.rand_magnitude = 9.0  # RandAugment, timm's increasing set; 0 = off
    c.augment.rand_std = 0.5
    c.augment.rand_layers = 2
    c.augment.rand_prob = 0.5
    c.augment.color_jitter = 0.0  # timm switches it off when RandAugment is on
    c.augment.repeats = 1  # repeated augmentation: views of each image in a row of the order
    c.augment.erase = 0.0  # probability of random erasing
    c.augment.mixup = 0.8  # alpha of Beta(alpha, alpha); 0 = off
    c.augment.cutmix = 1.0
    c.augment.mix_prob = 1.0  # probability that a batch is mixed at all
    c.augment.switch_prob = 0.5  # probability of cutmix when both are on
    c.augment.label_smoothing = 0.1

    c.loss = "softmax"  # or "sigmoid": independent classes, summed

    c.teacher = ConfigDict()  # what the distilled head of DeiT, or the token head of VOLO, learns from besides labels
    c.teacher.path = placeholder(str)  # folder of its answers, see leanformer/data/teacher.py; unset: plain labels
    c.teacher.kind = "hard"  # of logits: the teacher's best class is learned; or "soft": its probabilities
    c.teacher.temperature = 3.0  # of "soft"
    c.teacher.weight = 0.5  # of logits: labels weigh 1 - weight; of label maps: labels weigh 1. DeiT's "soft": 0.1

    c.optim = ConfigDict()  # AdamW, linear warm-up, cosine to final_lr
    c.optim.lr = 3e-3  # peak, for the global batch as it is; never scaled behind your back
    c.optim.warmup_epochs = 20.0
    c.optim.warmup_lr = 1e-5  # at step 0
    c.optim.final_lr = 0.0
    c.optim.weight_decay = 0.3  # decoupled, times the learning rate; not on biases, norms, tokens, positions
    c.optim.b1 = 0.9
    c.optim.b2 = 0.999
    c.optim.eps = 1e-8
    c.optim.clip_norm = 1.0  # global gradient norm; 0 = off
    c.optim.ema = 0.0  # decay of the averaged weights, e.g. 0.9999; 0 = off
    c.optim.max_skipped = 10  # non-finite steps in a row before training stops

    c.eval = ConfigDict()
    c.eval.every = 5000  # steps; 0 = only at the end
    c.eval.batch_size = 1024

    c.checkpoint = ConfigDict()
    c.checkpoint.every = 2500  # steps; 0 = only at the end
    c.checkpoint.keep = 2  # the latest; the best by evaluation is kept besides

    c.probe = ConfigDict()  # conditioning of every layer, on the first images of the evaluation split
    c.probe.every = 5000  # steps, and at step 0 and at the end; 0 = off
    c.probe.examples = 16
    c.probe.measures = ("attention_output", "tokens", "attention_branch", "attention_entropy", "largest_logit")

    c.init_from = ConfigDict()  # weights to start from, at step 0 only
    c.init_from.path = placeholder(str)  # a safetensors file
    c.init_from.layout = "own"  # or "timm", "huggingface": whose names the file has
    c.init_from.new_head = False  # whether a classifier of another size may start anew
    c.init_from.resize_positions = False  # whether learned positions may be resized to another grid

    c.mesh = ConfigDict()
    c.mesh.data = -1  # devices that share out the batch and hold all parameters; -1 = all that are left
    c.mesh.fsdp = 1  # devices that share out the batch and split parameters and optimizer state
    c.mesh.tensor = 1  # devices that work on the same examples and split heads and the MLP's hidden width

    return c.lock()


def model(name: str, **arguments: Any) -> ConfigDict:
    """A model section: what every family of image models takes, then its own arguments."""
    m = ConfigDict()
    m.name = name
    m.image_size = 224
    m.channels = 3
    m.num_classes = 1000
    m.drop_path = 0.1  # rate in the last block; how it rises there is the family's
    # What the backward pass computes again: "none"; "light", norms, GELU and attention matrices, which is less memory
    # at little or no time; "block", everything, which is least memory at about a third more time.
    m.remat = "light"
    m.backend = "auto"  # attention: "xla", "cudnn", "naive", or "auto" (decided once at start and logged)
    m.update(arguments)
    return m


def check(c: ConfigDict) -> None:
    """Raises ConfigError on the first rule that `c` breaks: what was asked, what was found, what to do."""
    _check_sizes(c)
    _check_model(c.model)
    _check_images(c)
    _check_objective(c)
    check_mesh(c)


def _check_sizes(c: ConfigDict) -> None:
    positive = {"batch_size": c.batch_size, "accumulate": c.accumulate, "log_every": c.log_every}
    positive |= {"eval.batch_size": c.eval.batch_size, "checkpoint.keep": c.checkpoint.keep}
    positive |= {"probe.examples": c.probe.examples}
    positive |= {"data.prefetch": c.data.prefetch, "optim.max_skipped": c.optim.max_skipped}
    for name, value in positive.items():
        _require(value >= 1, f"{name}={value} must be at least 1.")
    non_negative = {"eval.every": c.eval.every, "checkpoint.every": c.checkpoint.every}
    non_negative |= {"probe.every": c.probe.every, "hang_seconds": c.hang_seconds}
    non_negative |= {"data.workers": c.data.workers, "optim.clip_norm": c.optim.clip_norm}
    non_negative |= {"optim.weight_decay": c.optim.weight_decay, "optim.lr": c.optim.lr}
    for name, value in non_negative.items():
        _require(value >= 0, f"{name}={value} must not be negative.")
    _require(
        min(c.total_steps, c.total_epochs) == 0 and max(c.total_steps, c.total_epochs) > 0,
        f"Set exactly one of total_steps={c.total_steps} and total_epochs={c.total_epochs}, and 0 for the other.",
    )
    if c.total_epochs:
        _require(
            c.optim.warmup_epochs < c.total_epochs,
            f"optim.warmup_epochs={c.optim.warmup_epochs} must be under total_epochs={c.total_epochs}.",
        )
    _require(
        c.batch_size % c.accumulate == 0,
        f"batch_size={c.batch_size} cannot be split into accumulate={c.accumulate} equal micro-batches; "
        f"nearest that can: {_nearest_divisors(c.batch_size, c.accumulate)}.",
    )
    _require(c.dtype in ("bfloat16", "float32"), f'dtype="{c.dtype}": choose "bfloat16" or "float32".')
    _require(0 <= c.optim.ema < 1, f"optim.ema={c.optim.ema} must be in [0, 1); 0 switches it off.")


def _check_model(m: ConfigDict) -> None:
    sizes = ("width", "depth", "num_heads", "head_dim", "mlp_dim", "patch_size", "image_size", "num_classes")
    for name in filter(m.__contains__, sizes):
        least = min(m[name]) if isinstance(m[name], tuple) else m[name]  # of each stage
        _require(least >= 1, f"model.{name}={m[name]} must be at least 1.")
    _require(m.channels in (1, 3), f"model.channels={m.channels}: images are grey (1) or RGB (3).")
    _require(0 <= m.drop_path < 1, f"model.drop_path={m.drop_path} must be in [0, 1).")
    if "patch_size" in m:
        _require(
            m.image_size % m.patch_size == 0,
            f"model.image_size={m.image_size} is not a whole number of patches of model.patch_size={m.patch_size}; "
            f"nearest patch sizes that fit: {_nearest_divisors(m.image_size, m.patch_size)}.",
        )
    _require(m.remat in ("none", "light", "block"), f'model.remat="{m.remat}": choose none, light or block.')
    _require(
        m.backend in ("auto", "xla", "cudnn", "naive"),
        f'model.backend="{m.backend}": choose auto, xla, cudnn or naive.',
    )
    if m.backend == "cudnn" and isinstance(m.get("head_dim"), int):
        _require(
            m.head_dim % 8 == 0 and m.head_dim <= 256,
            f'model.backend="cudnn" needs model.head_dim in multiples of 8 up to 256, found {m.head_dim}. '
            f'Take head_dim={max(8, min(256, 8 * math.ceil(m.head_dim / 8)))} or model.backend="xla".',
        )


def _check_images(c: ConfigDict) -> None:
    kind = c.data.name.split(":", 1)[0]
    _require(
        kind in ("tfds", "folder", "idx", "bundled", "synthetic"),
        f'data.name="{c.data.name}": choose tfds:<name>, folder:<path>, idx:<path>, '
        "bundled:fashion_mnist or synthetic.",
    )
    for name in ("mean", "std"):
        found = c.data[name]
        _require(
            len(found) == c.model.channels,
            f"data.{name}={tuple(found)} has {len(found)} numbers, model.channels={c.model.channels}; "
            "give one a channel.",
        )
    _require(min(c.data.std) > 0, f"data.std={tuple(c.data.std)} must be positive.")
    _require(0 < c.data.crop_fraction <= 1, f"data.crop_fraction={c.data.crop_fraction} must be in (0, 1].")
    _require(0 <= c.data.max_corrupt <= 1, f"data.max_corrupt={c.data.max_corrupt} is a share: 0 to 1.")
    a = c.augment
    for name in ("crop_scale", "crop_ratio"):
        low, high = a[name]
        _require(0 < low <= high, f"augment.{name}={tuple(a[name])} must be (low, high) with 0 < low <= high.")
    _require(a.crop_scale[1] <= 1, f"augment.crop_scale={tuple(a.crop_scale)} are shares of the area: at most 1.")
    _require(0 <= a.rand_magnitude <= 10, f"augment.rand_magnitude={a.rand_magnitude} must be in 0..10.")
    for name in ("flip", "rand_prob", "erase", "mix_prob", "switch_prob"):
        _require(0 <= a[name] <= 1, f"augment.{name}={a[name]} is a probability: 0 to 1.")
    for name in ("mixup", "cutmix", "color_jitter"):
        _require(a[name] >= 0, f"augment.{name}={a[name]} must not be negative; 0 switches it off.")
    _require(a.repeats >= 1, f"augment.repeats={a.repeats} must be at least 1; 1 switches it off.")


def _check_objective(c: ConfigDict) -> None:
    smoothing = c.augment.label_smoothing
    _require(0 <= smoothing < 1, f"augment.label_smoothing={smoothing} must be in [0, 1).")
    _require(c.loss in ("softmax", "sigmoid"), f'loss="{c.loss}": choose "softmax" or "sigmoid".')
    _require(
        c.loss == "softmax" or smoothing == 0,
        f'loss="sigmoid" scores every class by itself, so augment.label_smoothing={smoothing}, which spreads '
        'one unit over the classes, has no meaning for it. Set augment.label_smoothing=0 or loss="softmax".',
    )
    t = c.teacher
    _require(t.kind in ("hard", "soft"), f'teacher.kind="{t.kind}": choose "hard" or "soft".')
    _require(0 <= t.weight <= 1, f"teacher.weight={t.weight} must be in 0..1.")
    _require(t.temperature > 0, f"teacher.temperature={t.temperature} must be positive.")
    alike = t.path is None or c.loss == "softmax"
    _require(alike, f'teacher.path is set, and its losses are cross-entropies: loss="{c.loss}" must be "softmax".')


def total_steps(c: ConfigDict, examples: int) -> int:
    """Optimizer steps of the whole run over a training split of `examples`."""
    return c.total_steps or max(1, round(c.total_epochs * examples / c.batch_size))


def arguments(text: str, **defaults: int | float) -> dict[str, int | float]:
    """Parses a config file's argument, `--config=FILE:depth=8,heads=14`, with the defaults' names and types.

    Raises:
        ConfigError: a name that is not among the defaults, or a value of another type.
    """
    found = dict(defaults)
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if name not in defaults:
            raise ConfigError(f"The config takes {', '.join(defaults)} as arguments, found {name!r} in {text!r}.")
        kind = type(defaults[name])
        try:
            found[name] = kind(value)
        except ValueError as error:
            raise ConfigError(f"{name}={value!r} in {text!r} is not of the type {kind.__name__}.") from error
    return found


def beside(file: str, name: str) -> ConfigDict:
    """The config `<name>.py` in the folder of `file`, for a config that is a difference against another."""
    return runpy.run_path(str(Path(file).with_name(f"{name}.py")))["get_config"]()
