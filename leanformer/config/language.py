"""Language models and models of masked tokens: what their configs have besides `common`, and the rules for texts."""

from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from leanformer.config.common import blocks, common
from leanformer.config.rules import require


def texts(task: str) -> ConfigDict:
    """Return what the configs of both tasks share: files of texts, and the length of a run in tokens."""
    c = common(task)
    # Tokens to train on, those that fill up packed rows too: instead of the other total_.... 0 = off
    c.total_tokens = 0.0
    c.logits_at_once = 2**27  # of tokens x vocabulary that the loss holds at a time, all devices together

    c.data.name = "text:data/tinystories"  # or bundled:austen, see leanformer/data/text/documents.py
    c.data.train_split = "train"  # stem of files, or name of a folder of files; all of them for "all". With a part of
    # its tokens: "all[:90%]"
    c.data.eval_split = "test"  # the same, to evaluate on: "all[90%:]"
    c.data.tokenizer = "data/gpt2"  # folder or file; "bytes"; or "bpe:1024", trained on the files of train_split
    c.data.separator = placeholder(str)  # between the documents of a .txt; a file is one document if unset
    c.data.documents = 0  # so many of each split, the first; 0 = all
    # Where tokens are kept; ~/.cache/leanformer/texts if unset. Made once, by data.workers processes; what is stopped
    # is made anew.
    c.data.dir = placeholder(str)
    c.total_epochs = 0.0
    return c


def language() -> ConfigDict:
    """Return the config of language models. Defaults: the recipe of Leaner Transformers' GPT-2 on TinyStories (section
    4.2), its original of 12 layers and 12 heads."""
    c = texts("language")
    c.model = blocks("gpt", width=512, depth=12, num_heads=12, head_dim=42, mlp_dim=2048)
    c.model.vocabulary = 50257  # one more than the largest token
    c.model.max_length = 64  # tokens of a row
    c.model.packed = False  # rows of whole documents that do not see one another; else windows of the stream of tokens
    c.model.positions = "learned"  # or "none", with model.rotary
    c.model.norm = "layernorm"  # or "rmsnorm"; see leanformer/layers/norms.py
    c.model.epsilon = 1e-5  # of every norm but those of queries, keys and latents
    c.model.activation = "relu"  # of the MLP; "gelu_tanh" in GPT-2 as published; see leanformer/layers/mlp.py
    c.model.gated = False  # whether the MLP is activation(gate) x up
    c.model.mlp_bias = True
    c.model.qkv_bias = False  # whether queries, keys and values have biases
    c.model.tied = False  # whether the token embeddings are the head too
    c.model.head_bias = True  # of a head of its own
    c.model.head_cap = placeholder(float)  # of the logits of tokens; none if unset
    c.model.dropout = 0.2  # of embeddings, branches and the MLP's hidden layer

    c.batch_size, c.total_steps = 128, 2000
    c.optim.update(schedule="constant", lr=3e-4, weight_decay=0.01)
    c.eval.update(every=500, batch_size=128)
    c.probe.every = 500
    return c.lock()


def masked() -> ConfigDict:
    """Return the config of masked tokens. Defaults: the recipe of Cramming (Geiping & Goldstein 2023), whose BERT is
    the original of Leaner Transformers' Table 1; by steps and not by its clock, and without its ramp of the batch."""
    c = texts("masked")
    c.mask_share = 0.25  # of a row's tokens that are to be told, see leanformer/data/text/masking.py

    c.data.name = "text:data/pile"  # or bundled:austen, see leanformer/data/text/documents.py
    c.data.tokenizer = "wordpiece:32768"  # trained on the files of train_split; or a tokenizer.json with a mask token

    c.model = bert()
    c.model.packed = False  # rows of whole documents that do not see one another; else windows of the stream of tokens
    c.model.transform = False  # whether a layer and a norm come before the head; True in BERT
    c.model.head_bias = False  # of the head, which is the token embeddings; True in BERT

    c.batch_size, c.total_steps = 8192, 5000
    c.optim.update(schedule="linear", warmup_steps=3750, lr=1e-3, warmup_lr=2.5e-4, final_lr=0.0)
    c.optim.update(b2=0.98, eps=1e-12, weight_decay=0.01, clip_norm=0.5)
    c.eval.update(every=1000, batch_size=256)
    c.checkpoint.every = 1000
    c.probe.every = 1000
    c.probe.measures = ("attention_output", "tokens", "attention_branch", "attention_entropy")
    return c.lock()


def bert() -> ConfigDict:
    """Return the model section of Cramming's BERT without what is on top of it."""
    m = blocks("bert", width=768, depth=16, num_heads=12, head_dim=64, mlp_dim=1536)
    m.vocabulary = 32768  # one more than the largest token
    m.max_length = 128  # tokens of a row
    m.out_bias = False
    m.positions = "sinusoidal"  # of a learned size; "learned" in BERT; or "none", with model.rotary
    m.types = placeholder(int)  # of tokens, 2 in BERT; none if unset
    m.norm = "layernorm"  # or "rmsnorm"; see leanformer/layers/norms.py
    m.epsilon = 1e-12  # of every norm
    m.post_norm = False  # True in BERT
    m.activation = "gelu"  # of the MLP; see leanformer/layers/mlp.py
    m.gated = True  # whether the MLP is activation(gate) x up; False in BERT
    m.mlp_bias = False  # True in BERT
    m.qkv_bias = False  # whether queries, keys and values have biases; True in BERT
    m.dropout = 0.0  # of embeddings, branches and the MLP's hidden layer
    return m


def check(c: Any) -> None:
    """Raises ConfigError on the first rule for texts that `c` breaks."""
    require(c.logits_at_once >= 1, f"logits_at_once={c.logits_at_once} must be at least 1.")
    require(c.data.documents >= 0, f"data.documents={c.data.documents} must not be negative; 0 takes all.")
    require(c.data.separator != "", 'data.separator="" separates nothing. Leave it out, or give what stands between.')


def check_masked(c: Any) -> None:
    """Raises ConfigError on the first rule for masked tokens that `c` breaks."""
    check(c)
    share, length = c.mask_share, c.model.max_length
    require(0 < share < 1, f"mask_share={share} is a share of a row's tokens: above 0 and under 1.")
    require(
        share * length >= 1,
        f"mask_share={share} of model.max_length={length} is not one token. Raise one of them.",
    )
