"""Retrieval of D items, y = Σᵢ maxₜ aᵢ·xₜ: at least as many heads as items are needed, at any rank (Yu et al. 2025).

Arguments: heads, items, points, inner, as in --config=configs/rank_retrieval.py:heads=3; without them 4 heads for 4
items among 128 points. `inner` is the width of all heads together, as in inner=32,heads=4; 0 for heads of 8 each.

Command:   python -m leanformer.train --config=configs/rank_retrieval.py:heads=3 --workdir=DIR
Counts:    8,643 parameters; 3 heads, or 4 in an inner width of 24, 7,595.
Hardware:  two CPU cores; see study/LOG.md for what was measured.
Expected:  reported for 128 points and 4 items: 1 head 0.145, 3 heads 1.6e-3, 4 heads 5.2e-6; with an inner width of 32
           for all, 3 heads 4.8e-4, 4 heads 5.7e-7. Theirs is another model, 8,000 examples and a normalised error;
           `unexplained` is the error / the mean's error. Measured: 3 heads 0.273 to 0.277 (three seeds);
           4 heads 3.1e-4 to 8.4e-4 in six of eight seeds, 0.26 in two, where two heads look for one item; 4 heads of 6
           in an inner width of 24, as 3 heads have, 8.2e-4 and 8.5e-4 in two of three.
"""

from leanformer import config


def get_config(arguments: str = "") -> config.ConfigDict:
    a = config.arguments(arguments, heads=4, items=4, points=128, inner=0)
    c = config.points()
    c.update(batch_size=32, total_steps=8_000)
    c.data.update(name="retrieval", points=a["points"], dim=a["items"], num_items=a["items"])
    c.model.update(inputs=a["items"], outputs=1, width=32, num_heads=a["heads"], mlp_dim=64, pool="token")
    c.model.head_dim = a["inner"] // a["heads"] if a["inner"] else 8
    c.model.update(norm="none", post_norm=False, activation="gelu")
    # Softmax of small logits over 128 points is their mean, which tells nothing: at 1/√head_dim nothing was learned. Of
    # 128 points, what a head finds along some other direction says next to nothing of an item: heads found one item or
    # two and stayed there. Of 16 points they find one each, and keep it when there are more.
    c.model.update(qk_norm="unit", logit_scale=30.0)
    c.data.curriculum.update(every=2000, points=16, points_step=a["points"])
    c.optim.update(lr=3e-3, warmup_steps=300)
    return c
