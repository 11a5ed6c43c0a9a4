"""StableHLO programs: exported ones give the logits of the model when called without leanformer."""

import json
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import ROOT
from messages import refuses

from experiments.exports import BERT, CASES, IMAGE, TEXT, case_config, program_difference, random_weights
from leanformer.errors import ConfigError
from leanformer.exports import stablehlo
from leanformer.training import model_setup


def export_program(folder, task="images", name="vit", arguments=None, **options):
    model = model_setup.build(case_config(task, name, arguments or IMAGE))
    weights = random_weights(model)
    stablehlo.write_folder(folder, model, weights, **options)
    return model, weights


def run_without_leanformer(code, folder):
    """Run Python inside the folder, where leanformer cannot be imported."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    code = f"import sys\nsys.modules['leanformer'] = None\n{code}"
    return subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


def test_guide_example_runs_without_leanformer(tmp_path):
    """On images of 224 x 224, as in the guide; the logits are those of the model."""
    model, weights = export_program(tmp_path, arguments=IMAGE | {"image_size": 224, "patch_size": 56})
    (code,) = re.findall(r"```python\n([^`]*model\.stablehlo[^`]*)```", (ROOT / "docs" / "guide.md").read_text())
    process = run_without_leanformer(code + "np.save('logits.npy', logits)", tmp_path)
    assert process.returncode == 0, process.stderr
    task = stablehlo.tasks.build(model.config)
    batch = {"image": jnp.zeros((5, 224, 224, 3), jnp.uint8)}
    expected = jax.jit(lambda x: model.merge(weights)(*task.objective.inputs(x))[0])(batch)
    np.testing.assert_allclose(np.load(tmp_path / "logits.npy"), expected, rtol=1e-5, atol=1e-6)


def test_card_and_signature_name_the_inputs(tmp_path):
    """A sentence model has three inputs; the weights may be in several files, and one of them is a number."""
    arguments = TEXT | BERT | {"num_classes": 3, "pooler_dim": 24, "pool": "first", "positions": "sinusoidal"}
    export_program(tmp_path, "sentences", "bert", arguments, largest=20_000)
    signature = json.loads((tmp_path / "signature.json").read_text())
    shapes = {name: spec["shape"] for name, spec in signature["inputs"].items()}
    assert shapes == {"tokens": ["batch", 16], "lengths": ["batch"], "types": ["batch", 16]}
    assert signature["platforms"] == ["cpu", "cuda"] and len([*tmp_path.glob("model-*-of-*.safetensors")]) > 1
    (code,) = re.findall(r"```python\n([^`]*)```", (tmp_path / "README.md").read_text())
    process = run_without_leanformer(code + "print(logits.shape)", tmp_path)
    assert (process.returncode, process.stdout.strip()) == (0, "(2, 3)"), process.stderr


FAST = ("TNT", "Nyströmformer", "encoder of vectors")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n not in FAST else []) for n in CASES])
def test_program_matches_model_of_every_architecture(name, tmp_path):
    model, weights = export_program(tmp_path, *CASES[name])
    assert program_difference(tmp_path, model, weights) < 1e-5


def test_missing_dependency_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(stablehlo.importlib.util, "find_spec", lambda name: None)
    with refuses("flatbuffers", error=ConfigError):
        export_program(tmp_path)
