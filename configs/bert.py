"""BERT as published, the base: 12 layers, 12 heads of dimension 64, d_model 768, MLP 3072, 512 tokens.

Command:   python -m leanformer.train --config=configs/bert.py --workdir=DIR
           with its weights: --config.init_from.path=model.safetensors --config.init_from.layout=huggingface
Data:      any texts, data/texts/train.txt or .jsonl and test; BERT's tokenizer.json in data/bert.
Recipe:    masked tokens alone, 15 % of each row; no pairs of sentences to be told apart.
Hardware:  8 x H100 in bfloat16; 131,072 tokens a step. Not measured.
Expected:  not trained here, and nothing is claimed.
Counts:    109,514,298 parameters with the head that tells tokens; 109,482,240 with a pooler instead.
"""

from leanformer import config


def get_config() -> config.ConfigDict:
    c = config.masked()
    c.batch_size, c.total_steps, c.mask_share = 256, 1_000_000, 0.15
    c.data.update(name="text:data/texts", tokenizer="data/bert")
    c.model.update(vocabulary=30522, max_length=512, width=768, depth=12, num_heads=12, head_dim=64, mlp_dim=3072)
    c.model.update(positions="learned", types=2, post_norm=True, gated=False, transform=True, head_bias=True)
    c.model.update(mlp_bias=True, qkv_bias=True, out_bias=True, dropout=0.1)
    c.optim.update(lr=1e-4, warmup_steps=10_000, warmup_lr=0.0, b2=0.999, eps=1e-6, clip_norm=1.0)
    return c
