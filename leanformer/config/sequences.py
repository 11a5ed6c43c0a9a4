"""Token sequences with a label: what differs from images, documented key by key, and the rules for sequences."""

from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from leanformer.config.common import blocks, common
from leanformer.config.rules import check_classes, require


WHOLE = ("pixels", "pathfinder")  # sources that are images, all of one length and never cut


def sequences() -> ConfigDict:
    """Return the config of token sequences. Defaults: the recipe of the released Nyströmformer (Xiong et al. 2021) on
    the Long Range Arena, in which each task sets its own lengths."""
    c = common("sequences")
    c.augment = ConfigDict({"label_smoothing": 0.0})
    c.loss = "softmax"

    c.data.name = "listops:data/listops"  # or pathfinder:, imdb:, text:, pairs:, pixels:, see leanformer/data/sequences
    c.data.train_split, c.data.eval_split = "train", "test"
    c.data.dir = placeholder(str)
    c.data.max_length = 2000  # tokens that are kept of an example
    c.data.recipe = ConfigDict()  # what a set that is made here is made of: listops.Recipe, or pathfinder.write

    c.model = blocks("nystromformer", width=64, depth=2, num_heads=2, head_dim=32, mlp_dim=128)
    c.model.vocabulary = 32  # one more than the largest token
    c.model.max_length = 2048  # positions; shorter examples are padded to it
    c.model.num_classes = 10
    c.model.towers = 1  # 2 for pairs of sequences
    c.model.attention = "nystrom"  # or "softmax", "latent", which take none of the next five
    c.model.landmarks = placeholder(int)  # 64 if unset
    c.model.iterations = placeholder(int)  # of the pseudo-inverse; 6 if unset
    c.model.convolution = placeholder(int)  # taps along the values, beside attention; 35 if unset, 0 for none
    c.model.scale = placeholder(str)  # "matrix" if unset; "batch" in the original
    c.model.padding = placeholder(str)  # "masked" if unset; "zeros" in the original
    c.model.pool = "mean"  # over real tokens; "padded_mean" in the original; or "token"
    c.model.zero_is_padding = False  # True in the original, which so leaves out black pixels
    c.model.dropout = 0.1  # of embeddings, branches and the MLP's hidden layer

    c.batch_size, c.total_epochs, c.total_steps = 32, 0.0, 5000
    c.optim.update(schedule="linear", warmup_steps=1000, lr=1e-4, warmup_lr=4e-6, final_lr=4e-10)
    c.optim.update(b1=0.95, b1_peak=0.85, eps=1e-6, weight_decay=0.0)
    c.eval.update(every=500, batch_size=32)
    c.probe.measures = ("attention_output", "tokens", "attention_branch")
    return c.lock()


def landmarks(number: int) -> dict[str, Any]:
    """The keys of a model's Nyström attention of so many landmarks, without the convolution, as Leaner Transformers
    counts it; of exact attention for 0."""
    if not number:
        return {"attention": "softmax"}
    return {"attention": "nystrom", "landmarks": number, "convolution": 0}


def check(c: Any) -> None:
    """Raises ConfigError on the first rule for token sequences that `c` breaks."""
    check_classes(c)
    m = c.model
    require(m.towers in (1, 2), f"model.towers={m.towers}: 1, or 2 for pairs of sequences.")
    require(
        1 <= c.data.max_length <= m.max_length,
        f"data.max_length={c.data.max_length} tokens are kept of an example, and the model has positions for "
        f"model.max_length={m.max_length}. Keep at least 1 and at most as many.",
    )
    require(
        c.data.name.partition(":")[0] not in WHOLE or c.data.max_length == m.max_length,
        f'data.name="{c.data.name}" gives whole images: data.max_length={c.data.max_length} and '
        f"model.max_length={m.max_length} must both be their number of pixels.",
    )
    require(
        not m.landmarks or m.landmarks <= m.max_length,
        f"model.landmarks={m.landmarks} are means of tokens, of which there are model.max_length={m.max_length}. "
        "Take at most as many.",
    )
