"""GPT-2 on TinyStories, the lean model of Leaner Transformers, Table 2: 4 layers, 16 heads of dimension 32, MLP 2048.

Command:   python -m leanformer.train --config=configs/gpt2_tinystories_4x16.py --workdir=DIR
Data:      as in configs/gpt2_tinystories_12x12.py.
Hardware:  one GPU; 2,000 steps of 8,192 tokens. Not measured.
Expected:  validation loss 2.41 nats/token, as reported in Table 2; one run, no spread given. With so few steps a
           shallower model may simply learn faster.
Counts:    64,150,609 parameters; reported: 64 M. Without embeddings and head 12.6 M, where the original has 37.6 M.
"""

from leanformer import config


def get_config() -> config.ConfigDict:
    c = config.load_sibling(__file__, "gpt2_tinystories_12x12")
    c.model.update(depth=4, num_heads=16, head_dim=32)
    return c
