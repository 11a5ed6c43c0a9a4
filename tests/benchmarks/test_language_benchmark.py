"""The language benchmark: its tables at a small size with a peer of known seconds, and its refusals."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from messages import mentions
from processes import QUICK


pytestmark = pytest.mark.slow  # processes, each of which imports JAX and times a model
BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "language.py"

PEER = """#!{python}
import json, sys, time
if sys.argv[1] == "-c":  # the question what is missing
    print("")
else:
    told = json.loads(sys.argv[2])["told"]
    print(json.dumps({{"versions": "a peer", "parameters": {parameters} + told}}), flush=True)
    for _, seconds in zip(sys.stdin, (50.0, 20.0)):
        print(seconds, flush=True)
    time.sleep(0.2)  # and then speaks: to somebody who listens
    print(json.dumps({{"CPU s": 40.0}}))
"""


def measured(*options: str) -> subprocess.CompletedProcess:
    one_device = os.environ | {"XLA_FLAGS": QUICK, "JAX_COMPILATION_CACHE_DIR": os.environ["LEANFORMER_TEST_CACHE"]}
    command = [sys.executable, BENCHMARK, "--tiny", "--rounds=2", *options]
    return subprocess.run(command, capture_output=True, text=True, env=one_device)


def test_tables_and_another_model(tmp_path):
    """Memory falls with pieces; bytes are a token each."""
    width, inner, mlp, vocabulary, length = 12, 12, 24, 101, 12
    layer = 4 * width * inner + width + 2 * width * mlp + mlp + width + 4 * width
    parameters = 2 * layer + vocabulary * width + length * width + 2 * width + (width + 1) * vocabulary
    python = tmp_path / "python"
    python.write_text(PEER.format(python=sys.executable, parameters=parameters))
    python.chmod(0o755)
    found = measured(f"--python={python}", "--only=gpt2_tinystories_4x16", "--json")
    assert not found.returncode, found.stderr
    told = json.loads(found.stdout)
    (step,), (loss,), (of_bytes, bpe) = (told[table] for table in ("steps", "loss", "tokenizers"))
    assert told["versions"][1] == "a peer" and step["parameters"] == parameters
    assert step["transformers s"] == 35 and step["at best"] > 20 / (step["ours s"] + 0.001)
    assert 0 <= step["share"] < 1 and step["by CPU s"] == pytest.approx(40 / step["CPU s"], rel=0.05)
    assert loss["pieces MB"] < loss["one piece MB"] / 2 and loss["logits MB"] == pytest.approx(
        4e-6 * 24 * 101, rel=1e-3
    )
    assert of_bytes["bytes a token"] == 1 < bpe["bytes a token"] and of_bytes["MB/s"] > 0

    found = measured(f"--python={python}", "--only=bert_crammed_10x24")
    assert (
        found.returncode == 2
        and mentions(found.stderr, "bert_crammed_10x24", "transformers")
        and "Traceback" not in found.stderr
    )


@pytest.mark.parametrize(
    ("option", "parts"),
    [
        ("--python=/nowhere/python", ["pip install", "torch", "transformers"]),
        ("--only=gpt2", ["gpt2_tinystories_12x12"]),
        ("--rounds=0", [1]),
    ],
)
def test_refused(option, parts):
    found = measured(option)
    assert found.returncode == 2 and "Traceback" not in found.stderr and not found.stdout
    assert mentions(found.stderr, option.rpartition("=")[2], *parts), found.stderr


@pytest.mark.skipif(
    "LEANFORMER_PEER_PYTHON" not in os.environ, reason="wants the python of a PyTorch with transformers"
)
def test_hugging_face_itself():
    """Each model has as many parameters as Hugging Face's, which the command checks."""
    found = measured(f"--python={os.environ['LEANFORMER_PEER_PYTHON']}", "--json")
    assert not found.returncode, found.stderr
    assert len(json.loads(found.stdout)["steps"]) == 4
