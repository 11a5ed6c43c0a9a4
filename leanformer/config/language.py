"""Config defaults and validation of causal and masked language models, in addition to `common`."""

from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from leanformer.config.common import blocks, common
from leanformer.config.rules import require


def texts(task: str) -> ConfigDict:
    """Return a config of a text task: the keys of `common`, those of text files, and the training length in tokens.

    It is not locked and has no `model`. `task` is the type, as in config.task.
    """
    c = common(task)
    # training length in tokens, including padding of packed rows; excludes the other total_... keys; 0 = off
    c.total_tokens = 0.0
    c.logits_at_once = 2**27  # logits (tokens x vocabulary) that the loss holds at a time, summed over devices

    c.data.name = "text:data/tinystories"  # training data: text:<folder> or bundled:austen, see leanformer/data/text
    # training split: stem of files, name of a folder of files, or "all"; with a fraction of its tokens: "all[:90%]"
    c.data.train_split = "train"
    # evaluation split: stem of files, name of a folder of files, or "all"; with a fraction: "all[90%:]"
    c.data.eval_split = "test"
    # tokenizer: a folder or file, "bytes", or "bpe:1024" (trained on all files of train_split)
    c.data.tokenizer = "data/gpt2"
    # separator between the documents of a .txt file; one document per file if unset
    c.data.separator = placeholder(str)
    c.data.documents = 0  # number of documents read from the start of each split; 0 = all
    # folder of tokenised data, built once by data.workers processes; an interrupted build starts again;
    # ~/.cache/leanformer/texts if unset
    c.data.dir = placeholder(str)
    c.total_epochs = 0.0
    return c


def language() -> ConfigDict:
    """Return the locked config of causal language modelling.

    The defaults are the recipe of Leaner Transformers' GPT-2 on TinyStories (section 4.2), its original of 12 layers
    and 12 heads.

    >>> language().task
    'language'
    """
    c = texts("language")
    c.model = blocks("gpt", width=512, depth=12, num_heads=12, head_dim=42, mlp_dim=2048)
    c.model.vocabulary = 50257  # vocabulary size: one more than the largest token id
    c.model.max_length = 64  # sequence length: tokens of a row
    # True: rows of whole documents that do not attend to each other; False: windows of the token stream
    c.model.packed = False
    c.model.positions = "learned"  # position embeddings: "learned", or "none" (with model.rotary)
    c.model.norm = "layernorm"  # norm type: "layernorm" or "rmsnorm", see leanformer/layers/norms.py
    c.model.epsilon = 1e-5  # epsilon of all norms, except those of queries, keys and latents
    # activation function of the MLP, "gelu_tanh" in GPT-2 as published, see leanformer/layers/mlp.py
    c.model.activation = "relu"
    c.model.gated = False  # True: gated MLP, activation(gate) x up
    c.model.mlp_bias = True  # True: the linear layers of the MLP have biases
    c.model.qkv_bias = False  # True: query, key and value projections have biases
    c.model.tied = False  # True: the token embeddings are also the output head
    c.model.head_bias = True  # True: the untied output head has a bias
    c.model.head_cap = placeholder(float)  # soft cap of the output logits; none if unset
    c.model.dropout = 0.2  # dropout rate of embeddings, residual branches and the MLP's hidden layer

    c.batch_size, c.total_steps = 128, 2000
    c.optim.update(schedule="constant", lr=3e-4, weight_decay=0.01)
    c.eval.update(every=500, batch_size=128)
    c.probe.every = 500
    return c.lock()


def masked() -> ConfigDict:
    """Return the locked config of masked language modelling.

    The defaults are the recipe of Cramming (Geiping & Goldstein 2023), with its BERT, the baseline of Leaner
    Transformers' Table 1; in steps instead of time, and without batch-size ramp.

    >>> masked().task
    'masked'
    """
    c = texts("masked")
    c.mask_share = 0.25  # fraction of the tokens of a row that the model predicts, see leanformer/data/text/masking.py

    c.data.name = "text:data/pile"  # training data: text:<folder> or bundled:austen, see leanformer/data/text
    # tokenizer: "wordpiece:SIZE" (trained on all files of train_split), or a tokenizer.json with a mask token
    c.data.tokenizer = "wordpiece:32768"

    c.model = bert()
    # True: rows of whole documents that do not attend to each other; False: windows of the token stream
    c.model.packed = False
    c.model.transform = False  # True: a dense layer and a norm precede the output head, as in BERT
    c.model.head_bias = False  # True: the output head, tied to the token embeddings, has a bias, as in BERT

    c.batch_size, c.total_steps = 8192, 5000
    c.optim.update(schedule="linear", warmup_steps=3750, lr=1e-3, warmup_lr=2.5e-4, final_lr=0.0)
    c.optim.update(b2=0.98, eps=1e-12, weight_decay=0.01, clip_norm=0.5)
    c.eval.update(every=1000, batch_size=256)
    c.checkpoint.every = 1000
    c.probe.every = 1000
    c.probe.measures = ("attention_output", "tokens", "attention_branch", "attention_entropy")
    return c.lock()


def bert() -> ConfigDict:
    """Return the model section of Cramming's BERT, without the keys of its output head."""
    m = blocks("bert", width=768, depth=16, num_heads=12, head_dim=64, mlp_dim=1536)
    m.vocabulary = 32768  # vocabulary size: one more than the largest token id
    m.max_length = 128  # sequence length: tokens of a row
    m.out_bias = False  # True: the attention output projection has a bias
    # position embeddings: "sinusoidal" with a learned scale, "learned" as in BERT, or "none" (with model.rotary)
    m.positions = "sinusoidal"
    m.types = placeholder(int)  # number of token types (segments), 2 in BERT; none if unset
    m.norm = "layernorm"  # norm type: "layernorm" or "rmsnorm", see leanformer/layers/norms.py
    m.epsilon = 1e-12  # epsilon of all norms
    m.post_norm = False  # True: norms follow the residual sums, as in BERT; False: norms precede attention and MLP
    m.activation = "gelu"  # activation function of the MLP, see leanformer/layers/mlp.py
    m.gated = True  # True: gated MLP, activation(gate) x up; False in BERT
    m.mlp_bias = False  # True: the linear layers of the MLP have biases, as in BERT
    m.qkv_bias = False  # True: query, key and value projections have biases, as in BERT
    m.dropout = 0.0  # dropout rate of embeddings, residual branches and the MLP's hidden layer
    return m


def check(c: Any) -> None:
    """Raise ConfigError at the first invalid key of a config of language modelling, causal or masked."""
    require(c.logits_at_once >= 1, f"logits_at_once={c.logits_at_once} must be at least 1.")
    require(c.data.documents >= 0, f"data.documents={c.data.documents} must not be negative. 0 = all documents.")
    require(
        c.data.separator != "", 'data.separator="": the separator is empty. Leave it unset, or set the separating text.'
    )


def check_masked(c: Any) -> None:
    """Raise ConfigError at the first invalid key of a config of masked language modelling."""
    check(c)
    share, length = c.mask_share, c.model.max_length
    require(0 < share < 1, f"mask_share={share} must be a fraction above 0 and below 1.")
    require(
        share * length >= 1,
        f"mask_share={share}: less than one token of model.max_length={length}. Increase one of them.",
    )
