"""README and docs: their command lines, config keys, links and length."""

import importlib.util
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from commands import ROOT, command, inside
from PIL import Image

from leanformer import __main__ as names
from leanformer import cli


PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "launch" / "README.md", *(ROOT / "docs").glob("*.md")]
)
COMMAND = re.compile(r"python -m ((?:leanformer|experiments)\.\w+)([^`\n|#]*)")


# Imported here, since submitit closes the file that absl logs to, which inside a test is pytest's own.
COMMANDS = {f"leanformer.{name}": importlib.import_module(f"leanformer.{name}") for name in names.COMMANDS}


def command_lines():
    for page in PAGES:
        for module, rest in COMMAND.findall(page.read_text()):
            yield (
                page.name,
                module,
                shlex.split(rest.replace("...", "").replace("…", "").replace("[", "").replace("]", "")),
            )


def flags_of(module, capsys):
    """Return the names of a command's flags."""
    assert COMMANDS[module].main(["--help"]) == 0
    return set(re.findall(r"^  --(?:\[no\])?(\w+)", capsys.readouterr().out, re.MULTILINE))


def test_every_command_line_is_one_that_the_commands_take(capsys):
    known, parsed = {}, 0
    for page, module, words in command_lines():
        if module.startswith("experiments."):  # scripts with flags of their own
            assert importlib.util.find_spec(module), f"{page}: {module} is not there"
            continue
        if module not in known:
            known[module] = flags_of(module, capsys)
        flags = [word.removeprefix("--").partition("=")[0] for word in words if word.startswith("--")]
        unknown = {flag for flag in flags if "." not in flag} - known[module] - {"help"}
        assert not unknown, f"{page}: {module} takes no {unknown}"
        config = [word for word in words if word.startswith("--config=") and "," not in word]
        if config and Path(ROOT / config[0].removeprefix("--config=")).is_file():
            cli.parse([cli.CONFIG], [*config, *(word for word in words if word.startswith("--config."))])
            parsed += 1
    assert len(known) >= 10 and parsed >= 8


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    # `make docs` writes _generated/, and ends with an error if a link into it is wrong.
    targets = re.findall(r"\]\((?!https?:|_generated/)([^)#]+)", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_files_that_pages_name_are_there():
    path = re.compile(r"\b((?:leanformer|configs|tests|benchmarks|experiments|launch|notebooks)/[\w./-]+\.[a-z]\w+)\b")
    named = {
        (page.name, name) for page in PAGES for name in path.findall(re.sub(r"https?://\S+", "", page.read_text()))
    }
    named = {(page, name) for page, name in named if "NAME" not in name}
    assert len(named) > 20
    assert [(page, path) for page, path in named if not (ROOT / path).exists()] == []


def test_the_readme_is_read_in_minutes():
    words = re.findall(r"[\w./-]*\w[\w./-]*", re.sub(r"\]\([^)]*\)", "]", (ROOT / "README.md").read_text()))
    assert len(words) <= 800


TINY = {"total_epochs": 0.0, "total_steps": 2, "optim.warmup_epochs": 0.0, "model.depth": 1, "model.num_heads": 2}
TINY |= {"data.workers": 0, "eval.examples": 64, "eval.batch_size": 64, "loggers": "()"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with what the Python blocks of the pages open: a run on images, and two images."""
    folder = tmp_path_factory.mktemp("docs")
    status, _, err = inside(command("train", folder / "runs" / "quickstart", TINY))
    assert status == 0, err
    for name in ("a.jpg", "b.jpg"):
        Image.fromarray(np.full((40, 30, 3), 127, np.uint8)).save(folder / name)
    return folder


ELSEWHERE = r"\b(torch|timm|transformers|onnxruntime|model\.stablehlo)\b"


def python_blocks(page):
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if any(not re.search(ELSEWHERE, block) for block in python_blocks(page))],
    ids=lambda page: page.name,
)
def test_python_blocks_run(page, folder, monkeypatch):
    """In the order of the page, in one namespace; tests/exports/ runs the blocks for other libraries."""
    monkeypatch.chdir(folder)
    namespace = {}
    for number, block in enumerate(python_blocks(page)):
        if re.search(ELSEWHERE, block):
            continue
        exec(compile(block, f"{page.name}, block {number}", "exec"), namespace)
    assert namespace.keys() > {"__builtins__"}
