"""Config defaults of all tasks, and keys shared by all models. The comment of each key is its help text."""

from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from leanformer.config.per_layer import allow_per_layer


# Interventions that change the forward pass: published weights then compute other outputs.
INTERVENTIONS = ("spectral", "sigma_reparam", "mlp_sigma_reparam", "graying")
# Keys with a new name. The old one was that of a method of ConfigDict, so that no flag could set it.
RENAMED = {"data.items": "data.num_items"}


def common(task: str) -> ConfigDict:
    """Return a new config with the keys that every task has and their defaults; it is not locked and has no `model`.

    Args:
        task: task type, as in config.task.
    """
    c = ConfigDict()
    c.task = task  # training task: a registry entry of leanformer/tasks
    c.seed = 0  # random seed of initial weights, data order, augmentation, mixup and drop path
    c.batch_size = 1024  # global batch size: the sum over devices, processes and gradient accumulation steps
    # gradient accumulation steps per optimizer step; less memory, equal result, except for batch norm (XCiT, VOLO),
    # which normalises each micro-batch, and (mlp_)sigma_reparam, whose estimate of σ₁ moves in each
    c.accumulate = 1
    # training length in epochs; exactly one of total_epochs, total_steps and total_tokens is above 0
    c.total_epochs = 300.0
    c.total_steps = 0  # training length in optimizer steps; 0 = set by another total_... key
    # dtype of activations, "bfloat16" or "float32"; parameters, softmax, norms and loss are always float32
    c.dtype = "bfloat16"
    c.log_every = 50  # optimizer steps between training records
    # loggers that receive the records besides metrics.jsonl: "tensorboard", "wandb", see
    # leanformer/training/loggers.py; () = none
    c.loggers = ("tensorboard",)
    # seconds without progress, thrice as many before the second step, after which a run prints all stacks and exits;
    # 0 = no limit
    c.hang_seconds = 600.0
    # bitwise reproducible results on equal GPUs; for the cost see leanformer/runtime/determinism.py
    c.deterministic = False

    c.data = ConfigDict()
    # worker processes per host that read and augment examples; 0 = one thread of the training process
    c.data.workers = 8
    c.data.prefetch = 2  # batches that each data worker prepares in advance
    c.data.max_corrupt = 0.001  # fraction of unreadable examples above which training stops

    optimizer(c)

    c.eval = ConfigDict()
    c.eval.every = 5000  # steps between evaluations; 0 = only at the end
    c.eval.every_epochs = 0.0  # epochs between evaluations; only with eval.every=0
    c.eval.batch_size = 1024  # global batch size of evaluation
    # evaluation examples during training, evenly spaced over the split; 0 = all; `evaluate` always uses all
    c.eval.examples = 0
    # evaluations on further splits, in config files that unlock the config: NAME = {"split": "...", "every": steps}
    c.eval.more = ConfigDict()

    c.checkpoint = ConfigDict()
    c.checkpoint.every = 500  # steps between checkpoints; 0 = only at the end
    c.checkpoint.every_epochs = 0.0  # epochs between checkpoints; only with checkpoint.every=0
    # number of latest checkpoints that are kept, in addition to the best checkpoint by validation score
    c.checkpoint.keep = 2

    # measurement of the conditioning of every layer, on the first examples of the evaluation split
    c.probe = ConfigDict()
    c.probe.every = 5000  # steps between measurements of conditioning, also at step 0 and at the end; 0 = off
    c.probe.every_epochs = 0.0  # epochs between measurements of conditioning; only with probe.every=0
    c.probe.examples = 16  # number of evaluation examples (images or sequences) for measurements of conditioning
    # names of the measures of conditioning, defined in leanformer/conditioning/measures.py
    c.probe.measures = ("attention_output", "tokens", "attention_branch", "attention_entropy", "largest_logit")

    c.init_from = ConfigDict()  # weights that training starts from, read at step 0 only
    # source of initial weights: a safetensors file, an index of several, a folder with either, or a run's folder
    c.init_from.path = placeholder(str)
    c.init_from.layout = "own"  # layout of the weights in init_from.path: "own", "timm" or "huggingface"
    c.init_from.new_head = False  # True: a classifier with another number of classes is initialised randomly
    c.init_from.resize_positions = False  # True: learned positions of another grid are resized

    c.mesh = ConfigDict()
    # number of data-parallel devices: they shard the batch and replicate parameters; -1 = all remaining devices
    c.mesh.data = -1
    # number of FSDP devices: they shard the batch, parameters and optimizer state; -1 = all remaining devices
    c.mesh.fsdp = 1
    # number of tensor-parallel devices: they process the same examples and shard heads, MLP hidden units and logits
    c.mesh.tensor = 1
    return c


