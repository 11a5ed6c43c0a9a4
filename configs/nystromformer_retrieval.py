"""Nyströmformer on Retrieval of the Long Range Arena, pairs of papers byte by byte: any depth and number of heads
(Table 3).

Arguments: depth, heads, landmarks, as in --config=configs/nystromformer_retrieval.py:depth=1,heads=4; without them 2
layers, 2 heads of dimension 32, 64 landmarks (0 for exact attention), d_model 64, MLP 128. Table 3 has
2 layers x 2 heads and 1 layer x 4 heads; Figures 8 and 9 have grids for ListOps and Text only.

Command:   python -m leanformer.train --config=configs/nystromformer_retrieval.py --workdir=DIR
           then python -m leanformer.evaluate --workdir=DIR --best --split=test
Data:      new_aan_pairs.{train,eval,test}.tsv of lra_release.gz in data/retrieval.
Hardware:  one GPU; 32 x 2 x 4,096 tokens a step. Not measured.
Expected:  test accuracy, as reported in Table 3: 2x2 79.3 %; 1x4 79.5 %. Their difference is 0.5 standard errors of
           17,408 test examples. The released Nyströmformer at 2x2 has 79.56 %, with exact attention 79.35 %.
Recipe:    as released with Nyströmformer: AdamW, one cycle of the learning rate and of beta1, dropout 0.1.
Counts:    395,138 parameters, with depth=1,heads=4 378,242, without the convolution, as the paper counts. Reported:
           394.8 k for both, which depth=1,heads=6 has. With model.convolution=35, as released, 35 a head and layer
           more. What else the original does otherwise has a name, see models/nystromformer.
"""

from leanformer import config


def get_config(arguments: str = "") -> config.ConfigDict:
    a = config.arguments(arguments, depth=2, heads=2, landmarks=64)
    c = config.sequences()
    c.total_steps, c.optim.warmup_steps = 30_000, 800
    c.data.update(name="pairs:data/retrieval", eval_split="eval", max_length=4000)
    c.model.update(vocabulary=512, max_length=4096, num_classes=2, towers=2)
    c.eval.update(every=300)
    c.model.update(depth=a["depth"], num_heads=a["heads"], **config.landmarks(a["landmarks"]))
    return c
