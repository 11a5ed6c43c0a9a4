"""The base config, documented key by key, and `check`, which refuses what cannot work before any device is touched.

A file in `configs/` is a difference against `base()`, or for token sequences against `sequences()`. On the command line
every key can be set: `--config.model.num_heads=16`. Library code never sees this tree whole; it gets plain keyword
arguments.
"""

from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import FieldReference, placeholder

from leanformer.config.loading import beside, load
from leanformer.config.rules import WHOLE_NUMBER, check
from leanformer.errors import ConfigError


__all__ = [
    "FAMILIES",
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "KINDS",
    "arguments",
    "base",
    "beside",
    "check",
    "landmarks",
    "load",
    "model",
    "sequences",
    "total_steps",
]

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def base() -> ConfigDict:
    """Every key with its meaning. Defaults: the recipe of Leaner Transformers (Table 6) on ImageNet-1k."""
    c = ConfigDict()
    c.task = "images"  # what is asked of the model: one of leanformer/tasks
    c.seed = 0  # fixes initial weights, data order, augmentation, mixup and drop path
    c.batch_size = 1024  # global: over all devices, processes and accumulation steps
    c.accumulate = 1  # micro-batches per step; changes memory, not the result
    c.total_epochs = 300.0  # exactly one of total_epochs and total_steps is above 0
    c.total_steps = 0  # of the optimizer
    c.dtype = "bfloat16"  # of activations; parameters, softmax, norms and loss are float32 always. Or "float32"
    c.log_every = 50  # steps between train records
    # Where records go besides metrics.jsonl: "tensorboard", "wandb"; see leanformer/training/loggers.py. () = nowhere
    c.loggers = ("tensorboard",)
    c.hang_seconds = 600.0  # without progress for so long, a run prints all stacks and ends; 0 = wait for ever
    c.deterministic = False  # the same bits on the same GPUs; see leanformer/runtime/determinism.py for what it costs

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
        distilled=False,  # DeiT's second token and head
        layer_scale=placeholder(float),  # start of the vectors that scale each branch; none if unset
    )

    c.data = ConfigDict()
    c.data.name = "tfds:imagenet2012"  # or folder:<path>, cache:<path>, idx:<path>, bundled:fashion_mnist, synthetic
    c.data.train_split = "train"  # a folder or file stem for folder: and idx:, a TFDS split for tfds:
    c.data.eval_split = "validation"  # the same, to evaluate on
    c.data.dir = placeholder(str)  # where TFDS data are; else $TFDS_DATA_DIR, else ~/tensorflow_datasets
    c.data.mean = (0.5, 0.5, 0.5)  # of the normalisation, on a 0..1 scale
    c.data.std = (0.5, 0.5, 0.5)  # of the normalisation, on the same scale
    c.data.crop_fraction = 0.9  # evaluation: resized to image_size / crop_fraction, shape kept, then centre crop
    c.data.workers = 8  # processes per host that read and augment; 0 = a thread of this process
    c.data.prefetch = 2  # batches that each worker keeps ready
    c.data.max_corrupt = 0.001  # share of the examples that may be unreadable before training stops

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

    c.teacher = ConfigDict()  # what the distilled head of DeiT, or the token head of VOLO, learns from besides labels
    c.teacher.path = placeholder(str)  # folder of its answers, see leanformer/data/teacher.py; unset: plain labels
    c.teacher.kind = "hard"  # of logits: the teacher's best class is learned; or "soft": its probabilities
    c.teacher.temperature = 3.0  # of "soft"
    c.teacher.weight = 0.5  # of logits: labels weigh 1 - weight; of label maps: labels weigh 1. DeiT's "soft": 0.1

    c.optim = ConfigDict()
    c.optim.name = "adamw"  # or "lion", "muon", "adafactor", "sgd", see training/optimizers.py; decay as in AdamW
    c.optim.lr = 3e-3  # peak, for the global batch as it is; never scaled behind your back
    c.optim.schedule = "cosine"  # from the peak down to final_lr; or "linear"; "wsd", linear at the end; "constant"
    c.optim.decay_share = 0.2  # of all steps, of the fall of "wsd"
    c.optim.warmup_epochs = 20.0  # linear, up to the peak
    c.optim.warmup_steps = 0  # instead of warmup_epochs, if above 0
    c.optim.warmup_lr = 1e-5  # rate at step 0
    c.optim.final_lr = 0.0  # rate at the last step
    c.optim.weight_decay = 0.3  # decoupled, times the learning rate; not on biases, norms, tokens, positions
    c.optim.layer_decay = 1.0  # each layer's share of the rate of the layer above it; the head has all of it
    c.optim.head_lr = placeholder(float)  # peak for the classifier; lr if unset
    c.optim.freeze = ()  # patterns of parameters and modules that stay as they are: ("*", "!head") trains the head
    c.optim.b1 = 0.9  # of the first moment, or of the momentum
    c.optim.b1_peak = placeholder(float)  # of one-cycle schedules: b1 falls to it as the rate rises, and comes back
    c.optim.b2 = 0.999  # decay of the mean of their squares
    c.optim.eps = 1e-8  # added to the root of that mean, by which steps are divided
    c.optim.clip_norm = 1.0  # global gradient norm; 0 = off
    c.optim.ema = 0.0  # decay of the averaged weights, e.g. 0.9999; 0 = off
    c.optim.max_skipped = 10  # non-finite steps in a row before training stops

    c.eval = ConfigDict()
    c.eval.every = 5000  # steps; 0 = only at the end
    c.eval.batch_size = 1024  # global
    c.eval.examples = 0  # so many of the split while training, evenly spaced over it; 0 = all. `evaluate` takes all
    c.eval.patience = 0  # evaluations without a better one after which training ends; 0 = off
    c.eval.more = ConfigDict()  # of other splits, in config files that unlock: NAME = {"split": "...", "every": steps}

    c.checkpoint = ConfigDict()
    c.checkpoint.every = 2500  # steps; 0 = only at the end
    c.checkpoint.keep = 2  # the latest; the best by evaluation is kept besides

    c.probe = ConfigDict()  # conditioning of every layer, on the first images of the evaluation split
    c.probe.every = 5000  # steps, and at step 0 and at the end; 0 = off
    c.probe.examples = 16  # images, or sequences
    # Names of measures; leanformer/conditioning/measures.py says what each is.
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


