"""Config defaults and validation of sentence tasks, such as those of GLUE."""

from typing import Any, NamedTuple

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from leanformer.config.common import common
from leanformer.config.language import bert
from leanformer.config.rules import require


class Glue(NamedTuple):
    """Requirements of a GLUE task (Wang et al. 2019, Table 1).

    Attributes:
        outputs: number of outputs of the model: the number of classes, or 1 for a regression.
        score: name of the metric, such as "matthews".
        dev: name of the evaluation split.
    """

    outputs: int
    score: str
    dev: str = "dev"


GLUE = {  # task name, as in data.name, to its requirements
    "cola": Glue(2, "matthews"),
    "sst2": Glue(2, "accuracy"),
    "mrpc": Glue(2, "f1"),
    "qqp": Glue(2, "f1"),
    "stsb": Glue(1, "pearson"),
    "mnli": Glue(3, "accuracy", "dev_matched"),
    "qnli": Glue(2, "accuracy"),
    "rte": Glue(2, "accuracy"),
}
MISMATCHED = "dev_mismatched"  # second evaluation split of MNLI
# Metrics of classification, and of regression.
CLASSES, NUMBERS = ("accuracy", "f1", "matthews"), ("pearson", "spearman")


def sentences() -> ConfigDict:
    """Return the locked config of classification or regression of sentences and sentence pairs, such as GLUE's tasks.

    The defaults fine-tune the BERT of Cramming (Geiping & Goldstein 2023) on SST-2 with Cramming's "sane" recipe, one
    recipe for all of GLUE. That is the baseline of Table 1 of Leaner Transformers.

    >>> sentences().task
    'sentences'
    """
    c = common("sentences")
    # metric that selects the best checkpoint: "accuracy", "f1", "matthews"; for numeric labels "pearson", "spearman"
    c.score = "accuracy"

    # training data: sst2, cola, mrpc, qqp, stsb, mnli, qnli or rte; or tsv:<folder>, see leanformer/data/sentences
    c.data.name = "sst2"
    c.data.dir = "data/glue"  # folder with the downloaded GLUE tasks: SST-2/train.tsv, ...
    c.data.train_split = "train"  # training split: stem of its files
    c.data.eval_split = "dev"  # evaluation split: stem of its files
    # tokenizer: a folder or file, or "wordpiece:4096" (trained on train_split); if unset, the tokenizer of the run in
    # init_from.path
    c.data.tokenizer = placeholder(str)
    # largest number of tokens of a row, including special tokens; of a pair, the longer sentence is truncated first
    c.data.max_length = 128
    c.data.workers = 0  # worker processes per host that read examples; 0 = one thread of the training process

    c.model = bert()
    c.model.max_length = 128  # number of positions of the model
    c.model.num_classes = 2  # number of classes; 1 = regression by squared error
    c.model.pool = "first"  # input of the classifier: "first" token, or "mean" over all tokens
    c.model.pooler_dim = 1024  # output dimension of the dense layer with tanh before the classifier
    # dropout rate of embeddings, residual branches, the MLP's hidden layer and the classifier's input
    c.model.dropout = 0.1

    c.batch_size, c.total_epochs, c.total_steps = 16, 5.0, 0
    c.optim.update(schedule="cosine", lr=4e-5, warmup_epochs=0.5, warmup_lr=0.0)
    c.optim.update(b2=0.98, eps=1e-6, weight_decay=0.0)
    c.eval.update(every=0, batch_size=64)
    c.checkpoint.update(every=1000, keep=1)
    c.probe.every = 0
    c.probe.measures = ("attention_output", "tokens", "attention_branch", "attention_entropy")
    return c.lock()


def glue(task: str) -> ConfigDict:
    """Return the config of a GLUE task, such as "cola", evaluated on dev; MNLI also on dev_mismatched, `eval.more.mm`.

    Raises:
        ConfigError: the task is unknown.
    """
    require(task in GLUE, f"task={task}: unknown GLUE task. Choose one of: {', '.join(GLUE)}.")
    c, spec = sentences(), GLUE[task]
    c.score, c.model.num_classes = spec.score, spec.outputs
    c.data.update(name=task, eval_split=spec.dev)
    if task == "mnli":
        with c.unlocked():
            c.eval.more.mm = {"split": MISMATCHED, "every": 0}
    return c


def check(c: Any) -> None:
    """Raise ConfigError at the first invalid key of a sentence config."""
    m, d = c.model, c.data
    scores = NUMBERS if m.num_classes == 1 else CLASSES if m.num_classes == 2 else ("accuracy", "matthews")
    require(
        c.score in scores,
        f'score="{c.score}": not a metric for model.num_classes={m.num_classes}. Choose one of: {", ".join(scores)}.',
    )
    require(
        5 <= d.max_length <= m.max_length,
        f"data.max_length={d.max_length}: out of range. Set at least 5 (a pair with its special tokens) and at most "
        f"model.max_length={m.max_length}, the number of positions.",
    )
    spec = GLUE.get(d.name)
    require(
        spec is None or m.num_classes == spec.outputs,
        f'data.name="{d.name}" requires model.num_classes={spec and spec.outputs}, found {m.num_classes}.',
    )
