"""Attack on published weights: folders of transformers and timm with one changed value in config.json at a time.

python stress/published.py --peer=PYTHON [--only=FOLDER] [--out=FILE.md]

PYTHON is that of an environment with torch, timm and transformers; it writes the folders with random weights. Every key
of every config.json is changed and removed in turn, and further keys that the libraries read are added. leanformer then
reads the weights into the model that matches the unchanged folder. The outcome is "refused", "warned of", or
"accepted", which must be harmless: the library, from the changed folder, computes the same logits as leanformer, or
refuses the folder. The table has one line per change; "WRONG" marks an accepted change of the function.
"""

import argparse
import collections
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from experiments.exports import CASES, case_config
from leanformer.errors import LeanformerError
from leanformer.training import model_setup


PEER = Path(__file__).with_name("published_peer.py")
QWEN3 = CASES["Qwen3, 5 x 16"][2] | {"num_heads": 4, "num_kv_heads": 2}
FOLDERS = {  # folder: case with its arguments, format
    "gpt2": (CASES["GPT-2"], "huggingface"),
    "bert": (CASES["BERT, masked"], "huggingface"),
    "llama": (CASES["Llama"], "huggingface"),
    "qwen3": (("language", "gpt", QWEN3), "huggingface"),
    "vit": (CASES["ViT"], "huggingface"),
    "timm_vit": (CASES["ViT"], "timm"),
    "xcit": (("images", "xcit", CASES["XCiT"][2] | {"tokens_norm": False}), "timm"),
    "tnt": (("images", "tnt", CASES["TNT"][2] | {"mlp_dim": 96, "layout": "patchwise"}), "timm"),
    "volo": (CASES["VOLO-D1"], "timm"),
    "davit": (CASES["DaViT"], "timm"),
}
TOLERANCE = 1e-5  # of logits, relative to the largest
WORDS = {"hidden_act": "relu", "activation_function": "relu", "model_type": "gpt_neo", "global_pool": "avg"}
FURTHER = {  # keys that the libraries read, beside those in the folders
    "gpt2": {"num_attention_heads": 6, "n_inner": 96},
    "bert": {"position_embedding_type": "relative_key", "pruned_heads": {"0": [1]}},
    "llama": {"rope_theta": 5e5, "partial_rotary_factor": 0.5, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "qwen3": {"use_sliding_window": True, "layer_types": ["sliding_attention"] * 2, "sliding_window": 4},
    "vit": {"head_dim": 4, "mlp_ratio": 3},
    "timm_vit": {"act_layer": "relu", "norm_layer": "rmsnorm", "pre_norm": True, "init_values": 1e-5, "fc_norm": True}
    | {"qk_norm": True, "final_norm": False, "class_token": False, "no_embed_class": True, "reg_tokens": 1}
    | {"pool_include_prefix": True, "dynamic_img_size": True, "scale_attn_norm": True, "drop_rate": 0.5},
    "xcit": {"act_layer": "relu", "norm_layer": "layernorm2d", "tokens_norm": True, "cls_attn_layers": 1}
    | {"use_pos_embed": False, "drop_rate": 0.5},
    "tnt": {"legacy": True, "first_stride": 2, "qkv_bias": True, "mlp_ratio": 2.0, "drop_path_rate": 0.5},
    "volo": {"post_layers": ["ca"], "use_aux_head": False, "mlp_ratio": 2.0, "num_heads": [6, 12, 12, 12]}
    | {"pooling_scale": 1, "use_mix_token": True, "drop_rate": 0.5},
    "davit": {"window_size": 8, "norm_eps": 1e-3, "qkv_bias": False, "attn_types": ["channel", "spatial"]}
    | {"cpe_act": True, "head_norm_first": True, "norm_layer": "layernorm", "mlp_ratio": 2, "ffn": False},
}
REMOVED = "removed"


def draw(key, value):
    """Return other values for a key."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value * 2 or 2, max(1, value // 2)] if key != "num_attention_heads" else [1, value * 2, value + 1]
    if isinstance(value, float):
        return [value * 1000 or 0.5]
    if isinstance(value, list):
        return [[x * 2 for x in value]] if all(isinstance(x, int) for x in value) else []
    return [WORDS[key]] if key in WORDS else ["another"] if isinstance(value, str) else [3] if value is None else []


def changes(folder, content):
    """Yield (section, key, value) for all changes of a folder."""
    timm = FOLDERS[folder][1] == "timm"
    for section in ("", "model_args", "pretrained_cfg") if timm else ("",):
        values = content[section] if section else content
        for key, value in values.items():
            if not isinstance(value, dict):
                yield from ((section, key, other) for other in draw(key, value))
            yield section, key, REMOVED
    for key, value in FURTHER[folder].items():
        yield "model_args" if timm else "", key, value
    yield "model_args" if timm else "", "key_of_tomorrow", 2


def write(original, target, section, key, value):
    """Write a copy of a folder with one change; weights are links."""
    target.mkdir()
    content = json.loads((original / "config.json").read_text())
    values = content[section] if section else content
    values.pop(key, None)
    if value != REMOVED:
        values[key] = value
    (target / "config.json").write_text(json.dumps(content))
    for name in ("model.safetensors", "case.json"):
        (target / name).symlink_to(original / name)


def read(model, folder, layout):
    """Return the outcome of reading a folder, and the weights if they were read."""
    err = io.StringIO()
    try:
        with contextlib.redirect_stderr(err):
            weights = model.read_weights(str(folder), layout)
    except LeanformerError as error:
        return "refused", " ".join(str(error).replace(str(folder), "").split())[:160], None
    return ("warned of" if err.getvalue() else "accepted"), err.getvalue().strip()[-100:], weights


def run_peer(python, command, folders):
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run([python, str(PEER), command, *map(str, folders)], check=True, env=environment, capture_output=True)


def difference(theirs, logits):
    """Return the largest difference from leanformer's logits, relative to the largest; infinite for other shapes."""
    theirs = np.asarray(theirs)
    same = theirs.shape == logits.shape
    return float(np.abs(theirs - logits).max() / np.abs(logits).max()) if same else float("inf")


def attack(name, root, python):
    """Return the rows (folder, key, value, outcome, how it was proven) of one folder."""
    (task, family, arguments), layout = FOLDERS[name]
    original = root / name
    run_peer(python, "make", [original])
    (original / "case.json").write_text(json.dumps({"family": name}))
    run_peer(python, "logits", [original])
    c = case_config(task, family, arguments)
    if layout == "timm":
        about = json.loads((original / "config.json").read_text())["pretrained_cfg"]
        c.data.update(mean=tuple(about["mean"]), std=tuple(about["std"]))
    model = model_setup.build(c)
    outcome, text, weights = read(model, original, layout)
    assert outcome == "accepted", (name, outcome, text)
    expected = np.asarray(json.loads((original / "logits.json").read_text())["logits"])
    rng = np.random.default_rng(1)
    side = 56 if name == "davit" else 32
    inputs = rng.integers(0, 61, (2, 12)) if task != "images" else rng.standard_normal((2, 3, side, side))
    inputs = jnp.asarray(inputs) if task != "images" else jnp.asarray(inputs.transpose(0, 2, 3, 1), jnp.float32)
    ours = np.asarray(model.merge(weights)(inputs)[0])
    error = difference(expected, ours)
    assert error < TOLERANCE, (name, error)
    rows = [[name, "(unchanged)", "", "accepted", f"logits differ by {error:.0e}"]]
    accepted = []
    for number, (section, key, value) in enumerate(changes(name, json.loads((original / "config.json").read_text()))):
        target = root / f"{name}_{number}"
        write(original, target, section, key, value)
        outcome, text, _ = read(model, target, layout)
        rows.append([name, f"{section}.{key}".strip("."), json.dumps(value), outcome, text])
        if outcome == "accepted":
            accepted.append((rows[-1], target))
    run_peer(python, "logits", [target for _, target in accepted])
    for row, target in accepted:
        result = json.loads((target / "logits.json").read_text())
        if "error" in result:
            row[3:] = "library refuses", result["error"]
        else:
            error = difference(result["logits"], ours)
            row[3:] = ("harmless" if error < TOLERANCE else "WRONG"), f"logits differ by {error:.0e}"
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", required=True, help="Python of an environment with torch, timm and transformers")
    parser.add_argument("--only", choices=FOLDERS)
    parser.add_argument("--out", help="file of the whole table")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as root:
        for name in [options.only] if options.only else FOLDERS:
            rows += attack(name, Path(root), options.peer)
            print(f"{name}: {dict(collections.Counter(row[3] for row in rows if row[0] == name))}", flush=True)
    lines = ["| folder | key | value | outcome | how proven |", "|---|---|---|---|---|"]
    lines += ["| " + " | ".join(str(cell).replace("|", "/").replace("\n", " ") for cell in row) + " |" for row in rows]
    if options.out:
        Path(options.out).write_text("\n".join(lines) + "\n")
    wrong = [line for line in lines if "| WRONG |" in line]
    print("\n".join([f"{len(rows)} folders: {dict(collections.Counter(row[3] for row in rows))}", *wrong]))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