def sequences() -> ConfigDict:
    """`base()` for token sequences: the keys that only images have are not there, others are. Defaults: the recipe of
    the released Nyströmformer (Xiong et al. 2021) on the Long Range Arena, in which each task sets its own lengths."""
    c = base().unlock()
    for name in ("mean", "std", "crop_fraction"):
        del c.data[name]
    del c.teacher
    c.task = "sequences"
    c.augment = ConfigDict({"label_smoothing": 0.0})

    c.data.name = "listops:data/listops"  # or pathfinder:, imdb:, text:, pairs:, pixels:, see leanformer/data/sequences
    c.data.train_split, c.data.eval_split = "train", "test"
    c.data.max_length = 2000  # tokens that are kept of an example
    c.data.recipe = ConfigDict()  # what a set that is made here is made of: listops.Recipe, or pathfinder.write

    c.model = ConfigDict()  # keyword arguments of leanformer.models.<name>.Model, and the name
    c.model.name = "nystromformer"
    c.model.vocabulary = 32  # one more than the largest token
    c.model.max_length = 2048  # positions; shorter examples are padded to it
    c.model.num_classes = 10
    c.model.towers = 1  # 2 for pairs of sequences
    c.model.width = 64
    c.model.depth = 2
    c.model.num_heads = 2
    c.model.head_dim = 32
    c.model.value_dim = placeholder(int)  # head_dim if unset
    c.model.mlp_dim = 128
    c.model.attention = "nystrom"  # or "softmax", which takes none of the next five
    c.model.landmarks = placeholder(int)  # 64 if unset
    c.model.iterations = placeholder(int)  # of the pseudo-inverse; 6 if unset
    c.model.convolution = placeholder(int)  # taps along the values, beside attention; 35 if unset, 0 for none
    c.model.scale = placeholder(str)  # "matrix" if unset; "batch" in the original
    c.model.padding = placeholder(str)  # "masked" if unset; "zeros" in the original
    c.model.pool = "mean"  # over real tokens; "padded_mean" in the original; or "token"
    c.model.zero_is_padding = False  # True in the original, which so leaves out black pixels
    c.model.dropout = 0.1  # of embeddings, branches and the MLP's hidden layer
    c.model.drop_path = 0.0
    c.model.remat = "light"
    c.model.backend = "auto"

    c.batch_size, c.total_epochs, c.total_steps = 32, 0.0, 5000
    c.optim.update(schedule="linear", warmup_epochs=0.0, warmup_steps=1000, lr=1e-4, warmup_lr=4e-6, final_lr=4e-10)
    c.optim.update(b1=0.95, b1_peak=0.85, eps=1e-6, weight_decay=0.0, clip_norm=0.0)
    c.eval.update(every=500, batch_size=32)
    c.checkpoint.every = 500
    c.probe.measures = ("attention_output", "tokens", "attention_branch")
    return c.lock()


