"""Nyströmformer on Image of the Long Range Arena, CIFAR-10 pixel by pixel: 1 layer, 4 heads of dimension 32 (lean).

Command:   python -m leanformer.train --config=configs/nystromformer_image_1x4.py --workdir=DIR
           then python -m leanformer.evaluate --workdir=DIR --best --split=test
Data:      as in configs/nystromformer_image.py.
Hardware:  one GPU; 256 x 1,024 tokens a step. Not measured.
Expected:  38.2 % on the test split (Table 3).
Counts:    158,090 parameters; reported: 191.2 k. The reported count is that of 8 heads, more than the original's:
           configs/nystromformer_image.py:depth=1,heads=8.
"""

from leanformer import config


def get_config() -> config.ConfigDict:
    return config.load_sibling(__file__, "nystromformer_image", "depth=1,heads=4")
