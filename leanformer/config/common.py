"""Keys that the configs of all tasks have, documented where their defaults stand, and keys that models share."""

from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


# Interventions that change every forward pass, so that published weights compute something else with them.
LEVERS = ("spectral", "sigma_reparam", "mlp_sigma_reparam", "value_residual", "graying")


def common(task: str) -> ConfigDict:
    """Return a config with the keys of every task: the run, its length, optimizer, evaluation, checkpoints, mesh."""
    c = ConfigDict()
    c.task = task  # what is asked of the model: one of leanformer/tasks
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

    c.data = ConfigDict()
    c.data.workers = 8  # processes per host that read and augment; 0 = a thread of this process
    c.data.prefetch = 2  # batches that each worker keeps ready
    c.data.max_corrupt = 0.001  # share of the examples that may be unreadable before training stops

    c.optim = ConfigDict()
    c.optim.name = "adamw"  # or "lion", "muon", "adafactor", "sgd", see training/optimizers.py; decay as in AdamW
    c.optim.lr = 3e-3  # peak, for the global batch as it is; never scaled behind your back
    c.optim.schedule = "cosine"  # from the peak down to final_lr; or "linear"; "wsd", linear at the end; "constant"
    c.optim.decay_share = 0.2  # of the whole run, of the fall of "wsd"
    c.optim.warmup_epochs = 0.0  # linear, up to the peak
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
    c.optim.clip_norm = 0.0  # global gradient norm; 0 = off
    c.optim.ema = 0.0  # decay of the averaged weights, e.g. 0.9999; 0 = off
    c.optim.max_skipped = 10  # steps in a row, not finite or past learning, that are skipped before training stops

    c.eval = ConfigDict()
    c.eval.every = 5000  # steps; 0 = only at the end
    c.eval.batch_size = 1024  # global
    c.eval.examples = 0  # so many of the split while training, evenly spaced over it; 0 = all. `evaluate` takes all
    c.eval.patience = 0  # evaluations without a better one after which training ends; 0 = off
    c.eval.more = ConfigDict()  # of other splits, in config files that unlock: NAME = {"split": "...", "every": steps}

    c.checkpoint = ConfigDict()
    c.checkpoint.every = 500  # steps; 0 = only at the end
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
    return c


def section(name: str, **arguments: Any) -> ConfigDict:
    """Return a model section: keys that every family has, then its own arguments."""
    m = ConfigDict()  # keyword arguments of leanformer.models.<name>.Model, and the name
    m.name = name  # of the family: a file of leanformer/models
    m.drop_path = 0.0  # rate in the last block; how it rises there is the family's
    # What the backward pass computes again: "none"; "light", norms, GELU and attention matrices, which is less memory
    # at little or no time; "block", everything, which is least memory at about a third more time.
    m.remat = "light"
    m.unroll = placeholder(int)  # layers in one turn of the loop over them: more run faster, compile longer; 1 if unset
    m.backend = "auto"  # attention: "xla", "cudnn", "naive", or "auto" (decided once at start and logged)
    softmax(m)
    m.update(arguments)
    return m


def blocks(name: str, **arguments: Any) -> ConfigDict:
    """Return a model section of one stack of blocks, as all families but those of images have it."""
    both = {"value_dim": placeholder(int), "layer_scale": placeholder(float)}
    return section(name, attention="softmax", **both, **arguments)


def softmax(m: ConfigDict) -> None:
    """Add the keys that attention="softmax" and "latent" take in every family; unset they do nothing."""
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


def levers(m: ConfigDict) -> None:
    """Add the keys of interventions on the conditioning of attention. A family or attention that has no use for one
    refuses it."""
    # λ of the fixed λI that queries', keys' and values' matrices have added; 0 if unset
    m.spectral = placeholder(float)
    m.qkv_init = placeholder(str)  # of these matrices at the start: "orthogonal", or "spectral": plus U·σ₁·Vᵀ
    m.levers_on = placeholder(str)  # which matrices `spectral` and `qkv_init` act on: "qk", "v", ...; "qkv" if unset
    m.sigma_reparam = placeholder(bool)  # True: attention's matrices are γ·W/σ₁(W), γ learned
    m.mlp_sigma_reparam = placeholder(bool)  # True: so are the MLP's
    m.value_residual = placeholder(float)  # share of the first layer's values in those of each; none if unset
    m.value_mix = placeholder(str)  # of `value_residual`: the shares stay as they are, "fixed", or are "learned"
    m.graying = placeholder(float)  # ε that the spectrum of the tokens before the blocks is raised to; 1 if unset
    m.graying_by = placeholder(str)  # spectrum of `graying`: singular values, "svd", or cosine coefficients, "dct"
