"""GPT-2 on TinyStories, the original of Leaner Transformers, Table 2: 12 layers, 12 heads of dimension 42, MLP 2048.

Command:   python -m leanformer.train --config=configs/gpt2_tinystories_12x12.py --workdir=DIR
Data:      the first 12,000 stories of TinyStories' training file, as published, in data/tinystories/train.txt; GPT-2's
           vocab.json and merges.txt in data/gpt2. The first 90 % of the tokens are trained on.
Hardware:  one GPU; 2,000 steps of 8,192 tokens. Not measured.
Expected:  validation loss 2.47 nats/token, as reported in Table 2; one run, no spread given.
Counts:    89,160,785 parameters; reported: 89 M. 51.5 M of them are the embeddings and the head.
Differs:   the original drops attention weights too (here model.attention_dropout=0.2, which leaves cuDNN's kernel),
           decays biases, norms and positions as well, and takes the mean of 200 random batches for its validation
           loss; here it is of every token. Its 12 heads are of 512 // 12 = 42.
"""

from leanformer import config


def get_config() -> config.ConfigDict:
    c = config.language()
    c.data.update(train_split="train[:90%]", eval_split="train[90%:]", separator="<|endoftext|>", documents=12_000)
    return c
