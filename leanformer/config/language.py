"""Language models: what differs from images, documented key by key, and the rules for texts."""

from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from leanformer.config.images import base, softmax
from leanformer.config.rules import require


def language() -> ConfigDict:
    """`base()` for texts. Defaults: the recipe of Leaner Transformers' GPT-2 on TinyStories (section 4.2), its original
    of 12 layers and 12 heads."""
    c = base().unlock()
    for name in ("mean", "std", "crop_fraction"):
        del c.data[name]
    del c.augment, c.loss
    c.task = "language"
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
    # Where tokens are kept; ~/.cache/leanformer/texts if unset. Made once, by data.workers processes, in shards: what
    # is stopped goes on with those that are not there. It takes the room of the tokens twice.
    c.data.dir = placeholder(str)

    c.model = ConfigDict()  # keyword arguments of leanformer.models.<name>.Model, and the name
    c.model.name = "gpt"
    c.model.vocabulary = 50257  # one more than the largest token
    c.model.max_length = 64  # tokens of a row
    c.model.packed = False  # rows of whole documents that do not see one another; else windows of the stream of tokens
    c.model.width = 512
    c.model.depth = 12
    c.model.num_heads = 12
    c.model.head_dim = 42
    c.model.value_dim = placeholder(int)  # head_dim if unset
    c.model.mlp_dim = 2048
    c.model.attention = "softmax"
    softmax(c.model)
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
    c.model.layer_scale = placeholder(float)  # start of the vectors that scale each branch; none if unset
    c.model.dropout = 0.2  # of embeddings, branches and the MLP's hidden layer
    c.model.drop_path = 0.0
    c.model.remat = "light"
    c.model.unroll = placeholder(int)
    c.model.backend = "auto"

    c.batch_size, c.total_epochs, c.total_steps = 128, 0.0, 2000
    c.optim.update(schedule="constant", warmup_epochs=0.0, lr=3e-4, weight_decay=0.01, clip_norm=0.0)
    c.eval.update(every=500, batch_size=128)
    c.checkpoint.every = 500
    c.probe.every = 500
    c.probe.measures = ("attention_output", "tokens", "attention_branch", "attention_entropy", "largest_logit")
    return c.lock()


def check(c: Any) -> None:
    """Raises ConfigError on the first rule for texts that `c` breaks."""
    require(0 <= c.model.dropout < 1, f"model.dropout={c.model.dropout} must be in [0, 1).")
    require(c.logits_at_once >= 1, f"logits_at_once={c.logits_at_once} must be at least 1.")
    require(c.data.documents >= 0, f"data.documents={c.data.documents} must not be negative; 0 takes all.")
    require(c.data.separator != "", 'data.separator="" separates nothing. Leave it out, or give what stands between.')
