"""Models of masked tokens: what differs from language models, documented key by key, and the rules for masking."""

from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from leanformer.config import language as texts
from leanformer.config.images import softmax
from leanformer.config.rules import require


def masked() -> ConfigDict:
    """`language()` for masked tokens. Defaults: the recipe of Cramming (Geiping & Goldstein 2023), whose BERT is the
    original of Leaner Transformers' Table 1; by steps and not by its clock, and without its ramp of the batch."""
    c = texts.language().unlock()
    c.task = "masked"
    c.mask_share = 0.25  # of a row's tokens that are to be told, see leanformer/data/text/masking.py

    c.data.name = "text:data/pile"  # or bundled:austen, see leanformer/data/text/documents.py
    c.data.tokenizer = "wordpiece:32768"  # trained on the files of train_split; or a tokenizer.json with a mask token

    c.model = ConfigDict()  # keyword arguments of leanformer.models.<name>.Model, and the name
    c.model.name = "bert"
    c.model.vocabulary = 32768  # one more than the largest token
    c.model.max_length = 128  # tokens of a row
    c.model.packed = False  # rows of whole documents that do not see one another; else windows of the stream of tokens
    c.model.width = 768
    c.model.depth = 16
    c.model.num_heads = 12
    c.model.head_dim = 64
    c.model.value_dim = placeholder(int)  # head_dim if unset
    c.model.mlp_dim = 1536
    c.model.attention = "softmax"
    softmax(c.model)
    c.model.out_bias = False
    c.model.positions = "sinusoidal"  # of a learned size; "learned" in BERT; or "none", with model.rotary
    c.model.types = placeholder(int)  # of tokens, 2 in BERT; none if unset
    c.model.norm = "layernorm"  # or "rmsnorm"; see leanformer/layers/norms.py
    c.model.epsilon = 1e-12  # of every norm
    c.model.post_norm = False  # True in BERT
    c.model.activation = "gelu"  # of the MLP; see leanformer/layers/mlp.py
    c.model.gated = True  # whether the MLP is activation(gate) x up; False in BERT
    c.model.mlp_bias = False  # True in BERT
    c.model.qkv_bias = False  # whether queries, keys and values have biases; True in BERT
    c.model.transform = False  # whether a layer and a norm come before the head; True in BERT
    c.model.head_bias = False  # of the head, which is the token embeddings; True in BERT
    c.model.dropout = 0.0  # of embeddings, branches and the MLP's hidden layer
    c.model.layer_scale = placeholder(float)  # start of the vectors that scale each branch; none if unset
    c.model.drop_path = 0.0
    c.model.remat = "light"
    c.model.unroll = placeholder(int)
    c.model.backend = "auto"

    c.batch_size, c.total_steps = 8192, 5000
    c.optim.update(schedule="linear", warmup_epochs=0.0, warmup_steps=3750, lr=1e-3, warmup_lr=2.5e-4, final_lr=0.0)
    c.optim.update(b2=0.98, eps=1e-12, weight_decay=0.01, clip_norm=0.5)
    c.eval.update(every=1000, batch_size=256)
    c.checkpoint.every = 1000
    c.probe.every = 1000
    c.probe.measures = ("attention_output", "tokens", "attention_branch", "attention_entropy")
    return c.lock()


def check(c: Any) -> None:
    """Raises ConfigError on the first rule for masked tokens that `c` breaks."""
    texts.check(c)
    share, length = c.mask_share, c.model.max_length
    require(0 < share < 1, f"mask_share={share} is a share of a row's tokens: above 0 and under 1.")
    require(
        share * length >= 1,
        f"mask_share={share} of model.max_length={length} is not one token. Raise one of them.",
    )
