"""Config keys of all tasks, and of the blocks of all models. A comment beside a key is its help text."""

import functools
from collections.abc import Mapping
from typing import Any

from leanformer.config import declare
from leanformer.config.declare import ConfigDict, Literal, Size, dataclass, field
from leanformer.errors import ConfigError


MODELS, LAYERS = declare.PACKAGE / "models", declare.PACKAGE / "layers"
PER_LAYER = ("num_heads", "head_dim", "value_dim", "mlp_dim", "num_kv_heads")  # keys of the section model
Dtype = Literal["bfloat16", "float32"]


@dataclass(frozen=True)
class Data:
    name: str = ""  # training data
    train_split: str = "train"  # training split
    eval_split: str = "test"  # evaluation split
    # worker processes per host that read and augment examples; 0 = one thread of the training process
    workers: int = 8
    prefetch: int = 2  # batches that each data worker prepares in advance
    max_corrupt: float = 0.001  # fraction of unreadable examples above which training stops


@dataclass(frozen=True)
class Optim:
    # optimizer, see leanformer/training/optimizers.py; weight decay is decoupled in all of them
    name: Literal["adamw", "muon", "sgd"] = "adamw"
    lr: float = 3e-3  # peak learning rate for the configured global batch size; never rescaled automatically
    schedule: Literal["cosine", "linear", "constant"] = "cosine"  # learning-rate schedule after the warm-up
    warmup_epochs: float = 0.0  # length of the linear learning-rate warm-up in epochs
    # length of the linear learning-rate warm-up in steps; excludes warmup_epochs and warmup_share
    warmup_steps: int = 0
    warmup_share: float = 0.0  # length of the linear learning-rate warm-up as a fraction of the whole run
    warmup_lr: float = 1e-5  # learning rate at step 0 of the warm-up; unused without one
    final_lr: float = 0.0  # learning rate at the end of the decay, one step after the last
    # decoupled weight decay, multiplied by the learning rate; not of biases, norms, class tokens, positions, token
    # types, layer scales and factors of heads
    weight_decay: float = 0.3
    # patterns of parameters and modules that are not trained: ("*", "!head") trains the head only
    freeze: tuple[str, ...] = ()
    b1: float = 0.9  # decay rate of the first moment (Adam's beta1), or the momentum of SGD
    # value of optim.b1 at the peak learning rate, for one-cycle schedules; constant b1 if unset
    b1_peak: float | None = None
    b2: float = 0.999  # decay rate of the second moment (Adam's beta2)
    eps: float = 1e-8  # Adam's epsilon: constant added to the root of the second moment
    clip_norm: float = 0.0  # largest global gradient norm; larger gradients are scaled down; 0 = off
    ema: float = 0.0  # decay rate of the exponential moving average (EMA) of the weights, for example 0.9999; 0 = off
    max_skipped: int = 10  # consecutive skipped steps (diverged or not finite) after which training stops


@dataclass(frozen=True)
class Eval:
    every: int = 5000  # steps between evaluations; 0 = only at the end
    every_epochs: float = 0.0  # epochs between evaluations; only with eval.every=0
    batch_size: int = 1024  # global batch size of evaluation
    # evaluation examples during training, evenly spaced over the split; 0 = all; `evaluate` always uses all
    examples: int = 0
    # evaluations on further splits, in config files that unlock the config: NAME = {"split": "...", "every": steps}
    more: ConfigDict = field(default_factory=ConfigDict)


@dataclass(frozen=True)
class Checkpoint:
    every: int = 500  # steps between checkpoints; 0 = only at the end
    every_epochs: float = 0.0  # epochs between checkpoints; only with checkpoint.every=0
    # number of latest checkpoints that are kept, in addition to the best checkpoint by validation score
    keep: int = 2


@dataclass(frozen=True)
class Probe:
    """Conditioning of every layer, on the first examples of the evaluation split."""

    every: int = 5000  # steps between measurements of conditioning, also at step 0 and at the end; 0 = off
    every_epochs: float = 0.0  # epochs between measurements of conditioning; only with probe.every=0
    examples: int = 16  # number of evaluation examples (images or sequences) for measurements of conditioning
    # names of the measures of conditioning, defined in leanformer/conditioning/measures.py
    measures: tuple[str, ...] = (
        *("attention_output", "tokens", "attention_branch", "attention_entropy"),
        "largest_logit",
    )


