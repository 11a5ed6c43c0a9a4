"""Checks of README and docs: command lines, config keys, links, length and Python blocks."""

import importlib
import re
import shlex

import numpy as np
import pytest
from commands import ROOT, command, run_in_process
from PIL import Image

from leanformer import cli
from leanformer.__main__ import COMMANDS
from leanformer.errors import LeanformerError


PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "study" / "README.md"]
    + [path for folder in ("launch", "docs", "tools") for path in (ROOT / folder).glob("*.md")]
)
COMMAND = re.compile(rf"(?:python -m leanformer\.|leanformer )({'|'.join(COMMANDS)})\b([^`\n|#]*)")
PLACEHOLDERS = {"FILE": "quickstart", "configs/NAME.py": "quickstart", "…": "quickstart", "FORMAT": "timm"}
REQUIRED = {"train": ("config", "workdir"), "sweep": ("config", "workdir")}  # flags that "..." stands for


def find_command_lines():
    """Yield (page, command, words) of every command line on the pages, with values in place of placeholders."""
    for page in PAGES:
        for name, rest in COMMAND.findall(re.sub(r" \\\n +", " ", page.read_text())):
            words = shlex.split(rest.replace("[", "").replace("]", ""))
            if {"...", "…"} & {*words}:
                words = [word for word in words if word not in ("...", "…")]
                words += [f"--{flag}=FILE" for flag in REQUIRED[name]]
            for i, word in enumerate(words):
                flag, equals, value = word.partition("=")
                words[i] = f"{flag}{equals}{PLACEHOLDERS.get(value, value)}"
            yield page.name, name, words


def test_command_lines_parse(monkeypatch):
    """By the parsers of the commands: flags, configs and their keys. tests/test_tutorials.py executes two pages."""
    monkeypatch.chdir(ROOT)
    parsed = []
    for page, name, words in find_command_lines():
        try:
            cli.parse(importlib.import_module(f"leanformer.{name}").main.flags, words)
        except LeanformerError as error:
            pytest.fail(f"{page}: leanformer {name} {shlex.join(words)}\n{error}")
        parsed.append((page, name))
    assert len(parsed) >= 40 and len({name for _, name in parsed}) == len(COMMANDS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_link_targets_exist(page):
    # `make docs` writes _generated/, and ends with an error if a link into it is wrong.
    targets = re.findall(r"\]\((?!https?:|_generated/)([^)#]+)", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_mentioned_files_exist():
    path = re.compile(r"\b((?:leanformer|configs|tests|study|launch|notebooks|tools)/[\w./-]+\.[a-z]\w+)\b")
    mentioned = {
        (page.name, name) for page in PAGES for name in path.findall(re.sub(r"https?://\S+", "", page.read_text()))
    }
    mentioned = {(page, name) for page, name in mentioned if "NAME" not in name}
    assert len(mentioned) > 20
    assert [(page, path) for page, path in mentioned if not (ROOT / path).exists()] == []


def test_readme_has_at_most_700_words():
    words = re.findall(r"[\w./-]*\w[\w./-]*", re.sub(r"\]\([^)]*\)", "]", (ROOT / "README.md").read_text()))
    assert len(words) <= 700


TINY = {"total_epochs": 0.0, "total_steps": 2, "optim.warmup_epochs": 0.0, "model.depth": 1, "model.num_heads": 2}
TINY |= {"data.workers": 0, "eval.examples": 64, "eval.batch_size": 64, "loggers": "()"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with the files that Python blocks of the pages open: a run on images and two images."""
    folder = tmp_path_factory.mktemp("docs")
    status, _, err = run_in_process(command("train", folder / "runs" / "quickstart", TINY))
    assert status == 0, err
    for name in ("a.jpg", "b.jpg"):
        Image.fromarray(np.full((40, 30, 3), 127, np.uint8)).save(folder / name)
    return folder


OTHER_LIBRARIES = r"\b(torch|timm|transformers|onnxruntime|model\.stablehlo)\b"


def find_python_blocks(page):
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


PROVIDED = ("your_model.md",)  # pages about the reader's model: tests/watching/ runs their blocks with one


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [
        page
        for page in PAGES
        if page.name not in PROVIDED
        and any(not re.search(OTHER_LIBRARIES, block) for block in find_python_blocks(page))
    ],
    ids=lambda page: page.name,
)
def test_python_blocks_run(page, folder, monkeypatch):
    """Blocks run in the order of the page, in one namespace; tests/exports/ runs the blocks for other libraries."""
    monkeypatch.chdir(folder)
    namespace = {}
    for number, block in enumerate(find_python_blocks(page)):
        if re.search(OTHER_LIBRARIES, block):
            continue
        exec(compile(block, f"{page.name}, block {number}", "exec"), namespace)
    assert namespace.keys() > {"__builtins__"}
