"""A small model like nanochat: squared ReLU, norms of queries and keys, a capped, untied head; 12 layers.

Command:   python -m leanformer.train --config=configs/nanochat_small.py --workdir=DIR
Data:      as in configs/gpt2.py.
Hardware:  8 x H100 in bfloat16; 0.5 M tokens a step. Not measured.
Expected:  not measured.
Counts:    162,151,680 parameters.
Differs:   the norms here have scales; value embeddings, windows and the mix of Muon and AdamW are left out.
"""

from leanformer import config


def get_config() -> config.ConfigDict:
    c = config.load_sibling(__file__, "gpt2")
    c.model.update(positions="none", rotary=100_000.0, norm="rmsnorm", qk_norm="rmsnorm", num_heads=6, head_dim=128)
    c.model.update(activation="relu2", mlp_bias=False, qkv_bias=False, out_bias=False, tied=False, head_cap=15.0)
    return c
