"""Sentences with a label, GLUE's above all: what differs from masked tokens, key by key, and the rules for them."""

from typing import Any, NamedTuple

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from leanformer.config.common import common
from leanformer.config.language import bert
from leanformer.config.rules import require


class Glue(NamedTuple):
    """What a model must have for one of GLUE's tasks, and how it is scored (Wang et al. 2019, Table 1)."""

    outputs: int  # classes; 1 for a number
    score: str
    dev: str = "dev"  # split that is evaluated on


GLUE = {  # by the word of `data.name`
    "cola": Glue(2, "matthews"),
    "sst2": Glue(2, "accuracy"),
    "mrpc": Glue(2, "f1"),
    "qqp": Glue(2, "f1"),
    "stsb": Glue(1, "pearson"),
    "mnli": Glue(3, "accuracy", "dev_matched"),
    "qnli": Glue(2, "accuracy"),
    "rte": Glue(2, "accuracy"),
}
MISMATCHED = "dev_mismatched"  # MNLI's second split
CLASSES, NUMBERS = ("accuracy", "f1", "matthews"), ("pearson", "spearman")  # scores of classes, and of numbers


def sentences() -> ConfigDict:
    """Return the config of sentences and pairs of them. Defaults: the recipe of Cramming (Geiping & Goldstein 2023) for
    all of GLUE alike, "sane", on SST-2, with its BERT, the original of Leaner Transformers' Table 1."""
    c = common("sentences")
    c.score = "accuracy"  # metric that decides: "accuracy", "f1", "matthews"; of numbers "pearson", "spearman"

    c.data.name = "sst2"  # or cola, mrpc, qqp, stsb, mnli, qnli, rte; or tsv:<folder>, see leanformer/data/sentences
    c.data.dir = "data/glue"  # folder of GLUE's download: SST-2/train.tsv, ...
    c.data.train_split = "train"  # stem of files
    c.data.eval_split = "dev"  # the same, to evaluate on
    # Folder or file; "wordpiece:4096", trained on train_split; unset: that of the run that init_from.path names
    c.data.tokenizer = placeholder(str)
    c.data.max_length = 128  # tokens of a row, special ones included; of a pair the longer sentence is cut first
    c.data.workers = 0  # processes per host that read; 0 = a thread of this process

    c.model = bert()
    c.model.max_length = 128  # positions
    c.model.num_classes = 2  # 1: a number is told, by squared error
    c.model.pool = "first"  # token that is classified; or "mean" of all
    c.model.pooler_dim = 1024  # width of a dense layer with tanh before the classifier
    c.model.dropout = 0.1  # of embeddings, branches, the MLP's hidden layer and what is classified

    c.batch_size, c.total_epochs, c.total_steps = 16, 5.0, 0
    c.optim.update(schedule="cosine", lr=4e-5, warmup_epochs=0.5, warmup_lr=0.0)
    c.optim.update(b2=0.98, eps=1e-6, weight_decay=0.0)
    c.eval.update(every=0, batch_size=64)
    c.checkpoint.update(every=1000, keep=1)
    c.probe.every = 0
    c.probe.measures = ("attention_output", "tokens", "attention_branch", "attention_entropy")
    return c.lock()


def glue(task: str) -> ConfigDict:
    """`sentences()` for one of GLUE's tasks, evaluated on its dev; of MNLI's two the mismatched one as `mm` besides.

    Raises:
        ConfigError: it is none of them.
    """
    require(task in GLUE, f"task={task}: GLUE's tasks are {', '.join(GLUE)}.")
    c, known = sentences(), GLUE[task]
    c.score, c.model.num_classes = known.score, known.outputs
    c.data.update(name=task, eval_split=known.dev)
    if task == "mnli":
        with c.unlocked():
            c.eval.more.mm = {"split": MISMATCHED, "every": 0}
    return c


def check(c: Any) -> None:
    """Raises ConfigError on the first rule for sentences that `c` breaks."""
    m, d = c.model, c.data
    scores = NUMBERS if m.num_classes == 1 else CLASSES if m.num_classes == 2 else ("accuracy", "matthews")
    require(
        c.score in scores,
        f'score="{c.score}" is none of model.num_classes={m.num_classes}: choose one of {", ".join(scores)}.',
    )
    require(
        5 <= d.max_length <= m.max_length,
        f"data.max_length={d.max_length} tokens are a row, and the model has positions for model.max_length="
        f"{m.max_length}. Take at least 5, for a pair and what is between, and at most as many as that.",
    )
    known = GLUE.get(d.name)
    require(
        known is None or m.num_classes == known.outputs,
        f'data.name="{d.name}" wants model.num_classes={known and known.outputs}, found {m.num_classes}.',
    )
