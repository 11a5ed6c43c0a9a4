"""Hugging Face's side of peers.py: a training step under PyTorch eager (`torch_worker`).

Its JSON argument has `model` as in our config, `batch`, `num_masked` (tokens to predict per row, 0 for all) and
`clip_norm`.
"""

import torch
import torch.nn.functional as F
import torch_worker
import transformers
from torch import nn
from transformers.models.modernbert import modeling_modernbert


def build_gpt(m):
    """Return a GPT2LMHeadModel with the config's head dimension, biases of queries, keys, values and output head, and
    dropout of the MLP's hidden layer. The library supports none of these, so the layers are replaced."""
    width, inner = m["width"], m["num_heads"] * m["head_dim"]
    config = transformers.GPT2Config(
        vocab_size=m["vocabulary"],
        n_positions=m["max_length"],
        n_embd=width,
        n_layer=m["depth"],
        n_head=1,
        n_inner=m["mlp_dim"],
        activation_function=m["activation"],
        embd_pdrop=m["dropout"],
        resid_pdrop=m["dropout"],
        attn_pdrop=0.0,
        tie_word_embeddings=m["tied"],
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation=attention_of_device(),
    )
    result = transformers.GPT2LMHeadModel(config)
    for block in result.transformer.h:
        attention = block.attn
        attention.num_heads, attention.head_dim, attention.split_size = m["num_heads"], m["head_dim"], inner
        attention.scaling = m["head_dim"] ** -0.5
        attention.c_attn = nn.Linear(width, 3 * inner, bias=m["qkv_bias"])
        attention.c_proj = transformers.pytorch_utils.Conv1D(width, inner)
        block.mlp.act = nn.Sequential(block.mlp.act, nn.Dropout(m["dropout"]))
    result.lm_head = nn.Linear(width, m["vocabulary"], bias=m["head_bias"])
    return result


def attention_of_device():
    """Return the library's fastest attention for such short rows: its own on a CPU, PyTorch's fused one on a GPU."""
    return "eager" if torch.get_default_device().type == "cpu" else "sdpa"


class SinusoidalEmbedding(nn.Module):
    """Token embeddings plus fixed sinusoids of positions times one learned scalar, as in Cramming."""

    def __init__(self, embed, length):
        super().__init__()
        width = embed.weight.shape[1]
        angles = torch.arange(length)[:, None] * 10_000.0 ** (-torch.arange(0, width, 2) / width)
        self.embed, self.scale = embed, nn.Parameter(torch.tensor(width**-0.5))
        self.register_buffer("table", torch.stack([angles.sin(), angles.cos()], -1).flatten(1))

    def forward(self, tokens):
        return self.embed(tokens) + self.scale * self.table[: tokens.shape[1]]


def build_bert(m):
    """Return a ModernBertForMaskedLM, the library's model closest to Cramming's: pre-norm, gated, without biases, tied
    head applied to masked tokens only. Replaced are rotary positions by sinusoids, the missing norm before the first
    attention, and the transform before the head, which is removed."""
    if m["num_heads"] * m["head_dim"] != m["width"]:
        raise SystemExit("ModernBertForMaskedLM needs num_heads * head_dim = width.")
    special = dict.fromkeys(f"{name}_token_id" for name in ("pad", "bos", "eos", "cls", "sep"))
    config = transformers.ModernBertConfig(
        vocab_size=m["vocabulary"],
        max_position_embeddings=m["max_length"],
        hidden_size=m["width"],
        num_hidden_layers=m["depth"],
        num_attention_heads=m["num_heads"],
        intermediate_size=m["mlp_dim"],
        hidden_activation=m["activation"],
        layer_types=["full_attention"] * m["depth"],
        norm_bias=True,
        decoder_bias=False,
        sparse_prediction=True,
        tie_word_embeddings=True,
        attn_implementation=attention_of_device(),
        **special,
    )
    result = transformers.ModernBertForMaskedLM(config)
    modeling_modernbert.apply_rotary_pos_emb = lambda q, k, *_, **__: (q, k)
    embeddings = result.model.embeddings
    embeddings.tok_embeddings = SinusoidalEmbedding(embeddings.tok_embeddings, m["max_length"])
    result.model.layers[0].attn_norm = nn.LayerNorm(m["width"])
    result.head = nn.Identity()
    return result


class Step:
    """Training step of an ordinary eager trainer: logits of the targets, cross-entropy, clip, fused AdamW."""

    def __init__(self, model, batch, num_masked, clip_norm):
        self.model = {"gpt": build_gpt, "bert": build_bert}[model["name"]](model).train()
        self.clip_norm = clip_norm
        matrices = [p for p in self.model.parameters() if p.ndim > 1]
        vectors = [p for p in self.model.parameters() if p.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-4, fused=True)
        shape = (batch, model["max_length"])
        self.tokens, self.targets = torch.randint(0, model["vocabulary"], (2, *shape))
        self.num_masked = num_masked
        if num_masked:
            ignored = torch.rand(shape).argsort(1)[:, num_masked:]
            self.targets.scatter_(1, ignored, -100)

    def __call__(self):
        if self.num_masked:
            loss = self.model(self.tokens, labels=self.targets).loss
        else:
            loss = F.cross_entropy(self.model(self.tokens).logits.flatten(0, 1), self.targets.flatten())
        loss.backward()
        if self.clip_norm:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


if __name__ == "__main__":
    torch_worker.serve(Step, transformers)
