"""Flag values of the wrong type: the message has the flag and the value, and no Python terms."""

import pytest
from commands import ROOT
from messages import mentions, refuses

from leanformer import cli


FLAGS = [cli.CONFIG, cli.Flag("steps", "", int), cli.Flag("share", "", float), cli.Flag("dry", "", bool, default=False)]
PYTHON_TERMS = ("int()", "literal", "float:", "('", "Error", "boolean flag", "<class")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("steps", "five"), ("steps", ""), ("share", "a: b"), ("dry", "maybe")),
        *(("config.deterministic", ""), ("config.model.kv_rank", "bfloat16"), ("config.model.width", "4.5")),
        *(("config.optim.lr", "test"), ("config.seed", "None"), ("config.total_steps", "1e3")),
        *(("config.model", "3"), ("config.probe.measures", "(1,"), ("noconfig.deterministic", "3")),
    ],
)
def test_wrong_type_error_has_the_flag_and_no_python_terms(name, value, monkeypatch):
    monkeypatch.chdir(ROOT)
    with refuses(f"--{name}={value}") as caught:
        cli.parse(FLAGS, ["--config=configs/quickstart.py", f"--{name}={value}"])
    message = str(caught.value)
    assert not [word for word in PYTHON_TERMS if word in message.replace("('a','b')", "")]


def test_key_below_a_value_is_refused(monkeypatch):
    monkeypatch.chdir(ROOT)
    with refuses("seed.x") as caught:
        cli.parse(FLAGS, ["--config=configs/quickstart.py", "--config.seed.x=3"])
    assert not mentions(str(caught.value), "class")


def test_error_gives_the_config_value_as_an_example(monkeypatch):
    monkeypatch.chdir(ROOT)
    with refuses("--config.model.width=96"):
        cli.parse(FLAGS, ["--config=configs/quickstart.py", "--config.model.width=wide"])


@pytest.mark.parametrize("name", ["out", "workdir"])
def test_empty_path_is_refused(name):
    with refuses(f"--{name}="):
        cli.parse([cli.Flag(name, "")], [f"--{name}="])


@pytest.mark.parametrize("word", ["--workdir=gs://bucket/run", "--out=s3://bucket/run", "gs://bucket/run"])
def test_url_in_place_of_a_folder_is_refused(word):
    with refuses(word):
        cli.parse([cli.Flag("workdir", ""), cli.Flag("out", "")], [word])


@pytest.mark.parametrize("word", ["--steps=0", "--steps=-3", "--share=1.5", "--share=nan"])
def test_number_outside_the_limits_of_its_flag_is_refused(word):
    flags = [cli.Flag("steps", "", int, minimum=1), cli.Flag("share", "", float, minimum=0, maximum=1)]
    assert cli.parse(flags, ["--steps=1", "--share=0"]).steps == 1 and cli.parse(flags, []).steps is None
    with refuses(word, 1):
        cli.parse(flags, [word])


def test_missing_config_is_reported_with_its_flag():
    with refuses("--against=quickstrt", "--against=quickstart"):
        cli.parse([cli.Flag("against", "", cli.ConfigDict)], ["--against=quickstrt"])
