"""timm's side of peers.py: a training step under PyTorch eager (`torch_worker`).

Its JSON argument has `model` as in our config, `batch`, `clip_norm`, `mean` and `std`.
"""

import importlib.util
import sys
from unittest import mock


if importlib.util.find_spec("torchvision") is None:  # needed only by timm's datasets, but always imported
    names = ("", ".datasets", ".ops", ".ops.misc", ".transforms", ".transforms.functional")
    sys.modules.update({f"torchvision{name}": mock.MagicMock() for name in names})

import timm
import torch
import torch.nn.functional as F
import torch_worker
from timm.layers import Attention
from timm.models import davit, tnt, vision_transformer, volo, xcit
from torch import nn


class WideXca(nn.Module):
    """timm's XCA with a head dimension that is independent of the embedding dimension."""

    def __init__(self, width, num_heads, head_dim):
        super().__init__()
        self.shape, inner = (3, num_heads, head_dim), num_heads * head_dim
        self.temperature = nn.Parameter(torch.ones(num_heads, 1, 1))
        self.qkv, self.proj = nn.Linear(width, 3 * inner), nn.Linear(inner, width)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, self.shape).permute(2, 0, 3, 4, 1)  # heads x channels x tokens
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        weights = (q @ k.mT * self.temperature).softmax(-1)
        return self.proj((weights @ v).permute(0, 3, 1, 2).flatten(2))


def build_vit(m):
    result = vision_transformer.VisionTransformer(
        img_size=m["image_size"], patch_size=m["patch_size"], num_heads=1, **common_arguments(m)
    )
    for block in result.blocks:
        block.attn = Attention(m["width"], m["num_heads"], attn_head_dim=m["head_dim"], qkv_bias=True)
    return result


def build_xcit(m):
    result = xcit.Xcit(
        img_size=m["image_size"],
        patch_size=m["patch_size"],
        num_heads=m["class_heads"],
        eta=m["layer_scale"],
        tokens_norm=m["tokens_norm"],
        **common_arguments(m),
    )
    for block in result.blocks:
        block.attn = WideXca(m["width"], m["num_heads"], m["head_dim"])
    return result


def build_tnt(m):
    return tnt.TNT(
        img_size=m["image_size"],
        patch_size=m["patch_size"],
        inner_dim=m["inner_width"],
        num_heads_inner=m["inner_heads"],
        num_heads_outer=m["num_heads"],
        legacy=m["layout"] == "original",
        **common_arguments(m),
    )


def build_volo(m):
    return volo.VOLO(
        img_size=m["image_size"],
        patch_size=m["patch_size"],
        stem_hidden_dim=m["stem_width"],
        num_heads=m["num_heads"],
        use_aux_head=m["token_head"],
        **common_arguments(m, width="embed_dims", depth="layers"),
    )


def build_davit(m):
    return davit.DaVit(
        num_heads=m["num_heads"],
        window_size=m["window_size"],
        **common_arguments(m, width="embed_dims", depth="depths"),
    )


def common_arguments(m, width="embed_dim", depth="depth"):
    """Return the arguments that all of timm's architectures take, under each one's names of `width` and `depth`."""
    first, hidden = ((m[name] if isinstance(m[name], list) else [m[name]])[0] for name in ("width", "mlp_dim"))
    common = {"num_classes": m["num_classes"], "drop_path_rate": m["drop_path"], "mlp_ratio": hidden / first}
    return common | {width: m["width"], depth: m["depth"]}


BUILDERS = {"vit": build_vit, "xcit": build_xcit, "tnt": build_tnt, "volo": build_volo, "davit": build_davit}


class Step:
    """Training step of an ordinary eager trainer: normalise, mixup, soft targets, clip, fused AdamW."""

    def __init__(self, model, batch, clip_norm, mean, std):
        self.model, self.clip_norm = BUILDERS[model["name"]](model).train(), clip_norm
        matrices = [p for p in self.model.parameters() if p.ndim > 1]
        vectors = [p for p in self.model.parameters() if p.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-4, fused=True)
        side, self.classes = model["image_size"], model["num_classes"]
        self.images = torch.randint(0, 256, (batch, 3, side, side), dtype=torch.uint8)
        self.labels = torch.randint(0, self.classes, (batch,))
        self.mean, self.std = (torch.tensor(numbers)[:, None, None] for numbers in (mean, std))
        self.share = torch.distributions.Beta(0.8, 0.8)

    def __call__(self):
        x, share = (self.images / 255 - self.mean) / self.std, self.share.sample().item()
        targets = F.one_hot(self.labels, self.classes) * 0.9 + 0.1 / self.classes
        x, targets = (share * values + (1 - share) * values.flip(0) for values in (x, targets))
        loss = F.cross_entropy(self.model(x), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


if __name__ == "__main__":
    torch_worker.serve(Step, timm)
