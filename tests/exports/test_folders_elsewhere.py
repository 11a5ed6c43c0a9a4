"""Exported folders loaded by transformers and timm, with the code of their READMEs.

LEANFORMER_PEER_PYTHON is the Python of an environment with torch, timm, transformers and leanformer's requirements.
"""

import json
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import ROOT, run, subprocess_environment

from leanformer import tasks
from leanformer.data.text.tokenizer import train_bpe, train_wordpiece
from leanformer.exports import folders
from leanformer.training import inference, model_setup
from tools.exports import CASES, IMAGE, LEAN, case_config, random_weights


PEER = os.environ.get("LEANFORMER_PEER_PYTHON")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PEER is None, reason="needs an environment with PyTorch, timm and transformers"),
]


def run_peer(*words, cwd=ROOT):
    status, out, err = run([PEER, *words], cwd=cwd, env=subprocess_environment(PYTHONPATH=str(ROOT)), timeout=900)
    assert status == 0, err
    return out


def test_every_format_of_every_model_has_equal_logits():
    """Logits agree to 1e-5; the table has as many cells as docs/formats.md."""
    table = run_peer("-m", "tools.exports")
    document = (ROOT / "docs" / "formats.md").read_text()
    rows = {row.split(" | ")[0]: re.findall(r"\| (\d\.\de[+-]\d\d)", row) for row in table.splitlines()}
    for name in CASES:
        (line,) = (line for line in document.splitlines() if line.startswith(f"| {name} |"))
        values = rows[f"| {name}"]
        assert len(values) == len(re.findall(r"\| (\d\.\de[+-]\d\d)", line)) and all(float(x) < 1e-5 for x in values)


@pytest.mark.parametrize("library", ["huggingface", "timm"])
def test_code_of_the_readme_runs(tmp_path, library):
    model = model_setup.set_up_model(case_config("images", "vit", IMAGE | LEAN))
    folders.write_folder(tmp_path, model, random_weights(model), library, folders.Origin())
    (code,) = re.findall(r"```python\n([^`]*)```", (tmp_path / "README.md").read_text())
    code += "\nimport torch\nprint(sum(p.numel() for p in model.parameters()))"
    params, _ = model.weights
    assert int(run_peer("-c", code, cwd=tmp_path)) == sum(x.size for x in jax.tree.leaves(params))


TEXTS = ["a bear saw the bird sing all day long"] * 3
WORDPIECE = train_wordpiece(TEXTS, 40)
MASKED, LABELLED, PROMPT = "a [MASK] saw", "a bear saw", "a"
PIPELINES = {  # case, tokenizer, pipeline, and its arguments
    "BERT, masked": (WORDPIECE, "fill-mask", f"{MASKED!r},top_k=3"),
    "BERT, classifier": (WORDPIECE, "text-classification", f"{LABELLED!r},top_k=None"),
    "GPT-2": (train_bpe(TEXTS, 258), "text-generation", f"{PROMPT!r},max_new_tokens=5,do_sample=False"),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_pipelines_match_our_models(tmp_path, name):
    tokenizer, kind, call = PIPELINES[name]
    task, family, arguments = CASES[name]
    model = model_setup.set_up_model(case_config(task, family, arguments | {"vocabulary": tokenizer.vocabulary}))
    weights = random_weights(model)
    folders.write_folder(tmp_path, model, weights, "huggingface", folders.Origin(tokenizer=tokenizer.json()))
    code = f"import json, transformers\nprint(json.dumps(transformers.pipeline({kind!r}, model='.')({call})))"
    rows = json.loads(run_peer("-c", code, cwd=tmp_path).splitlines()[-1])
    ours = model.merge(weights)
    if family == "gpt":
        (tmp_path / "tokenizer.json").write_text(tokenizer.json())
        loaded = inference.LoadedModel(ours, model.config, tasks.build_task(model.config), 0, False, (), tmp_path)
        assert rows[0]["generated_text"] == PROMPT + loaded.generate(PROMPT, 5, temperature=0.0)
        return
    (encoded,) = tokenizer.encode([LABELLED if task == "sentences" else MASKED])
    logits = np.asarray(ours(jnp.asarray([[2, *encoded, 3]]))[0][0])
    if task == "masked":
        assert [row["token"] for row in rows] == np.argsort(-logits[2])[:3].tolist()
    else:
        expected = np.sort(np.asarray(jax.nn.softmax(logits)))[::-1]
        np.testing.assert_allclose([row["score"] for row in rows], expected, rtol=1e-5)