def landmarks(number: int) -> dict[str, Any]:
    """The keys of a model's Nyström attention of so many landmarks, without the convolution, as Leaner Transformers
    counts it; of exact attention for 0."""
    if not number:
        return {"attention": "softmax"}
    return {"attention": "nystrom", "landmarks": number, "convolution": 0}


def model(name: str, **arguments: Any) -> ConfigDict:
    """A model section: what every family of image models takes, then its own arguments."""
    m = ConfigDict()
    m.name = name  # of the family: a file of leanformer/models
    m.image_size = FieldReference(224, field_type=object)  # side in pixels, or (height, width)
    m.channels = 3  # of the image: 3, or 1 for grey
    m.num_classes = 1000  # outputs
    m.drop_path = 0.1  # rate in the last block; how it rises there is the family's
    # What the backward pass computes again: "none"; "light", norms, GELU and attention matrices, which is less memory
    # at little or no time; "block", everything, which is least memory at about a third more time.
    m.remat = "light"
    m.landmarks = placeholder(int)  # of attention="nystrom", which every family takes instead of its own; 64 if unset
    m.backend = "auto"  # attention: "xla", "cudnn", "naive", or "auto" (decided once at start and logged)
    m.update(arguments)
    return m


KINDS = {"images": base, "sequences": sequences}  # the defaults of each kind of task that is known here

FAMILIES = {  # keys of `model` that some families have besides
    "stem_width": "VOLO: channels of the stem's convolutions",
    "stem_stride": "VOLO: of the stem's first convolution",
    "token_head": "VOLO: whether there is the token-labelling head",
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


def total_steps(c: ConfigDict, examples: int | None) -> int:
    """Optimizer steps of the whole run over a training split of `examples`, None of one without an end.

    Raises:
        ConfigError: the run is measured in epochs, and there are none; or they are more than an int32 counts.
    """
    if examples is None and not c.total_steps:
        raise ConfigError(
            f"total_epochs={c.total_epochs}, and the training data have no end. Set --config.total_epochs=0 and "
            "--config.total_steps."
        )
    steps = c.total_steps or max(1, round(c.total_epochs * examples / c.batch_size))
    if steps > WHOLE_NUMBER:
        raise ConfigError(f"total_epochs={c.total_epochs} of {examples:,} examples are {steps:.2g} steps: too many.")
    return steps


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
