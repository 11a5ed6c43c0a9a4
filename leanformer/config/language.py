"""Configs of causal and masked language models."""

from typing import Any

from leanformer.config import common, declare
from leanformer.config.declare import ConfigDict, dataclass
from leanformer.config.models import model
from leanformer.config.rules import require


@dataclass(frozen=True)
class Data(common.Data):
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
    data: Data = Data()
    optim: common.Optim = common.Optim(schedule="constant", lr=3e-4, weight_decay=0.01)
    eval: common.Eval = common.Eval(every=500, batch_size=128)
    probe: common.Probe = common.Probe(every=500)


@dataclass(frozen=True)
class Masked(Language):
    task: str = "masked"
    batch_size: int = 8192
    total_steps: int = 5000
    mask_share: float = 0.25  # fraction of the tokens of a row that is predicted, see leanformer/data/text/masking.py
    data: Data = Data(name="text:data/pile", tokenizer="wordpiece:32768")
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
    c.model = model("gpt", width=512, depth=12, num_heads=12, head_dim=42, mlp_dim=2048, max_length=64, dropout=0.2)
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
    """Return the section `model` of Cramming's BERT, with other values of keys."""
    m = model("bert", width=768, depth=16, num_heads=12, head_dim=64, mlp_dim=1536, vocabulary=32768, max_length=128)
    m.update(positions="sinusoidal", post_norm=False, gated=True, mlp_bias=False, qkv_bias=False, out_bias=False)
    m.update(values)
    return m


def check_language(c: Any) -> None:
    """Raise ConfigError at the first invalid key of a config of language modelling, causal or masked."""
    require(c.data.separator != "", 'data.separator="" is empty. Leave it unset, or set the separating text.')


def check_masked(c: Any) -> None:
    """Raise ConfigError at the first invalid key of a config of masked language modelling."""
    check_language(c)
    share, length = c.mask_share, c.model.max_length
    require(share < 1, f"mask_share={share} must be a fraction below 1.")
    require(
        share * length >= 1,
        f"mask_share={share}: less than one token of model.max_length={length}. Increase one of them.",
    )
