"""Config of sentence tasks, such as those of GLUE."""

from typing import Any, NamedTuple

from leanformer.config import common, declare
from leanformer.config.declare import ConfigDict, Literal, dataclass
from leanformer.config.language import bert
from leanformer.config.rules import check_length, require


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
SCORES = {1: ("pearson", "spearman"), 2: ("accuracy", "f1", "matthews")}  # by number of outputs
SCORES_OF_CLASSES = ("accuracy", "matthews")  # of three outputs and more


@dataclass(frozen=True)
class Data(common.Data):
    # training data: sst2, cola, mrpc, qqp, stsb, mnli, qnli or rte; or tsv:<folder>, see leanformer/data/sentences
    name: str = "sst2"
    dir: str = "data/glue"  # folder with the downloaded GLUE tasks: SST-2/train.tsv, ...
    train_split: str = "train"  # training split: stem of its files
    eval_split: str = "dev"  # evaluation split: stem of its files
    # tokenizer: a folder or file, or "wordpiece:4096" (trained on train_split); if unset, the tokenizer of the run in
    # init_from.path
    tokenizer: str | None = None
    # largest number of tokens of a row, including special tokens; of a pair, the longer sentence is truncated first
    max_length: int = 128
    workers: int = 0


@dataclass(frozen=True)
class Sentences(common.Common):
    task: str = "sentences"
    batch_size: int = 16
    total_epochs: float = 5.0
    # metric that selects the best checkpoint; for numeric labels "pearson" or "spearman"
    score: Literal["accuracy", "f1", "matthews", "pearson", "spearman"] = "accuracy"
    data: Data = Data()
    optim: common.Optim = common.Optim(lr=4e-5, warmup_epochs=0.5, warmup_lr=0.0, b2=0.98, eps=1e-6, weight_decay=0.0)
    eval: common.Eval = common.Eval(every=0, batch_size=64)
    checkpoint: common.Checkpoint = common.Checkpoint(every=1000, keep=1)
    probe: common.Probe = common.Probe(
        every=0, measures=("attention_output", "tokens", "attention_branch", "attention_entropy")
    )


def sentences() -> ConfigDict:
    """Return the locked config of classification or regression of sentences and sentence pairs, such as GLUE's tasks.

    The defaults fine-tune the BERT of Cramming (Geiping & Goldstein 2023) on SST-2 with Cramming's "sane" recipe, one
    recipe for all of GLUE. That is the baseline of Table 1 of Leaner Transformers.

    >>> sentences().task
    'sentences'
    """
    c = declare.section(Sentences())
    c.model = bert(num_classes=2, pooler_dim=1024, dropout=0.1)
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
            c.eval.more.mm = {"split": "dev_mismatched", "every": 0}
    return c


def check_sentences(c: Any) -> None:
    """Raise ConfigError at the first invalid key of a sentence config."""
    outputs, spec = c.model.num_classes, GLUE.get(c.data.name)
    scores = SCORES.get(outputs, SCORES_OF_CLASSES)
    require(
        c.score in scores,
        f'score="{c.score}": not a metric for model.num_classes={outputs}. Choose one of: {", ".join(scores)}.',
    )
    check_length(c, least=5)
    require(
        spec is None or outputs == spec.outputs,
        f'data.name="{c.data.name}" requires model.num_classes={spec and spec.outputs}, found {outputs}.',
    )
