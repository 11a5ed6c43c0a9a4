"""Config keys of all tasks. A comment beside a key is its help text."""

from leanformer.config.declare import ConfigDict, Literal, dataclass, field


Dtype = Literal["bfloat16", "float32"]


@dataclass(frozen=True)
class Data:
    name: str = ""  # training data
    train_split: str = "train"  # training split
    eval_split: str = "test"  # evaluation split
    # worker processes that each process of a run starts to read and augment examples; 0 = one of its threads
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
    # decay rate of the exponential moving average (EMA) of the weights, at step s at most (1 + s) / (10 + s); 0 = off
    ema: float = 0.0
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
    new_head: bool = False  # True: the classifier is initialised randomly
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
    """Keys of all tasks; a task declares further ones and its defaults. The section `model` is in architectures.py."""

    task: str = ""  # training task: a registry entry of leanformer/tasks
    seed: int = 0  # random seed of initial weights, data order, augmentation, mixup and drop path
    batch_size: int = 1024  # global batch size: the sum over devices, processes and gradient accumulation steps
    # gradient accumulation steps per optimizer step; less memory, equal result, except for batch norm (XCiT, VOLO) and
    # scale="batch" (Nyström), which are over each micro-batch, and (mlp_)sigma_reparam, whose estimate of σ₁ moves
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
