"""Configs of causal and masked language models, and of sentence tasks, such as GLUE's."""

from typing import Any, NamedTuple

from leanformer.config import architectures, common, declare
from leanformer.config.declare import ConfigDict, Literal, dataclass
from leanformer.config.rules import check_length, require


@dataclass(frozen=True)
class LanguageData(common.Data):
    name: str = "text:data/tinystories"  # training data: text:<folder> or bundled:austen, see leanformer/data/text
    # training split: stem of files, name of a folder of files, or "all"; with a fraction of its tokens: "all[:90%]"
    train_split: str = "train"
    # evaluation split: stem of files, name of a folder of files, or "all"; with a fraction: "all[90%:]"
    eval_split: str = "test"
    # tokenizer: a folder or file, "bytes", "bpe:1024" or "wordpiece:32768" (trained on all files of train_split)
    tokenizer: str = "data/gpt2"
    separator: str | None = None  # separator between the documents of a .txt file; one document per file if unset
    documents: int = 0  # number of documents read from the start of each split; 0 = all
    # folder of tokenised data, built once by data.workers processes; an interrupted build starts again;
    # ~/.cache/leanformer/texts if unset
    dir: str | None = None


@dataclass(frozen=True)
class Language(common.Common):
    task: str = "language"
    batch_size: int = 128
    total_epochs: float = 0.0
    total_steps: int = 2000
    # training length in tokens, including padding of packed rows; excludes the other total_... keys; 0 = off
    total_tokens: float = 0.0
    logits_at_once: int = 2**27  # logits (tokens x vocabulary) that the loss holds at a time, summed over devices
    data: LanguageData = LanguageData()
    optim: common.Optim = common.Optim(schedule="constant", lr=3e-4, weight_decay=0.01)
    eval: common.Eval = common.Eval(every=500, batch_size=128)
    probe: common.Probe = common.Probe(every=500)


@dataclass(frozen=True)
class Masked(Language):
    task: str = "masked"
    batch_size: int = 8192
    total_steps: int = 5000
    mask_share: float = 0.25  # fraction of the tokens of a row that is predicted, see leanformer/data/text/rows.py
    data: LanguageData = LanguageData(name="text:data/pile", tokenizer="wordpiece:32768")
    optim: common.Optim = common.Optim(
        schedule="linear",
        warmup_steps=3750,
        lr=1e-3,
        warmup_lr=2.5e-4,
        b2=0.98,
        eps=1e-12,
        weight_decay=0.01,
        clip_norm=0.5,
    )
    eval: common.Eval = common.Eval(every=1000, batch_size=256)
    checkpoint: common.Checkpoint = common.Checkpoint(every=1000)
    probe: common.Probe = common.Probe(
        every=1000, measures=("attention_output", "tokens", "attention_branch", "attention_entropy")
    )


def language() -> ConfigDict:
    """Return the locked config of causal language modelling.

    The defaults are the recipe of Leaner Transformers' GPT-2 on TinyStories (section 4.2), its original of 12 layers
    and 12 heads.

    >>> language().task
    'language'
    """
    c = declare.section(Language())
    c.model = architectures.model_section(
        "gpt", width=512, depth=12, num_heads=12, head_dim=42, mlp_dim=2048, max_length=64, dropout=0.2
    )
    c.model.update(activation="relu", qkv_bias=False, tied=False, head_bias=True)
    return c.lock()


def masked() -> ConfigDict:
    """Return the locked config of masked language modelling.

    The defaults are the recipe of Cramming (Geiping & Goldstein 2023), with its BERT, the baseline of Leaner
    Transformers' Table 1; in steps instead of time, and without batch-size ramp.

    >>> masked().task
    'masked'
    """
    c = declare.section(Masked())
    c.model = bert()
    return c.lock()


def bert(**values: Any) -> ConfigDict:
    """Return the section `model` of Cramming's BERT, with changed `values`."""
    m = architectures.model_section(
        "bert", width=768, depth=16, num_heads=12, head_dim=64, mlp_dim=1536, vocabulary=32768, max_length=128
    )
    m.update(positions="sinusoidal", post_norm=False, gated=True, mlp_bias=False, qkv_bias=False, out_bias=False)
    m.update(values)
    return m


class Glue(NamedTuple):
    outputs: int  # of the model: classes, or 1 for a regression
    score: str
    dev: str = "dev"  # evaluation split


GLUE = {  # by data.name (Wang et al. 2019, Table 1)
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
class SentencesData(common.Data):
    # training data: sst2, cola, mrpc, qqp, stsb, mnli, qnli or rte; or tsv:<folder>, see leanformer/data/sentences.py
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
    data: SentencesData = SentencesData()
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
    outputs = c.model.num_classes
    scores = SCORES.get(outputs, SCORES_OF_CLASSES)
    require(
        c.score in scores,
        f'score="{c.score}": not a metric for model.num_classes={outputs}. Choose one of: {", ".join(scores)}.',
    )
    check_length(c, least=5)
