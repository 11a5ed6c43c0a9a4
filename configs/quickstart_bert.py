"""A small lean BERT on bundled novels: 2 layers, 8 heads of dimension 16, d_model 128, gated MLP 256, rows of 64.

Command:   python -m leanformer.train --config=configs/quickstart_bert.py --workdir=runs/quickstart_bert
Data:      five novels by Jane Austen, 2.8 MB to train on and 0.3 MB to evaluate on, every tenth chapter; WordPiece of
           1,024 tokens, trained on them. All in the package.
Recipe:    Cramming's architecture but for rotary positions; with its sinusoids so small a model learned little in as
           many steps (study/LOG.md).
Hardware:  two CPU cores, 217 s of steps while others ran on them.
Expected:  3.27 nats a masked token, 33.7 % of them told, on the chapters held out; seed 0.
Counts:    460,288 parameters.
"""

from leanformer import config


def get_config() -> config.ConfigDict:
    c = config.masked()
    c.batch_size, c.total_steps = 32, 1200
    c.dtype = "float32"  # CPUs have no fast bfloat16
    c.data.update(name="bundled:austen", tokenizer="wordpiece:1024", workers=0)
    c.model.update(vocabulary=1024, max_length=64, width=128, depth=2, num_heads=8, head_dim=16, mlp_dim=256)
    c.model.update(positions="none", rotary=10_000.0)
    c.optim.update(lr=3e-3, schedule="cosine", warmup_steps=100, warmup_lr=0.0, eps=1e-8, clip_norm=1.0)
    c.eval.update(every=400, batch_size=64)
    c.checkpoint.every = 400
    c.probe.every = 400
    return c
