"""The base config, documented key by key: images, by the recipe of Leaner Transformers; and the rules for images."""

from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import FieldReference, placeholder

from leanformer.config.levers import levers
from leanformer.config.rules import SIDE, check_classes, require, sides


IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def base() -> ConfigDict:
    """Every key with its meaning. Defaults: the recipe of Leaner Transformers (Table 6) on ImageNet-1k."""
    c = ConfigDict()
    c.task = "images"  # what is asked of the model: one of leanformer/tasks
    c.seed = 0  # fixes initial weights, data order, augmentation, mixup and drop path
    c.batch_size = 1024  # global: over all devices, processes and accumulation steps
    c.accumulate = 1  # micro-batches per step; changes memory, not the result, but batch norm (XCiT, VOLO) is over one
    c.total_epochs = 300.0  # exactly one of the total_... is above 0
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
        distilled=False,  # DeiT's second token and head; the mean of both heads learns the labels, without a teacher
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

    c.optim = ConfigDict()
    c.optim.name = "adamw"  # or "lion", "muon", "adafactor", "sgd", see training/optimizers.py; decay as in AdamW
    c.optim.lr = 3e-3  # peak, for the global batch as it is; never scaled behind your back
    c.optim.schedule = "cosine"  # from the peak down to final_lr; or "linear"; "wsd", linear at the end; "constant"
    c.optim.decay_share = 0.2  # of the whole run, of the fall of "wsd"
    c.optim.warmup_epochs = 20.0  # linear, up to the peak
    c.optim.warmup_steps = 0  # instead of warmup_epochs, if above 0
    c.optim.warmup_share = 0.0  # of the whole run, instead of either
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
    c.optim.max_skipped = 10  # steps in a row, not finite or past learning, that are skipped before training stops

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
    c.init_from.path = placeholder(str)  # a safetensors file, an index of several, a folder with either, or a run's
    c.init_from.layout = "own"  # or "timm", "huggingface": whose names the file has
    c.init_from.new_head = False  # whether a classifier of another size may start anew
    c.init_from.resize_positions = False  # whether learned positions may be resized to another grid

    c.mesh = ConfigDict()
    c.mesh.data = -1  # devices that share out the batch and hold all parameters; -1 = all that are left
    c.mesh.fsdp = 1  # devices that share out the batch and split parameters and optimizer state
    c.mesh.tensor = 1  # devices that work on the same examples and split heads, the MLP's hidden width and logits

    return c.lock()


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
    m.unroll = placeholder(int)  # layers in one turn of the loop over them: more run faster, compile longer; 1 if unset
    m.landmarks = placeholder(int)  # of attention="nystrom", which every family takes instead of its own; 64 if unset
    m.backend = "auto"  # attention: "xla", "cudnn", "naive", or "auto" (decided once at start and logged)
    softmax(m)
    m.update(arguments)
    return m


def softmax(m: ConfigDict) -> None:
    """Gives a model section the keys that attention="softmax" takes in every family; unset they do nothing."""
    m.num_kv_heads = placeholder(int)  # heads of keys and values, each shared by several of queries; num_heads if unset
    m.logit_scale = placeholder(float)  # what q·k is multiplied by; 1/√head_dim if unset
    m.temperature = placeholder(bool)  # True: each head learns a factor of its logits besides
    m.kv_rank = placeholder(int)  # of attention="latent": channels of what keys and values are made from
    m.query_rank = placeholder(int)  # of attention="latent": the same of queries, which are made from tokens if unset
    m.latent_norm = placeholder(str)  # of attention="latent": norm of both; none if unset
    m.soft_cap = placeholder(float)  # c of logits that become c·tanh(logit / c); no cap if unset
    m.attention_dropout = placeholder(float)  # share of attention weights that training drops; without cuDNN's kernel
    m.qk_norm = placeholder(str)  # norm of each head's queries and keys: "rmsnorm", "layernorm", "unit"; none if unset
    m.rotary = placeholder(float)  # base of rotary positions, 10000.0 say; without them if unset
    m.rotary_width = placeholder(int)  # channels of a head that rotary positions turn; all if unset
    m.out_bias = placeholder(bool)  # False: the projection of attention's output has no bias
    levers(m)


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
