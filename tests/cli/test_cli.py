"""Commands as functions: many in one process, flags that outlive no call, and every error one message with status 2."""

import importlib
import warnings

import pytest
from absl import flags as absl
from commands import ROOT, command, inside, run

from leanformer import cli
from leanformer.errors import DataError


BAD = {
    "train": (["--workdir=DIR"], "--config=... is missing"),
    "evaluate": (["--workdir=DIR"], "holds no run"),
    "probe": ([], "Give one of --workdir=DIR and --config=FILE"),
    "cost": (["--config=configs/nope.py"], "The config configs/nope.py cannot be loaded"),
    "prepare": (["--config=configs/quickstart.py"], "one of: check, build, cache; found nothing"),
    "convert": (["--out=DIR"], "--weights=... is missing"),
    "predict": (["--workdir=DIR"], "found nothing"),
    "audit": (["--configs=DIR"], "cannot be loaded: there is no such file"),
    "packaged": (["--name=none"], "value should be one of"),
    "compare": (["DIR"], "there is no such folder"),
    "plan": (["--config=configs/quickstart.py", "--budget=1e6"], "give params:40e6, flops:1e9, seconds:0.25@h100"),
    "embed": (["--texts=DIR"], "cannot be read as UTF-8"),
    "generate": (["--workdir=DIR", "--prompt=x"], "holds no run"),
    "regime": (["--tokens=8", "--width=8", "--heads=0", "--head_dim=4"], "--heads=0 must be at least 1"),
    "glue": (["--workdir=DIR", "--tasks=wnli"], "wnli is none of mnli, sst2, stsb"),
    "together": (["--member=none"], "no JSON list of a folder and flags"),
    "sweep": (["--workdir=DIR", "--nonsense=1"], "Unknown command line flag 'nonsense'"),
}


def words(name, folder):
    return [*command(name, config=None), *(word.replace("DIR", str(folder / "x")) for word in BAD[name][0])]


def test_every_command_is_tested():
    found = {path.stem for path in (ROOT / "leanformer").glob("*.py") if "cli.run(main)" in path.read_text()}
    assert found - {"cli"} == BAD.keys()


def test_all_commands_live_in_one_process(tmp_path):
    for name, (_, message) in list(BAD.items()) * 2:
        status, out, err = inside(words(name, tmp_path))
        assert (status, out) == (2, "") and err.startswith("\nError: ") and message in err, name
    assert not list(tmp_path.iterdir())


SEEN = {"train", "evaluate", "sweep", "glue"}  # in processes of their own by test_train, test_sweep and test_glue


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in BAD if name not in SEEN])
def test_a_command_by_itself_ends_with_one_message(name, tmp_path):
    status, out, err = run(words(name, tmp_path))
    assert (status, out) == (2, "") and BAD[name][1] in err
    assert err.count("Error:") == 1 and "Traceback" not in err


@cli.command(
    cli.CONFIG,
    cli.Flag("against", "Another.", cli.ConfigDict),
    cli.Flag("steps", "Some.", int, default=3),
    cli.Flag("names", "Words.", list, default=()),
    cli.Flag("set", "Pairs.", default=(), many=True),
    cli.Flag("of", "One.", ("a", "b"), default="a"),
    cli.Flag("dry", "Whether.", bool, default=False),
    verbs=("go", "fail", "break"),
)
def main(f):
    if f.verb == "fail":
        raise DataError("The data are gone.")
    if f.verb == "break":
        raise ZeroDivisionError
    seen.append(f)


seen = []
GO = ["go", "--config=configs/quickstart.py"]


@pytest.fixture
def here(monkeypatch):
    monkeypatch.chdir(ROOT)
    seen.clear()


def test_values(here):
    words = ["--steps=5", "--names=x,y", "--set=a=1", "--set", "b=2", "--of=b", "--dry", "--config.model.width", "20"]
    assert main([*GO, *words, "--against=configs/vit_b.py:depth=3", "--against.model.mlp_dim=40"]) == 0
    (f,) = seen
    assert (f.steps, f.names, f.set, f.of, f.dry) == (5, ["x", "y"], ["a=1", "b=2"], "b", True)
    assert f.files == {"config": "configs/quickstart.py", "against": "configs/vit_b.py:depth=3"}
    assert (f.config.model.width, f.against.model.depth, f.against.model.mlp_dim) == (20, 3, 40)
    assert f.argv.startswith("go --config=configs/quickstart.py --steps=5 ")


def test_nothing_is_left_of_an_earlier_call(here):
    assert main([*GO, "--steps=5", "--set=a=1", "--config.model.width=20", "--config.seed=4", "--dry"]) == 0
    assert main(GO) == 0
    first, second = seen
    assert (second.steps, list(second.set), second.dry, second.against) == (3, [], False, None)
    assert (first.config.seed, second.config.seed, second.config.model.width) == (4, 0, 96)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["go"], "--config=... is missing. Config file."),
        (GO[1:], "This command takes one of: go, fail, break; found nothing"),
        (["stop", GO[1]], "found stop"),
        ([*GO, "again"], "found go again"),
        ([*GO, "--step=5"], "Unknown command line flag 'step'. Did you mean: steps ?"),
        ([*GO, "--steps=five"], "invalid literal for int"),
        ([*GO, "--of=c"], "value should be one of <a|b>"),
        ([*GO, "--config.model.widht=20"], 'There is no key "widht". Did you mean "width"?'),
        ([*GO, "--config.model.zzzzzz=20"], 'There is no key "zzzzzz".'),
        ([*GO, "--config.model.width=wide"], "invalid literal for int"),
        ([*GO, "--config.total_steps=60"], "total_steps=60 and total_epochs=30.0, and 0 for the others."),
        ([*GO, "--config.model.width=0"], "model.width=0 must be at least 1."),
        (["fail", GO[1]], "The data are gone."),
    ],
)
def test_what_is_wrong_is_one_message(words, message, here, capsys):
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and err.count("Error:") == 1 and not seen


def test_what_nobody_expected_is_raised(here):
    with pytest.raises(ZeroDivisionError):
        main(["break", GO[1]])


def test_a_call_changes_nothing_in_the_process(here):
    before = warnings.formatwarning
    assert main(GO) == 0
    assert warnings.formatwarning is before
    for name in BAD:
        importlib.import_module(f"leanformer.{name}")
    defined = absl.FLAGS.flags_by_module_dict()
    assert "grain._src.core.config" in defined and not [name for name in defined if "leanformer" in name]
