"""`leanformer.watch` on timm's and transformers' models measures what our probe does on equal weights."""

import json
import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import ROOT, run, subprocess_environment

from leanformer import conditioning
from leanformer.exports import folders
from leanformer.training import model_setup
from tools.exports import BERT, CASES, IMAGE, LEAN, LLAMA, TEXT, XCIT, case_config, random_weights


TORCH = Path(os.environ.get("LEANFORMER_PEER_PYTHON", Path(sys.prefix) / "torch" / "bin" / "python"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not TORCH.exists(), reason="needs the environment with PyTorch of `make test-all`"),
]
MEASURES = ("attention_output", "head_output", "tokens", "attention_entropy", "relative_attention_entropy")
MEASURES += ("largest_logit", "self_weight", "head_correlation")
TOKENS = {"max_length": 40}
AGREE = {  # library, case of tools/exports.py
    "GPT-2": ("huggingface", ("language", "gpt", CASES["GPT-2"][2] | TOKENS)),
    "BERT": ("huggingface", ("masked", "bert", TEXT | BERT | TOKENS | {"transform": True, "head_bias": True})),
    "Llama": ("huggingface", ("language", "gpt", TEXT | LLAMA | TOKENS | LEAN)),
    "Llama, grouped queries": ("huggingface", ("language", "gpt", CASES["Llama"][2] | TOKENS)),
    "Qwen3": ("huggingface", ("language", "gpt", CASES["Qwen3, 5 x 16"][2] | TOKENS)),
    "ViT, transformers": ("huggingface", ("images", "vit", IMAGE | LEAN | {"image_size": 64})),
    "ViT, timm": ("timm", ("images", "vit", IMAGE | LEAN | {"image_size": 64})),
    "XCiT": ("timm", ("images", "xcit", IMAGE | XCIT)),
}
EXAMPLES = 6


def make_case(root, name):
    """Write the folder and inputs of a case. Return the peer's job, our model and the inputs."""
    library, (task, family, arguments) = AGREE[name]
    model = model_setup.set_up_model(case_config(task, family, arguments))
    weights, folder = random_weights(model), root / name.replace(" ", "_").replace(",", "")
    description, _ = folders.write_folder(folder, model, weights, library, folders.Origin())
    rng = np.random.default_rng(1)
    if task == "images":
        inputs = {"image": rng.standard_normal((EXAMPLES, *(arguments["image_size"],) * 2, 3), np.float32)}
    else:
        tokens = rng.integers(arguments["vocabulary"], size=(EXAMPLES, arguments["max_length"]))
        inputs = {"tokens": tokens.astype(np.int32), "lengths": np.array([40, 31, 40, 12, 25, 40])}
    np.savez(folder / "inputs.npz", **inputs)
    job = {"library": description.library, "auto": description.auto, "head_dim": description.head_dim}
    job |= {"folder": str(folder), "inputs": str(folder / "inputs.npz"), "measures": MEASURES}
    return job, (model, weights, inputs)


def probe(model, weights, inputs):
    """Return {measure: L B (N)} of the probe; sequences with padding one by one, without it."""
    merged = model.merge(weights)
    tap = conditioning.tap(MEASURES)

    @jax.jit
    def run(x):
        return merged(x, tap=tap)[1]

    def read(x):
        (stack,) = (stack for name, stack in run(x).items() if name in ("blocks", "layers"))
        return {
            name: np.asarray(values.condition_number if isinstance(values, conditioning.Summary) else values.value)
            for name, values in stack.items()
        }

    if "image" in inputs:
        return read(jnp.asarray(inputs["image"]))
    rows = [
        read(jnp.asarray(row[None, :length])) for row, length in zip(inputs["tokens"], inputs["lengths"], strict=True)
    ]
    return {name: np.concatenate([row[name] for row in rows], axis=1) for name in rows[0]}


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    root = tmp_path_factory.mktemp("agreement")
    made = {name: make_case(root, name) for name in AGREE}
    (root / "jobs.json").write_text(json.dumps([job for job, _ in made.values()]))
    words = [TORCH, Path(__file__).parent / "torch_peer.py", root / "jobs.json"]
    status, out, err = run(words, env=subprocess_environment(PYTHONPATH=str(ROOT)), timeout=600)
    assert status == 0, err
    results = json.loads(out.splitlines()[-1])
    return {name: (result, ours) for (name, (_, ours)), result in zip(made.items(), results, strict=True)}


@pytest.mark.parametrize("name", AGREE)
def test_watch_equals_probe(cases, name):
    """Within 1e-3, as far as float32 resolves a condition number: activations of two libraries differ by rounding."""
    result, ours = cases[name]
    expected = probe(*ours)
    layers = [layer for layer in result["values"].values() if "attention_output" in layer]
    assert result["unmatched"] == {} and len(layers) == len(expected["attention_output"])
    worst = {}
    for i, layer in enumerate(layers):
        assert set(layer) == set(expected)
        for measure, values in layer.items():
            theirs, mine = np.array(values), expected[measure][i].reshape(EXAMPLES, -1)
            assert theirs.shape == mine.shape
            deviation = np.abs(theirs - mine) / np.maximum(np.abs(mine), 0.1)
            resolved = mine < 1e3
            if resolved.any():
                worst[measure] = max(worst.get(measure, 0), deviation[resolved].max())
            assert (deviation <= np.maximum(1e-3, 3e-6 * np.abs(mine))).all(), measure
    assert worst.keys() >= set(MEASURES) & set(expected) - {"tokens", "head_output"}
    print(f"{name}: largest relative deviation " + ", ".join(f"{m} {x:.1e}" for m, x in worst.items()))
