"""Models of transformers and timm for `published.py`: folders with random weights, and their logits on fixed inputs.

PEER_PYTHON published_peer.py make|logits FOLDER... runs in an environment with torch, timm and transformers. Each
folder is a model; `make` writes it, and `logits` writes logits.json into it, or the error that the library raised.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import json
import sys
import types
from pathlib import Path

import numpy as np
import torch


TEXT = {"vocab_size": 61, "num_hidden_layers": 2, "hidden_size": 24, "intermediate_size": 48}
LLAMA = TEXT | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 16}
BERT = TEXT | {"num_attention_heads": 3, "max_position_embeddings": 16}
GPT2 = {"vocab_size": 61, "n_embd": 24, "n_layer": 2, "n_head": 3, "n_inner": 48, "n_positions": 16}
VIT = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 48, "image_size": 32}
VIT |= {"patch_size": 8, "num_labels": 11, "layer_norm_eps": 1e-6}
TRANSFORMERS = {  # folder: config class, model class, arguments
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", GPT2),
    "bert": ("BertConfig", "BertForMaskedLM", BERT),
    "llama": ("LlamaConfig", "LlamaForCausalLM", LLAMA),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", LLAMA),
    "vit": ("ViTConfig", "ViTForImageClassification", VIT),
}
IMAGE = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2}
TIMM = {  # folder: registered name, model_args
    "timm_vit": ("vit_base_patch16_224", IMAGE | {"num_heads": 3, "mlp_ratio": 2.0}),
    "xcit": ("xcit_nano_12_p16_224", IMAGE | {"num_heads": 3, "mlp_ratio": 2.0, "patch_size": 16, "eta": 0.5}),
    "tnt": ("tnt_s_patch16_224", IMAGE | {"num_heads_outer": 3, "num_heads_inner": 2, "inner_dim": 8}),
    "volo": ("volo_d1_224", {"img_size": 32, "patch_size": 8}),
    "davit": ("davit_tiny", {"depths": [1, 1], "embed_dims": [8, 16], "num_heads": [2, 4]}),
}


def fill(model):
    """Give every parameter and running statistic a random value in which no part is negligible."""
    generator = torch.Generator().manual_seed(0)
    for name, x in [*model.named_parameters(), *model.named_buffers()]:
        if x.is_floating_point() and "inv_freq" not in name:
            drawn = 0.3 * torch.randn(x.shape, generator=generator)
            x.data = drawn.abs() + 0.5 if name.endswith("running_var") else drawn


def make(folder):
    """Write the folder of a model as its library does."""
    if folder.name in TRANSFORMERS:
        transformers = importlib.import_module("transformers")
        config, kind, arguments = TRANSFORMERS[folder.name]
        model = getattr(transformers, kind)(getattr(transformers, config)(**arguments))
        fill(model)
        model.save_pretrained(folder)
        return
    timm = import_timm()
    name, arguments = TIMM[folder.name]
    model = timm.create_model(name, num_classes=11, **arguments)
    fill(model)
    timm.models.save_for_hf(model, folder, model_args=arguments, safe_serialization=True)


class Anything(type):
    """Metaclass of classes with any attribute, each of which is such a class again."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (torch.nn.Module,), {})

    def __iter__(cls):
        return iter(())


class Stand(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stand-in for torchvision, whose transforms timm imports, and its models do not use."""

    def find_spec(self, name, path, target=None):
        found = name.split(".")[0] == "torchvision"
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if found else None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__path__, module.__getattr__ = [], lambda name: Anything.__getattr__(Anything, name)
        return module

    def exec_module(self, module):
        pass


def import_timm():
    """Return timm, with a stand-in for torchvision if it is missing."""
    if importlib.util.find_spec("torchvision") is None:
        sys.meta_path.insert(0, Stand())
    return importlib.import_module("timm")


def load(folder, family):
    if family in TRANSFORMERS:
        transformers = importlib.import_module("transformers")
        model, report = getattr(transformers, TRANSFORMERS[family][1]).from_pretrained(folder, output_loading_info=True)
        if report["missing_keys"] or report.get("mismatched_keys"):
            raise ValueError(f"missing: {sorted(report['missing_keys'])[:3]}")
        return model
    return import_timm().create_model(f"local-dir:{folder}", pretrained=True)


def compute(folder):
    """Return the logits of a folder's model on fixed inputs."""
    family = json.loads((folder / "case.json").read_text())["family"]
    model = load(folder, family).eval()
    rng = np.random.default_rng(1)
    with torch.no_grad():
        if family in ("gpt2", "bert", "llama", "qwen3"):
            return model(torch.tensor(rng.integers(0, 61, (2, 12)))).logits.numpy()
        side = 56 if family == "davit" else 32
        images = torch.tensor(rng.standard_normal((2, 3, side, side)), dtype=torch.float32)
        result = model(images)
        return (result.logits if family in TRANSFORMERS else result).numpy()


def main():
    command, *folders = sys.argv[1:]
    for folder in map(Path, folders):
        if command == "make":
            make(folder)
            continue
        try:
            result = {"logits": compute(folder).astype(float).tolist()}
        except Exception as error:  # the library refuses the folder
            result = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:120]}
        (folder / "logits.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
