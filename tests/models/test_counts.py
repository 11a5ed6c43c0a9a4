"""Exact parameter counts of variants of shipped models, as reported by papers and by the libraries of their weights.

The shipped models themselves are in tests/config/test_configs.py.
"""

import jax
import numpy as np
import pytest
from flax import nnx

from leanformer import config, models


HEADS_OF_32 = (32, 32, 32, 32)
TNT = {"depth": 8, "num_heads": 16, "head_dim": 40, "mlp_dim": 1280}
MEDIUM = {"depth": 12, "num_heads": 16, "class_heads": 16, "class_head_dim": 32}
LARGE = {"depth": 12, "num_heads": 24, "head_dim": 32, "class_heads": 24, "class_head_dim": 32}
RETRIEVAL, IMAGE, PATHFINDER = (f"nystromformer_{task}:depth=1,heads=" for task in ("retrieval", "image", "pathfinder"))
DEEPSEEK = {
    **{"positions": "none", "rotary": 10000.0, "norm": "rmsnorm", "activation": "silu", "gated": True, "tied": False},
    **{"mlp_bias": False, "qkv_bias": False, "out_bias": False, "attention": "latent", "latent_norm": "rmsnorm"},
    **{"kv_rank": 512, "rotary_width": 64, "head_dim": 128, "value_dim": 128, "depth": 3, "max_length": 1},
}
COUNTS = [
    ("davit_b_lean", {"head_dim": HEADS_OF_32}, 67_903_976),
    ("davit_b_lean", {"head_dim": HEADS_OF_32, "channel_head_dim": HEADS_OF_32}, 73_154_536),
    ("davit_b_lean", {"depth": (1, 1, 4, 1)}, 56_328_168),
    ("davit_b_lean", {"qkv_bias": False}, 62_629_608),
    ("tnt_b_12x10", {"layout": "patchwise"}, 65_428_680),  # counts of timm's own models
    ("tnt_b_12x10", TNT, 30_883_080),
    ("tnt_b_12x10", TNT | {"layout": "patchwise"}, 30_897_800),
    ("tnt_b_12x10", TNT | {"mlp_dim": 2560}, 44_000_520),
    ("tnt_b_12x10", TNT | {"mlp_dim": 2560, "layout": "patchwise"}, 44_015_240),
    ("tnt_b_12x10", TNT | {"mlp_dim": 2560, "head_dim": 64}, 51_864_840),
    ("tnt_b_12x10", TNT | {"mlp_dim": 512, "head_dim": 64}, 30_876_936),
    ("volo_d3_original", {"mlp_dim": (1024, 2048, 2048, 2048)}, 103_119_696),
    ("volo_d3_original", {"token_head": False}, 85_812_072),
    ("volo_d3_lean", {"head_dim": (16, 32, 32, 32)}, 62_134_096),
    ("volo_d3_lean", {"token_head": False}, 46_941_032),
    ("volo_d4_original", {"mlp_dim": (1536, 3072, 3072, 3072)}, 230_736_368),
    ("volo_d4_lean", {"mlp_dim": (768, 1536, 1536, 1536)}, 85_489_136),
    ("volo_d4_lean", {"head_dim": (16, 48, 48, 48)}, 138_587_120),
    ("xcit_m_24x8", MEDIUM, 59_002_600),
    ("xcit_m_24x8", MEDIUM | {"head_dim": 32}, 46_401_256),  # no attention widened
    ("xcit_m_24x8", MEDIUM | {"class_head_dim": 64}, 61_102_824),  # class attention widened too
    ("xcit_m_24x8", MEDIUM | {"head_dim": 32, "mlp_dim": 3072, "class_mlp_dim": 2048}, 58_996_456),
    ("xcit_l_24x16", LARGE | {"head_dim": 48}, 117_962_344),
    ("xcit_l_24x16", LARGE | {"head_dim": 64}, 132_131_944),
    *((f"nystromformer_{task}", {"convolution": 35}, count) for task, count in (
        ("listops", 209_942), ("text", 370_702), ("retrieval", 395_278), ("image", 175_126), ("pathfinder", 174_094),
    )),
    *((f"nystromformer_{task}:depth=1,heads=4", {"convolution": 35 * kernel}, count) for task, kernel, count in (
        ("listops", 0, 192_906), ("text", 0, 353_666), ("retrieval", 0, 378_242), ("image", 0, 158_090),
        ("pathfinder", 0, 157_058), ("listops", 1, 193_046), ("text", 1, 353_806), ("retrieval", 1, 378_382),
        ("image", 1, 158_230), ("pathfinder", 1, 157_198),
    )),
    ("nystromformer_image", {"attention": "softmax", "landmarks": None, "convolution": None}, 174_986),
    (f"{RETRIEVAL}6", {}, 394_818),  # these variants have the reported counts, unlike the labelled rows
    (f"{IMAGE}8", {}, 191_242),
    (f"{PATHFINDER}8", {}, 190_210),
    ("bert", {"transform": False, "head_bias": False, "num_classes": 2, "pooler_dim": 768}, 109_482_240 + 768 * 2 + 2),
    (  # Llama 3.2's 1B
        "llama_small",
        {"vocabulary": 128256, "max_length": 1, "width": 2048, "depth": 16, "num_heads": 32, "num_kv_heads": 8}
        | {"head_dim": 64, "mlp_dim": 8192},
        1_235_814_400,
    ),
    # Three dense layers of DeepSeek-V2-Lite and of V3, as counted by Hugging Face's models.
    ("gpt2", DEEPSEEK | {"vocabulary": 102400, "width": 2048, "num_heads": 16, "mlp_dim": 10944}, 662_453_760),
    (
        "gpt2",
        DEEPSEEK | {"vocabulary": 129280, "width": 7168, "num_heads": 128, "mlp_dim": 18432, "query_rank": 1536},
        3_603_815_424,
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "changes", "expected"), COUNTS, ids=[f"{name} {changes}" for name, changes, _ in COUNTS]
)
def test_parameter_counts(name, changes, expected):
    arguments = config.load(name).model.to_dict() | changes | {"backend": "xla"}
    shapes = nnx.eval_shape(lambda: models.build(**arguments, rngs=nnx.Rngs(0)))
    assert sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(nnx.state(shapes, nnx.Param))) == expected
