"""Program for tests: one run of each text task, in sequence, in this process or in several connected processes.

python tests/run_text_tasks.py DATA FOLDER [COORDINATOR PROCESSES PROCESS]
"""

import sys
from pathlib import Path

import numpy as np

from leanformer import config, train
from leanformer.runtime import distributed


STEPS, FIRST_EVAL_STEP = 8, 4  # steps of a run, and the step of its first evaluation
TRAIN, TEST = 59, 11  # documents (and sentence pairs) of each split
WORDS = "the bear saw a bird and the bird saw a bear so they sang of it all day long".split()  # noqa: SIM905


def write_texts(folder: Path) -> None:
    """Write documents, and sentence pairs with a score, for both splits."""
    rng = np.random.default_rng(5)

    def text() -> str:
        return " ".join(rng.choice(WORDS, size=rng.integers(3, 30)))

    for split, number in (("train", TRAIN), ("test", TEST)):
        (folder / f"{split}.txt").write_text("|".join(text() for _ in range(number)))
        rows = [f"{text()}\t{text()}\t{rng.uniform(0, 5):.2f}" for _ in range(number)]
        (folder / f"{split}.tsv").write_text("\n".join(["sentence\tsentence2\tlabel", *rows]) + "\n")


def configs(data: Path, cache: Path) -> dict[str, config.ConfigDict]:
    """Return the configs by task: models large enough to be sharded, uneven evaluation batches on two processes."""
    language, masked, sentences = config.language(), config.masked(), config.sentences()
    tasks = {"language": language, "masked": masked, "sentences": sentences}
    sizes = {"width": 48, "depth": 2, "num_heads": 4, "head_dim": 8, "mlp_dim": 96, "dropout": 0.1}
    for c in tasks.values():
        c.update(batch_size=8, total_epochs=0.0, total_steps=STEPS, dtype="float32", log_every=1, loggers=())
        c.update(accumulate=2, hang_seconds=100)
        c.model.update(**sizes, max_length=24)
        c.data.update(dir=str(cache), workers=0)
        c.optim.update(lr=3e-3, schedule="cosine", warmup_epochs=0.0, warmup_steps=1)
        c.eval.update(every=FIRST_EVAL_STEP, batch_size=6)
        c.checkpoint.every = STEPS
        c.probe.every = 0
        c.mesh.update(data=1, fsdp=-1)
    for c in (language, masked):
        c.data.update(name=f"text:{data}", separator="|")
        c.logits_at_once = 8 * 24 * 20
    language.model.update(vocabulary=270, packed=True)
    language.data.tokenizer = "bpe:269"
    language.probe.update(every=STEPS, examples=4, measures=("attention_entropy", "largest_logit"))
    masked.model.vocabulary = 86
    masked.data.tokenizer = "wordpiece:53"
    sentences.model.update(vocabulary=86, num_classes=1, pooler_dim=14)
    sentences.model.attention_dropout = 0.1
    sentences.score = "spearman"
    sentences.data.update(
        name=f"tsv:{data}", dir=str(cache), eval_split="test", tokenizer="wordpiece:53", max_length=24
    )
    sentences.mesh.update(data=-1, fsdp=1)
    return tasks


def main(data: str, folder: str, *connection: str) -> None:
    if connection:
        distributed.start(connection[0], *map(int, connection[1:]))
    for name, c in configs(Path(data), Path(folder) / "cache").items():
        if train.train(c, Path(folder) / name):
            sys.exit(f"{name} did not end well.")
    distributed.leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
