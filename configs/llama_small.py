"""A small Llama: rotary positions, RMSNorm, a gated SiLU, no biases; 12 layers, 12 heads that share 4 of keys.

Command:   python -m leanformer.train --config=configs/llama_small.py --workdir=DIR
Data:      as in configs/gpt2.py.
Hardware:  8 x H100 in bfloat16; 0.5 M tokens a step. Not measured.
Expected:  a little under configs/gpt2.py at equal tokens; not measured.
Counts:    114,114,048 parameters.
"""

from leanformer import config


def get_config() -> config.ConfigDict:
    c = config.load_sibling(__file__, "gpt2")
    c.model.update(positions="none", rotary=10_000.0, norm="rmsnorm", num_kv_heads=4)
    c.model.update(activation="silu", gated=True, mlp_dim=2048, mlp_bias=False, qkv_bias=False, out_bias=False)
    return c
