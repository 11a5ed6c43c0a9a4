"""Watched models of timm and transformers, loaded from folders: python torch_peer.py JOBS.json.

Runs in the environment with PyTorch.

Each job has library, auto (class of transformers), folder, head_dim (of timm's attention, or null), inputs (npz), and
measures. Prints a JSON list: for each job {layer: {measure: values by example and head}}, and the statuses.
"""

import importlib.util
import json
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import transformers

import leanformer


if importlib.util.find_spec("torchvision") is None:  # needed only by timm's datasets, but always imported
    names = (
        "",
        ".datasets",
        ".datasets.folder",
        ".transforms",
        ".transforms.functional",
        ".ops",
        ".ops.misc",
        ".utils",
    )
    sys.modules.update({f"torchvision{name}": mock.MagicMock() for name in names})
    sys.modules["torchvision.ops.misc"].FrozenBatchNorm2d = type("FrozenBatchNorm2d", (torch.nn.Module,), {})


def load(job):
    if job["library"] == "timm":
        import timm

        options = {}
        if job["head_dim"]:
            import timm.layers

            class Lean(timm.layers.Attention):
                def __init__(self, dim, num_heads=8, **other):
                    super().__init__(dim, num_heads, attn_head_dim=job["head_dim"], **other)

            options["attn_layer"] = Lean
        return timm.create_model(f"local-dir:{job['folder']}", pretrained=True, **options).eval()
    return getattr(transformers, job["auto"]).from_pretrained(job["folder"]).eval()


def call(model, job):
    arrays = {name: torch.from_numpy(x) for name, x in np.load(job["inputs"]).items()}
    with torch.no_grad():
        if "image" in arrays:
            pixels = arrays["image"].permute(0, 3, 1, 2)
            return model(pixels) if job["library"] == "timm" else model(pixel_values=pixels)
        mask = torch.arange(arrays["tokens"].shape[1])[None] < arrays["lengths"][:, None]
        return model(input_ids=arrays["tokens"].long(), attention_mask=mask.long())


def measure(job):
    model = load(job)
    with leanformer.watch(model, measures=job["measures"]) as w:
        call(model, job)
    values = {
        layer.name: {name: tally.values[:, :, 0].tolist() for name, tally in layer.total.items()}
        for layer in w.layers.values()
    }
    return {"values": values, "status": [layer.status() for layer in w.layers.values()], "unmatched": w.unmatched}


if __name__ == "__main__":
    print(json.dumps([measure(job) for job in json.loads(Path(sys.argv[1]).read_text())]))
