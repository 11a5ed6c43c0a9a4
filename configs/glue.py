"""BERT on one of GLUE's eight tasks, with Cramming's shared recipe for all of them, "sane".

Argument: task (cola, sst2, mrpc, qqp, stsb, mnli, qnli, rte), as in --config=configs/glue.py:task=cola.

Command:   python -m leanformer.train --config=configs/glue.py:task=sst2 --workdir=DIR --config.init_from.path=RUN
           --config.init_from.new_head; all tasks, five seeds, a table: python -m study.trained.glue --init_from=RUN
Data:      GLUE's files in data/glue, or --config.data.dir: SST-2/train.tsv, SST-2/dev.tsv, CoLA/train.tsv, ...
Hardware:  one GPU; 16 x 128 tokens a step, from 780 steps (RTE) to 123,000 (MNLI). Not measured.
Expected:  as reported, (16,12): MNLI 83.8, SST-2 92.3, STS-B 86.3, RTE 55.1, QNLI 90.1, QQP 87.3, MRPC 85.0, CoLA 48.9.
Recipe:    5 epochs, batch 16, AdamW 4e-5 (0.9, 0.98), eps 1e-6, no decay, cosine with 10 % of warm-up, 128 tokens,
           dropout 0.1, no clipping; a dense layer of 1,024 with tanh on the first token. The score is dev's at the end.
Counts:    120,379,395 parameters, with two classes.
"""

from leanformer import config


def get_config(arguments: str = "") -> config.ConfigDict:
    return config.glue(config.arguments(arguments, task="sst2")["task"])
