"""A small lean GPT on bundled novels: 2 layers, 8 heads of dimension 16, d_model 128, MLP 512, rows of 128 tokens.

Command:   python -m leanformer.train --config=configs/quickstart_gpt.py --workdir=runs/quickstart_gpt
           then python -m leanformer.generate --workdir=runs/quickstart_gpt --prompt="It is a truth"
Data:      five novels by Jane Austen, 2.8 MB to train on and 0.3 MB to evaluate on, every tenth chapter; BPE of 512
           tokens, trained on them. All in the package.
Hardware:  two CPU cores, 2 to 5 minutes.
Expected:  2.81 to 2.87 nats/token, 1.80 to 1.84 bits/byte, on the chapters held out; three seeds. A bigram model of
           the same tokens, smoothed by what is best there, has 3.53 and 2.26 (study/heads/bigram.py).
Counts:    478,720 parameters.
"""

from leanformer import config


def get_config() -> config.ConfigDict:
    c = config.language()
    c.batch_size, c.total_steps = 16, 1100
    c.dtype = "float32"  # CPUs have no fast bfloat16
    c.data.update(name="bundled:austen", tokenizer="bpe:512", workers=0)
    c.model.update(vocabulary=512, max_length=128, width=128, depth=2, num_heads=8, head_dim=16, mlp_dim=512)
    c.model.update(activation="gelu_tanh", qkv_bias=True, tied=True, head_bias=False, dropout=0.0)
    c.optim.update(lr=3e-3, schedule="cosine", warmup_steps=50, weight_decay=0.1, b2=0.95, clip_norm=1.0)
    c.eval.update(every=400, batch_size=64)
    c.checkpoint.every = 100
    c.probe.every = 400
    return c
