"""Nyströmformer on Image of the Long Range Arena, CIFAR-10 by pixels: 2 layers, 2 heads of dimension 32 (original).

Command:   python -m leanformer.train --config=configs/nystromformer_image_2x2.py --workdir=DIR
           then python -m leanformer.evaluate --workdir=DIR --best --split=test
Data:      as in configs/nystromformer_image.py.
Hardware:  one GPU; 256 x 1,024 tokens a step. Not measured.
Expected:  37.2 % on the test split (Table 3).
Counts:    174,986 parameters; reported: 191.2 k. The reported count is that of 1 layer with 8 heads, and was probably
           copied here.
"""

from leanformer import config


def get_config() -> config.ConfigDict:
    return config.load_sibling(__file__, "nystromformer_image", "depth=2,heads=2")
