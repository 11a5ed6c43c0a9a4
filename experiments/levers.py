"""What the levers do to one attention block at initialisation, beside figures of a calculation that shares no code.

python -m experiments.levers
"""

from typing import Any

import jax
import numpy as np
from flax import nnx

from leanformer import conditioning
from leanformer.layers import levers
from leanformer.layers.context import Context
from leanformer.layers.multihead import MultiHeadAttention


MEASURES = ("relative_attention_entropy", "self_weight", "largest_logit")
INITIAL = {  # beside the figures of a calculation in float64 that the levers were first held against
    "base 12x64": ({}, 150, 0.991),
    "16x64": ({"heads": 16}, 127, 0.991),
    "24x32": ({"heads": 24, "head_dim": 32}, 139, 0.991),
    "QK-norm": ({"qk_norm": "rmsnorm"}, 28, 0.91),
    "logits x 4": ({"logit_scale": 4 / 8}, 20, 0.86),
    "logits x 16": ({"logit_scale": 16 / 8}, 5, 0.25),
    "λ 0.5 on Q, K, V": ({"spectral": 0.5}, 43, 0.96),
    "λ 2 on Q, K, V": ({"spectral": 2.0}, 3.2, 0.0),
    "λ 10 on Q, K, V": ({"spectral": 10.0}, 3.0, 0.0),
    "λ 10 on V": ({"spectral": 10.0, "levers_on": "v"}, 139, 0.991),
    "orthogonal Q, K, V": ({"qkv_init": "orthogonal"}, 117, 0.991),
    "SVD start of Q, K, V": ({"qkv_init": "spectral"}, None, None),
    "σReparam": ({"sigma_reparam": True}, None, None),
    "graying 0.7, SVD": ({"graying": (0.7, "svd")}, 137, 0.991),
    "graying 0.5, SVD": ({"graying": (0.5, "svd")}, 129, 0.991),
    "graying 0.7, DCT": ({"graying": (0.7, "dct")}, None, None),
    "graying 0.5, DCT": ({"graying": (0.5, "dct")}, None, None),
    "norm of layer 12 / √12": ({"shrunk": 12**-0.5}, None, None),
}


def initial(draws: int) -> str:
    """One block's attention at the start: 197 LayerNormed Gaussian tokens of width 768, weights sd 0.02, biases 0; the
    median over draws of weights and tokens. Value residual and layer scale change nothing of a first layer."""
    lines = ["| arm | κ of attention output | expected | entropy / ln N | expected | self-weight | largest logit |"]
    lines.append("|---" * 7 + "|")
    for name, (options, kappa, entropy) in INITIAL.items():
        found = np.median([at_start(seed, **options) for seed in range(draws)], axis=0)
        said = [
            f"{found[0]:.3g}",
            _or_none(kappa),
            f"{found[1]:.3f}",
            _or_none(entropy),
            *(f"{x:.3g}" for x in found[2:]),
        ]
        lines.append(f"| {name} | {' | '.join(said)} |")
    return "\n".join(lines)


def _or_none(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def at_start(
    seed: int, heads: int = 12, head_dim: int = 64, graying: Any = None, shrunk: float = 1, **options: Any
) -> Any:
    module = MultiHeadAttention(768, heads, head_dim, rngs=nnx.Rngs(seed), **options)
    x = np.random.default_rng(seed).standard_normal((1, 197, 768)).astype(np.float32)
    x = levers.grayed(jax.numpy.asarray(x), *graying) if graying else x
    x = shrunk * jax.nn.standardize(x, axis=-1)
    _, arrays, _ = module(x, Context())
    taken = conditioning.tap(MEASURES)(arrays)
    rest = [float(np.max(v.value) if n == "largest_logit" else np.mean(v.value)) for n, v in taken.items()]
    return [float(conditioning.condition(arrays["out"].reshape(1, 197, -1)).condition_number[0]), *rest]


if __name__ == "__main__":
    print(initial(3))
