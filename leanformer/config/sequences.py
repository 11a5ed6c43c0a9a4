"""Config defaults and validation of token-sequence classification."""

from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from leanformer.config.common import blocks, common
from leanformer.config.rules import check_classes, require


WHOLE = ("pixels", "pathfinder")  # data types that are images: sequences of equal length, never truncated


def sequences() -> ConfigDict:
    """Return the locked config of token-sequence classification.

    The defaults are the recipe of the released Nyströmformer (Xiong et al. 2021) on the Long Range Arena, in which each
    task sets its own lengths.

    >>> sequences().task
    'sequences'
    """
    c = common("sequences")
    c.augment = ConfigDict({"label_smoothing": 0.0})
    c.loss = "softmax"

    # training data: listops:, pathfinder:, imdb:, text:, pairs: or pixels: and a folder, see leanformer/data/sequences
    c.data.name = "listops:data/listops"
    c.data.train_split = "train"  # training split, a name that the type of data.name has
    c.data.eval_split = "test"  # evaluation split, such as "test", "val" or "eval"
    c.data.dir = placeholder(str)
    c.data.max_length = 2000  # tokens kept per example; the rest is cut off
    # parameters of a locally generated dataset: those of listops.Recipe or pathfinder.write
    c.data.recipe = ConfigDict()

    c.model = blocks("nystromformer", width=64, depth=2, num_heads=2, head_dim=32, mlp_dim=128)
    c.model.vocabulary = 32  # vocabulary size: one more than the largest token id
    c.model.max_length = 2048  # number of positions; shorter examples are padded to it
    c.model.num_classes = 10  # number of classes
    c.model.towers = 1  # number of sequences per example that are encoded with shared weights: 1, or 2 for pairs
    # attention type: "nystrom", or "softmax" and "latent" (without landmarks, iterations, convolution, scale and
    # padding)
    c.model.attention = "nystrom"
    c.model.landmarks = placeholder(int)  # number of landmarks of attention="nystrom"; 64 if unset
    c.model.iterations = placeholder(int)  # iterations of Nyström attention's pseudo-inverse; 6 if unset
    # kernel size (taps) of the convolution over the values in Nyström attention; 0 = none; 35 if unset
    c.model.convolution = placeholder(int)
    # initial scale of Nyström attention's pseudo-inverse: "matrix", or "batch" as in the original; "matrix" if unset
    c.model.scale = placeholder(str)
    # padding tokens in Nyström attention: "masked", or "zeros" as in the original; "masked" if unset
    c.model.padding = placeholder(str)
    # input of the classifier: "mean" over valid tokens, "padded_mean" as in the original, or class "token"
    c.model.pool = "mean"
    # True: token 0 counts as padding, as in the original, which thereby ignores black pixels
    c.model.zero_is_padding = False
    c.model.dropout = 0.1  # dropout rate of embeddings, residual branches and the MLP's hidden layer

    c.batch_size, c.total_epochs, c.total_steps = 32, 0.0, 5000
    c.optim.update(schedule="linear", warmup_steps=1000, lr=1e-4, warmup_lr=4e-6, final_lr=4e-10)
    c.optim.update(b1=0.95, b1_peak=0.85, eps=1e-6, weight_decay=0.0)
    c.eval.update(every=500, batch_size=32)
    c.probe.measures = ("attention_output", "tokens", "attention_branch")
    return c.lock()


def landmarks(number: int) -> dict[str, Any]:
    """Return {key of config.model: value} of Nyström attention with a number of landmarks; of exact attention for 0.

    Attention has no convolution, as in the parameter counts of Leaner Transformers.
    """
    if not number:
        return {"attention": "softmax"}
    return {"attention": "nystrom", "landmarks": number, "convolution": 0}


def check(c: Any) -> None:
    """Raise ConfigError at the first invalid key of a token-sequence config."""
    check_classes(c)
    m = c.model
    require(m.towers in (1, 2), f"model.towers={m.towers}: invalid value. Set 1, or 2 for pairs of sequences.")
    require(
        1 <= c.data.max_length <= m.max_length,
        f"data.max_length={c.data.max_length}: out of range. Set at least 1 and at most "
        f"model.max_length={m.max_length}, the number of positions.",
    )
    require(
        c.data.name.partition(":")[0] not in WHOLE or c.data.max_length == m.max_length,
        f'data.name="{c.data.name}" yields whole images. Set data.max_length={c.data.max_length} and '
        f"model.max_length={m.max_length} both to their number of pixels.",
    )
    require(
        not m.landmarks or m.landmarks <= m.max_length,
        f"model.landmarks={m.landmarks}: more than model.max_length={m.max_length}, the number of tokens. "
        "Set at most as many.",
    )