@dataclass(frozen=True)
class InitFrom:
    """Weights that training starts from, read at step 0 only."""

    # source of initial weights: a safetensors file, an index of several, a folder with either, or a run's folder
    path: str | None = None
    layout: Literal["own", "timm", "huggingface"] = "own"  # layout of the weights in init_from.path
    new_head: bool = False  # True: a classifier with another number of classes is initialised randomly
    resize_positions: bool = False  # True: learned positions of another grid are resized


@dataclass(frozen=True)
class Mesh:
    # number of data-parallel devices: they shard the batch and replicate parameters; -1 = all remaining devices
    data: int = -1
    # number of FSDP devices: they shard the batch, parameters and optimizer state; -1 = all remaining devices
    fsdp: int = 1
    # number of tensor-parallel devices: they process the same examples and shard heads, MLP hidden units and logits
    tensor: int = 1


@dataclass(frozen=True)
class Common:
    """Keys of all tasks; a task declares further ones and its defaults. The section `model` follows below."""

    task: str = ""  # training task: a registry entry of leanformer/tasks
    seed: int = 0  # random seed of initial weights, data order, augmentation, mixup and drop path
    batch_size: int = 1024  # global batch size: the sum over devices, processes and gradient accumulation steps
    # gradient accumulation steps per optimizer step; less memory, equal result, except for batch norm (XCiT, VOLO),
    # which normalises each micro-batch, and (mlp_)sigma_reparam, whose estimate of σ₁ moves in each
    accumulate: int = 1
    # training length in epochs; exactly one of total_epochs, total_steps and total_tokens is above 0
    total_epochs: float = 300.0
    total_steps: int = 0  # training length in optimizer steps; 0 = set by another total_... key
    # dtype of activations; parameters, softmax, norms and loss are always float32
    dtype: Dtype = "bfloat16"
    log_every: int = 50  # optimizer steps between training records
    # loggers that receive the records besides metrics.jsonl: "tensorboard", "wandb", see
    # leanformer/training/loggers.py; () = none
    loggers: tuple[Literal["tensorboard", "wandb"], ...] = ("tensorboard",)
    # seconds without progress, six times as many while programs are compiled, after which a run prints all stacks and
    # exits; 0 = no limit
    hang_seconds: float = 600.0
    # bitwise reproducible results on equal GPUs; for the cost see leanformer/cli.py
    deterministic: bool = False

    data: Data = Data()
    optim: Optim = Optim()
    eval: Eval = Eval()
    checkpoint: Checkpoint = Checkpoint()
    probe: Probe = Probe()
    init_from: InitFrom = InitFrom()
    mesh: Mesh = Mesh()


@dataclass(frozen=True)
class BlockKeys:
    """Keys of the section `model` of all architectures, which declare their own, and other defaults, in `Keys`."""

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


def architectures() -> list[str]:
    return sorted(file.stem for file in MODELS.glob("[a-z]*.py"))


@functools.cache
def keys_of(name: str) -> Any:
    """Return the declaration of the keys of an architecture."""
    if name not in architectures():
        raise ConfigError(f'model.name="{name}": unknown architecture. Choose one of: {", ".join(architectures())}.')
    return declare.declared_in(MODELS / f"{name}.py", globals())


@functools.cache
def attention_keys() -> list[Any]:
    """Return the declarations of the options of all attention types."""
    files = (file for file in sorted(LAYERS.glob("*.py")) if "\nclass Keys" in file.read_text(encoding="utf-8"))
    return [declare.declared_in(file, globals()) for file in files]


def model_section(name: str, **values: Any) -> ConfigDict:
    """Return the section `model`: an architecture's defaults, overridden by `values`, and unset attention options."""
    m = declare.section(keys_of(name)(name=name))
    for options in attention_keys():
        m.update(declare.section(options()))
    m.update(values)
    return m


def model_meanings(name: str) -> dict[str, str]:
    """Return {dotted key: meaning} of the section `model` of an architecture."""
    texts: dict[str, str] = {}
    for keys in (keys_of(name), *attention_keys()):
        texts |= {key: text for key, text in declare.meanings(keys, "model.").items() if key not in texts}
    return texts


def listed_per_layer(m: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return {key: numbers} of the sizes that a section `model` gives per layer; {} for an architecture with stages."""
    several = {name: m[name] for name in PER_LAYER if isinstance(m.get(name), tuple | list)}
    return {name: tuple(sizes) for name, sizes in several.items()} if isinstance(m.get("depth"), int) else {}
