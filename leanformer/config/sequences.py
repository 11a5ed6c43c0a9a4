"""Config of token-sequence classification."""

from typing import Any

from leanformer.config import common, declare
from leanformer.config.declare import ConfigDict, Literal, dataclass, field
from leanformer.config.models import model
from leanformer.config.rules import check_classes, check_length, require


WHOLE = ("pixels", "pathfinder")  # data types that are images: sequences of equal length, never truncated


@dataclass(frozen=True)
class Augment:
    label_smoothing: float = 0.0  # label smoothing: fraction of the label mass spread over all classes


@dataclass(frozen=True)
class Data(common.Data):
    # training data: listops:, pathfinder:, imdb:, text:, pairs: or pixels: and a folder, see leanformer/data/sequences
    name: str = "listops:data/listops"
    train_split: str = "train"  # training split, a name that the type of data.name has
    eval_split: str = "test"  # evaluation split, such as "test", "val" or "eval"
    dir: str | None = None  # folder of TFDS data; $TFDS_DATA_DIR, or else ~/tensorflow_datasets, if unset
    max_length: int = 2000  # tokens kept per example; the rest is cut off
    # parameters: fields of listops.Recipe for generated expressions; contour and seed of pathfinder.Pathfinder
    recipe: ConfigDict = field(default_factory=ConfigDict)


@dataclass(frozen=True)
class Sequences(common.Common):
    task: str = "sequences"
    batch_size: int = 32
    total_epochs: float = 0.0
    total_steps: int = 5000
    loss: Literal["softmax", "sigmoid"] = "softmax"  # cross-entropy, or independent classes, whose losses are summed
    data: Data = Data()
    augment: Augment = Augment()
    optim: common.Optim = common.Optim(
        schedule="linear",
        warmup_steps=1000,
        lr=1e-4,
        warmup_lr=4e-6,
        final_lr=4e-10,
        b1=0.95,
        b1_peak=0.85,
        eps=1e-6,
        weight_decay=0.0,
    )
    eval: common.Eval = common.Eval(every=500, batch_size=32)
    probe: common.Probe = common.Probe(measures=("attention_output", "tokens", "attention_branch"))


def sequences() -> ConfigDict:
    """Return the locked config of token-sequence classification.

    The defaults are the recipe of the released Nyströmformer (Xiong et al. 2021) on the Long Range Arena, in which each
    task sets its own lengths.

    >>> sequences().task
    'sequences'
    """
    c = declare.section(Sequences())
    c.model = model("nystromformer", dropout=0.1)
    return c.lock()


def landmarks(number: int) -> dict[str, Any]:
    """Return {key of config.model: value} of Nyström attention with a number of landmarks; of exact attention for 0.

    Attention has no convolution, as in the parameter counts of Leaner Transformers.
    """
    if not number:
        return {"attention": "softmax"}
    return {"attention": "nystrom", "landmarks": number, "convolution": 0}


def check_sequences(c: Any) -> None:
    """Raise ConfigError at the first invalid key of a token-sequence config."""
    check_classes(c)
    check_length(c)
    require(
        c.data.name.partition(":")[0] not in WHOLE or c.data.max_length == c.model.max_length,
        f'data.name="{c.data.name}" yields whole images. Set data.max_length={c.data.max_length} and '
        f"model.max_length={c.model.max_length} both to their number of pixels.",
    )
