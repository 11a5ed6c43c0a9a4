"""Nyströmformer on Pathfinder (32 x 32, contours of 14) of the Long Range Arena, pixel by pixel: any depth and number
of heads (Table 3).

Arguments: depth, heads, landmarks, as in --config=configs/nystromformer_pathfinder.py:depth=1,heads=4; without them 2
layers, 2 heads of dimension 32, 64 landmarks (0 for exact attention), d_model 64, MLP 128. Table 3 has
2 layers x 2 heads and 1 layer x 4 heads; Figures 8 and 9 have grids for ListOps and Text only.

Command:   python -m leanformer.train --config=configs/nystromformer_pathfinder.py --workdir=DIR
           then python -m leanformer.evaluate --workdir=DIR --best --split=test
Data:      200,000 published images, 80/10/10: the folder pathfinder32/ of lra_release.gz, unpacked in data/.
Hardware:  one GPU; 256 x 1,024 tokens a step. Not measured.
Expected:  test accuracy, as reported in Table 3: 2x2 69.8 %; 1x4 69.9 %. Their difference is 0.2 standard errors of
           about 19,968 test examples. The released Nyströmformer at 2x2 has 70.94 %, with exact attention 74.16 %.
Recipe:    as released with Nyströmformer: AdamW, one cycle of the learning rate and of beta1, dropout 0.1.
Counts:    173,954 parameters, with depth=1,heads=4 157,058, without the convolution, as the paper counts. Reported:
           190.2 k for both, which depth=1,heads=8 has. With model.convolution=35, as released, 35 a head and layer
           more. What else the original does otherwise has a name, see models/nystromformer.
"""

from leanformer import config


def get_config(arguments: str = "") -> config.ConfigDict:
    a = config.arguments(arguments, depth=2, heads=2, landmarks=64)
    c = config.sequences()
    c.batch_size, c.total_steps, c.optim.warmup_steps = 256, 62_400, 312
    c.data.update(name="pathfinder:data", eval_split="val", max_length=1024)
    c.data.recipe = {"contour": 14, "seed": 0}
    c.model.update(vocabulary=512, max_length=1024, num_classes=2)
    c.eval.update(every=312, batch_size=256)
    c.model.update(depth=a["depth"], num_heads=a["heads"], **config.landmarks(a["landmarks"]))
    return c
