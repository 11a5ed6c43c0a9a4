"""GPT-2 as published, the smallest: 12 layers, 12 heads of dimension 64, d_model 768, MLP 3072, 1,024 tokens.

Command:   python -m leanformer.train --config=configs/gpt2.py --workdir=DIR
           with its weights: --config.init_from.path=model.safetensors --config.init_from.layout=huggingface
Data:      any texts, data/texts/train.txt or .jsonl and test; GPT-2's vocab.json and merges.txt in data/gpt2.
Hardware:  8 x H100 in bfloat16; 0.5 M tokens a step. Not measured.
Expected:  not trained here, and nothing is claimed.
Counts:    124,439,808 parameters.
"""

from leanformer import config


def get_config() -> config.ConfigDict:
    c = config.language()
    c.batch_size, c.total_steps = 512, 19_000
    c.data.name = "text:data/texts"
    c.model.update(max_length=1024, width=768, depth=12, num_heads=12, head_dim=64, mlp_dim=3072)
    c.model.update(activation="gelu_tanh", qkv_bias=True, tied=True, head_bias=False, dropout=0.0)
    c.optim.update(lr=6e-4, schedule="cosine", warmup_steps=700, final_lr=6e-5, weight_decay=0.1, b2=0.95)
    c.optim.clip_norm = 1.0
    c.eval.batch_size = 64
    return c
