"""Checks of README and docs: command lines, config keys, links, length and Python blocks."""

import importlib.util
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from commands import ROOT, command, run_in_process
from PIL import Image

from leanformer import __main__ as names
from leanformer import cli


PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "launch" / "README.md", *(ROOT / "docs").glob("*.md")]
)
COMMAND = re.compile(r"python -m ((?:leanformer|experiments)\.\w+)([^`\n|#]*)")


# Imported at module level: submitit closes the file that absl logs to, which inside a test is pytest's capture file.
COMMANDS = {f"leanformer.{name}": importlib.import_module(f"leanformer.{name}") for name in names.COMMANDS}


def find_command_lines():
    """Yield (page, module, words) of every command line on the pages."""
    for page in PAGES:
        for module, rest in COMMAND.findall(page.read_text()):
            yield (
                page.name,
                module,
                shlex.split(rest.replace("...", "").replace("…", "").replace("[", "").replace("]", "")),
            )


def read_flags(module, capsys):
    """Return the names of a command's flags."""
    assert COMMANDS[module].main(["--help"]) == 0
    return set(re.findall(r"^  --(?:\[no\])?(\w+)", capsys.readouterr().out, re.MULTILINE))


def test_command_lines_use_existing_flags(capsys):
    flags_by_module, parsed = {}, 0
    for page, module, words in find_command_lines():
        if module.startswith("experiments."):  # scripts with flags of their own
            assert importlib.util.find_spec(module), f"{page}: {module} does not exist"
            continue
        if module not in flags_by_module:
            flags_by_module[module] = read_flags(module, capsys)
        flags = [word.removeprefix("--").partition("=")[0] for word in words if word.startswith("--")]
        unknown = {flag for flag in flags if "." not in flag} - flags_by_module[module] - {"help"}
        assert not unknown, f"{page}: {module} takes no {unknown}"
        config = [word for word in words if word.startswith("--config=") and "," not in word]
        if config and Path(ROOT / config[0].removeprefix("--config=")).is_file():
            cli.parse([cli.CONFIG], [*config, *(word for word in words if word.startswith("--config."))])
            parsed += 1
    assert len(flags_by_module) >= 10 and parsed >= 8


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_link_targets_exist(page):
    # `make docs` writes _generated/, and ends with an error if a link into it is wrong.
    targets = re.findall(r"\]\((?!https?:|_generated/)([^)#]+)", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_mentioned_files_exist():
    path = re.compile(r"\b((?:leanformer|configs|tests|benchmarks|experiments|launch|notebooks)/[\w./-]+\.[a-z]\w+)\b")
    mentioned = {
        (page.name, name) for page in PAGES for name in path.findall(re.sub(r"https?://\S+", "", page.read_text()))
    }
    mentioned = {(page, name) for page, name in mentioned if "NAME" not in name}
    assert len(mentioned) > 20
    assert [(page, path) for page, path in mentioned if not (ROOT / path).exists()] == []


def test_readme_has_at_most_800_words():
    words = re.findall(r"[\w./-]*\w[\w./-]*", re.sub(r"\]\([^)]*\)", "]", (ROOT / "README.md").read_text()))
    assert len(words) <= 800


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


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if any(not re.search(OTHER_LIBRARIES, block) for block in find_python_blocks(page))],
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
