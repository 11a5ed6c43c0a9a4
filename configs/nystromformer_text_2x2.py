"""Nyströmformer on Text of the Long Range Arena, reviews byte by byte: 2 layers, 2 heads of dimension 32 (original).

Command:   python -m leanformer.train --config=configs/nystromformer_text_2x2.py --workdir=DIR
           then python -m leanformer.evaluate --workdir=DIR --best --split=test
Data:      as in configs/nystromformer_text.py.
Hardware:  one GPU; 32 x 4,096 tokens a step. Not measured.
Expected:  62.95 % on the test split (Table 3).
Counts:    370,562 parameters; reported: 371.2 k. No setting that both rows could share gives it;
           an MLP of 130 would.
"""

from leanformer import config


def get_config() -> config.ConfigDict:
    return config.load_sibling(__file__, "nystromformer_text", "depth=2,heads=2")
