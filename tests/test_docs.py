"""README and docs: their command lines, config keys, links and length."""

import contextlib
import importlib
import re
import shlex
from pathlib import Path

import pytest
from commands import ROOT

from leanformer import cli


PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "launch" / "README.md", *(ROOT / "docs").glob("*.md")]
)
COMMAND = re.compile(r"python -m ((?:leanformer|experiments)\.\w+)([^`\n|#]*)")


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
    command = importlib.import_module(module)
    if not hasattr(command, "main"):
        return set()
    with contextlib.suppress(SystemExit):  # of argparse, in some experiments
        assert command.main(["--help"]) == 0
    return set(re.findall(r"^  --(?:\[no\])?(\w+)", capsys.readouterr().out, re.MULTILINE))


def test_every_command_line_is_one_that_the_commands_take(capsys):
    known, parsed = {}, 0
    for page, module, words in command_lines():
        if module not in known:
            known[module] = flags_of(module, capsys)
        flags = [word.removeprefix("--").partition("=")[0] for word in words if word.startswith("--")]
        unknown = {flag for flag in flags if "." not in flag} - known[module] - {"help"}
        assert not unknown, f"{page}: {module} takes no {unknown}"
        config = [word for word in words if word.startswith("--config=") and "," not in word]
        if config and Path(ROOT / config[0].removeprefix("--config=")).is_file():
            cli.parse([cli.CONFIG], [*config, *(word for word in words if word.startswith("--config."))])
            parsed += 1
    assert len(known) >= 12 and parsed >= 10


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
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
