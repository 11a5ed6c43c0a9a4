"""Crammed BERT, the lean model of Leaner Transformers, Table 1: 10 layers, 24 heads of dimension 32, d_model 768.

Command:   python -m leanformer.train --config=configs/bert_crammed_10x24.py --workdir=DIR
Data:      as in configs/bert_crammed_16x12.py, and the same recipe: equal steps. Cramming gives equal time, and so
           more text to a model of fewer layers.
Hardware:  one GPU in bfloat16. Not measured.
Expected:  not trained here. The print, after GLUE: MNLI 83.7, SST-2 92.3, STS-B 86.3, RTE 55.3, QNLI 90.0, QQP 87.3,
           MRPC 85.2, CoLA 48.9, mean 78.6; no spread given.
Counts:    84,182,017 parameters; reported: 84 M. Heads are of width 32: with 64 it would have 107.8 M.
"""

from leanformer import config


def get_config() -> config.ConfigDict:
    c = config.load_sibling(__file__, "bert_crammed_16x12")
    c.model.update(depth=10, num_heads=24, head_dim=32)
    return c