def optimizer(c: ConfigDict) -> None:
    """Add the section `optim` to a config, in place, with its defaults: optimizer, learning-rate schedule, EMA."""
    c.optim = ConfigDict()
    # optimizer: "adamw", "muon" or "sgd", see leanformer/training/optimizers.py; all have decoupled weight decay
    c.optim.name = "adamw"
    c.optim.lr = 3e-3  # peak learning rate for the configured global batch size; never rescaled automatically
    c.optim.schedule = "cosine"  # learning-rate schedule: "cosine", "linear" or "constant"
    c.optim.warmup_epochs = 0.0  # length of the linear learning-rate warm-up in epochs
    # length of the linear learning-rate warm-up in steps; excludes warmup_epochs and warmup_share
    c.optim.warmup_steps = 0
    c.optim.warmup_share = 0.0  # length of the linear learning-rate warm-up as a fraction of the whole run
    c.optim.warmup_lr = 1e-5  # learning rate at step 0 of the warm-up; unused without one
    c.optim.final_lr = 0.0  # learning rate at the end of the decay, one step after the last
    # decoupled weight decay, multiplied by the learning rate; not of biases, norms, class tokens, positions, token
    # types, layer scales and factors of heads
    c.optim.weight_decay = 0.3
    c.optim.freeze = ()  # patterns of parameters and modules that are not trained: ("*", "!head") trains the head only
    c.optim.b1 = 0.9  # decay rate of the first moment (Adam's beta1), or the momentum of SGD
    # value of optim.b1 at the peak learning rate, for one-cycle schedules; constant b1 if unset
    c.optim.b1_peak = placeholder(float)
    c.optim.b2 = 0.999  # decay rate of the second moment (Adam's beta2)
    c.optim.eps = 1e-8  # Adam's epsilon: constant added to the root of the second moment
    c.optim.clip_norm = 0.0  # largest global gradient norm; larger gradients are scaled down; 0 = off
    c.optim.ema = 0.0  # decay rate of the exponential moving average (EMA) of the weights, for example 0.9999; 0 = off
    c.optim.max_skipped = 10  # consecutive skipped steps (diverged or not finite) after which training stops


def section(name: str, **arguments: Any) -> ConfigDict:
    """Return the section `model` of a config: the keys of all architectures, then those of one.

    Args:
        name: architecture, a module of leanformer/models.
        arguments: values of keys of this architecture.
    """
    m = ConfigDict()  # keyword arguments of leanformer.models.<name>.Model, and the name
    m.name = name  # model architecture: a module of leanformer/models
    # stochastic-depth rate of the last block; the architecture defines how the rate rises over the blocks
    m.drop_path = 0.0
    # activations recomputed in the backward pass: "none"; "light", norms, GELU and attention matrices (less memory at
    # little or no time); "block", everything (least memory at about a third more time)
    m.remat = "light"
    # layers per iteration of the scan over layers; larger values run faster and compile longer; if unset, 1, and on a
    # single GPU all layers of models of one stage and up to 12 layers
    m.unroll = placeholder(int)
    m.backend = "auto"  # attention implementation: "xla", "cudnn", "naive", or "auto" (selected and logged at start)
    softmax(m)
    m.update(arguments)
    return allow_per_layer(m)


def blocks(name: str, **arguments: Any) -> ConfigDict:
    """Return the section `model` of an architecture with one stack of blocks that does not read images.

    It is that of `section`, whose arguments it takes, with attention="softmax" and the unset keys value_dim and
    layer_scale.
    """
    both = {"value_dim": placeholder(int), "layer_scale": placeholder(float)}
    return section(name, attention="softmax", **both, **arguments)


def softmax(m: ConfigDict) -> None:
    """Add to a section `model`, in place, the unset keys of attention="softmax" and "latent".

    The keys of `interventions` are added too. An unset key has no effect.
    """
    # number of key and value heads, each shared by several query heads, or one per layer; model.num_heads if unset
    m.num_kv_heads = placeholder(int)
    m.logit_scale = placeholder(float)  # factor of the attention logits q·k; 1/√head_dim if unset
    m.temperature = placeholder(bool)  # True: each head has a learned factor of its attention logits
    # channels of the latent that keys and values are computed from, with attention="latent"
    m.kv_rank = placeholder(int)
    # channels of the latent that queries are computed from, with attention="latent"; no query latent if unset
    m.query_rank = placeholder(int)
    m.latent_norm = placeholder(str)  # norm of the key-value and query latents, with attention="latent"; none if unset
    # soft cap c of the attention logits: logit becomes c·tanh(logit / c); no cap if unset
    m.soft_cap = placeholder(float)
    # dropout rate of attention weights in training; not supported by cuDNN's kernel
    m.attention_dropout = placeholder(float)
    m.qk_norm = placeholder(str)  # norm of each head's queries and keys: "rmsnorm", "layernorm", "unit"; none if unset
    m.rotary = placeholder(float)  # base of rotary positions, for example 10000.0; no rotary positions if unset
    m.rotary_width = placeholder(int)  # channels of each head that rotary positions rotate; all if unset
    m.out_bias = placeholder(bool)  # False: the attention output projection has no bias
    interventions(m)


def current_name(key: str) -> str:
    """Return the present name of a config key that may be an old one, such as "data.items"."""
    return RENAMED.get(key, key)


def interventions(m: ConfigDict) -> None:
    """Add to the model section `m`, in place, the unset keys of interventions on the conditioning of attention.

    A model whose architecture or attention type does not support a key that is set raises ConfigError.
    """
    m.spectral = placeholder(float)  # λ of the constant λI added to the query, key and value matrices; 0 if unset
    # initialisation of the query, key and value matrices: "orthogonal", or "spectral" (adds U·σ₁·Vᵀ); default if unset
    m.qkv_init = placeholder(str)
    # matrices that model.spectral and model.qkv_init act on: a subset of "qkv", such as "qk"; "qkv" if unset
    m.levers_on = placeholder(str)
    m.sigma_reparam = placeholder(bool)  # True: attention matrices are reparametrised as γ·W/σ₁(W), with learned γ
    m.mlp_sigma_reparam = placeholder(bool)  # True: MLP matrices are reparametrised as γ·W/σ₁(W), with learned γ
    # token graying: exponent ε applied to the spectrum of the tokens before the blocks; 1 if unset
    m.graying = placeholder(float)
    # spectrum that model.graying flattens: singular values, "svd", or cosine coefficients, "dct"
    m.graying_by = placeholder(str)
