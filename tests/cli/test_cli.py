"""Commands as functions: many in one process, no state between calls, and one message with status 2 per error."""

import importlib

import pytest
from commands import ROOT, check_refused, command, run_in_process
from golden import check_page
from messages import missing

from leanformer import cli
from leanformer.__main__ import COMMANDS
from leanformer.analysis import comparison
from leanformer.errors import DataError
from leanformer.pretrained import layouts


BAD = {  # per command: arguments that it refuses, and the parts that its message must mention
    "train": (["--workdir=DIR"], ["--config"]),
    "evaluate": (["--workdir=DIR"], ["--workdir=DIR", "config.json"]),
    "probe": ([], ["--workdir", "--config"]),
    "cost": (["--config=configs/nope.py"], ["configs/nope.py"]),
    "prepare": (["--config=configs/quickstart.py"], ["check", "build"]),
    "convert": (["--out=DIR"], ["--weights"]),
    "predict": (["--workdir=DIR"], ["--name=value"]),
    "compare": (["DIR"], ["DIR"]),
    "plan": (["--config=configs/quickstart.py", "--budget=1e6"], ["params:40e6", "flops:1e9"]),
    "generate": (["--workdir=DIR", "--prompt=x"], ["--workdir=DIR", "config.json"]),
    "sweep": (["--workdir=DIR", "--config=quickstart", "--nonsense=1"], ["nonsense"]),
    "keys": (["nonsense"], ["nonsense"]),
}


def make_case(name, folder):
    """Return a command line that is refused, and the parts of its message."""
    given, parts = (
        [item.replace("DIR", str(folder / "x")) if isinstance(item, str) else item for item in items]
        for items in BAD[name]
    )
    return [*command(name, config=None), *given], parts


def test_flag_choices_match_the_commands():
    def get_choices(command, name):
        main = importlib.import_module(f"leanformer.{command}").main
        return next(flag.kind for flag in main.flags if flag.name == name)

    assert get_choices("convert", "from") == layouts.LAYOUTS
    assert get_choices("convert", "to") == layouts.LAYOUTS
    assert get_choices("compare", "test") == tuple(comparison.TESTS)


def test_all_commands_run_in_one_process(tmp_path):
    assert BAD.keys() == COMMANDS.keys()
    for name in [*BAD] * 2:
        words, parts = make_case(name, tmp_path)
        check_refused(words, *parts)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", BAD)
def test_help_page(name):
    status, out, err = run_in_process([*command(name, config=None), "--help"])
    assert (status, err) == (0, "")
    check_page(f"help_{name}", out)


@cli.command(
    cli.CONFIG,
    cli.Flag("against", "Another.", cli.ConfigDict),
    cli.Flag("steps", "Some.", int, default=3, minimum=1),
    cli.Flag("names", "Words.", list, default=()),
    cli.Flag("out", "A folder."),
    cli.Flag("set", "Pairs.", default=(), many=True),
    cli.Flag("of", "One.", ("a", "b"), default="a"),
    cli.Flag("dry", "Whether.", bool, default=False),
    words="go or fail",
)
def main(f):
    if f.words == ["fail"]:
        raise DataError("/gone/data is missing.")
    calls.append(f)


calls = []
GO = ["go", "--config=configs/quickstart.py"]


@pytest.fixture
def in_root(monkeypatch):
    monkeypatch.chdir(ROOT)
    calls.clear()


def test_flag_values_are_parsed(in_root):
    words = ["--steps=5", "--names=x,y", "--set=a=1", "--set", "b=2", "--of=b", "--dry", "--config.model.width", "20"]
    assert main([*GO, *words, "--against=configs/vit_b.py:depth=3", "--against.model.mlp_dim=40"]) == 0
    (f,) = calls
    assert (f.steps, f.names, f.set, f.of, f.dry) == (5, ["x", "y"], ["a=1", "b=2"], "b", True)
    assert f.files == {"config": "configs/quickstart.py", "against": "configs/vit_b.py:depth=3"}
    assert (f.config.model.width, f.against.model.depth, f.against.model.mlp_dim) == (20, 3, 40)
    assert f.argv.startswith("go --config=configs/quickstart.py --steps=5 ")


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["go"], ["--config"]),
        (GO[1:], ["go", "fail"]),
        ([*GO, "--step=5"], ["step", "steps"]),
        ([*GO, "--steps=0"], ["steps", "0"]),
        ([*GO, "--of=c"], ["of=c", "a|b"]),
        ([*GO, "--config.seed.x=3"], ["seed.x"]),
        ([*GO, "--against=quickstrt"], ["quickstrt"]),
        ([*GO[:2], "s3://bucket/run"], ["s3://bucket/run"]),
        ([*GO[:2], ""], ["path", "empty"]),
        ([*GO, "--config.model.widht=20"], ["widht", "width"]),
        ([*GO, "--config.total_steps=60"], ["total_epochs=30.0", "total_steps=60"]),
        (["fail", GO[1]], ["/gone/data"]),
    ],
)
def test_user_errors_are_one_message(words, parts, in_root, capsys):
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("Error:") == 1 and not calls
    assert not missing(err, *parts), err
