"""Execution of the tutorials: every command line of a page runs, in order, on small data."""

import contextlib
import importlib
import io
import lzma
import re
import shlex

import numpy as np
import pytest
from commands import ROOT
from PIL import Image

from leanformer.__main__ import COMMANDS as SUMMARIES


pytestmark = pytest.mark.slow
BUNDLED = ROOT / "leanformer" / "data" / "bundled"
IMAGES = "model.image_size=32 model.patch_size=16 model.width=32 model.depth=1 model.mlp_dim=32 dtype=float32"
IMAGES += " batch_size=32 eval.batch_size=32 total_epochs=2 optim.warmup_epochs=0 data.workers=0"
TEXT = "total_steps=4 optim.warmup_steps=0 model.depth=1 model.mlp_dim=32 model.max_length=64 eval.examples=64"
COMMANDS = {f"leanformer.{name}": importlib.import_module(f"leanformer.{name}") for name in SUMMARIES}
SMALLER = {  # config changes by workdir, added to command lines of the pages that train at full size
    "runs/flowers": IMAGES,
    "runs/heads": IMAGES,
    "runs/novel": TEXT,
    "runs/depth": TEXT,
}


def read_command_lines(page):
    """Return the words of each command line in the bash blocks of a page."""
    blocks = re.findall(r"^```bash\n(.*?)^```", (ROOT / "docs" / page).read_text(), re.MULTILINE | re.DOTALL)
    lines = (line for block in blocks for line in block.replace("\\\n", " ").splitlines())
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def follow(page, folder):
    """Run the command lines of a page in a folder; return the outputs of each command by its name."""
    outputs = {}
    for python, m, module, *words in read_command_lines(page):
        assert (python, m) == ("python", "-m")
        workdir = next((word.removeprefix("--workdir=") for word in words if word.startswith("--workdir=")), "")
        if module in ("leanformer.train", "leanformer.sweep"):
            flag = "--config." if module.endswith("train") else "--set="
            words += [f"{flag}{change}" for change in SMALLER.get(workdir, "").split()]
        out = io.StringIO()
        with contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            status = COMMANDS[module].main(words)
        assert status == 0, f"{module} {shlex.join(words)}\n{out.getvalue()}"
        outputs.setdefault(module.removeprefix("leanformer."), []).append(out.getvalue())
    return outputs


def test_image_tutorial(tmp_path, rng):
    for split, number in (("train", 64), ("val", 16)):
        for index, name in enumerate(("daisy", "poppy", "rose", "tulip")):
            folder = tmp_path / "data" / "flowers" / split / name
            folder.mkdir(parents=True)
            for i in range(number):
                image = np.full((40, 50, 3), 50 * index, np.uint8) + rng.integers(0, 50, (40, 50, 3), np.uint8)
                Image.fromarray(image).save(folder / f"{i}.jpg")
    outputs = follow("own_images.md", tmp_path)
    page_text = (ROOT / "docs" / "own_images.md").read_text()
    trial_output = outputs["train"][0]
    for line in re.findall(r"^(?:  (?:data|classes|length) .*|WARNING: .*)$", page_text, re.MULTILINE):
        assert line in trial_output, line
    assert len(re.findall(r'"file": "data/flowers/val/rose', outputs["predict"][0])) == 16
    assert (tmp_path / "runs" / "heads" / "compare" / "compare.html").is_file()
    assert (tmp_path / "flowers_timm" / "model.safetensors").is_file()


def test_text_tutorial(tmp_path):
    (tmp_path / "data" / "novel").mkdir(parents=True)
    text = lzma.decompress((BUNDLED / "austen-test.txt.xz").read_bytes())[:200_000]
    (tmp_path / "data" / "novel" / "book.txt").write_bytes(text)
    outputs = follow("own_text.md", tmp_path)
    assert "bits per byte" in outputs["evaluate"][0] and outputs["generate"][0].startswith("It is a")
    assert (tmp_path / "runs" / "depth" / "compare" / "compare.html").is_file()
    exported = {path.name for path in (tmp_path / "novel_gpt2").iterdir()}
    assert {"model.safetensors", "tokenizer.json", "README.md"} <= exported
