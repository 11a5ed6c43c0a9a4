"""Crammed BERT, the original of Leaner Transformers, Table 1: 16 layers, 12 heads of dimension 64, d_model 768.

Command:   python -m leanformer.train --config=configs/bert_crammed_16x12.py --workdir=DIR
Data:      the Pile, or any texts, as data/pile/train.txt or .jsonl and test; WordPiece of 32,768 tokens is trained on
           them. Text is in lower case without accents; other than in Cramming what is not ASCII stays, no document is
           left out for its compression, and rows are drawn in any order and not sorted by their number of full stops.
Recipe:    Cramming's, but for its clock and its ramp. There the rate follows the share of 24 hours that has gone, here
           the steps. There the batch grows to 8,192 by accumulating more and more micro-batches; that ramp is not
           reproduced, the batch is 8,192 from the start: optax.MultiSteps would make every micro-batch a step of the
           loop, which clips, averages weights, skips and logs by the step. 5,000 steps are about one pass over the 43 M
           rows of a published set, and this repository's choice: equal steps for both models.
Hardware:  one GPU in bfloat16, 128 rows at a time; on several, --config.accumulate=8 or so. Not measured.
Expected:  not trained here. The print, after GLUE: MNLI 83.8, SST-2 92.3, STS-B 86.3, RTE 55.1, QNLI 90.1, QQP 87.3,
           MRPC 85.0, CoLA 48.9, mean 78.6; no spread given.
Counts:    119,589,889 parameters; reported: 119 M (cut off, not rounded).
"""

from leanformer import config


def get_config() -> config.ConfigDict:
    c = config.masked()
    c.accumulate = 64
    return c
