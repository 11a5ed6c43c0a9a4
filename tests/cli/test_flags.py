"""Values of flags of another type than their flag's: the key, the value, and no word of Python."""

import pytest
from commands import ROOT
from messages import mentions, refuses

from leanformer import cli


FLAGS = [cli.CONFIG, cli.Flag("steps", "", int), cli.Flag("share", "", float), cli.Flag("dry", "", bool, default=False)]
PYTHON = ("int()", "literal", "float:", "('", "Error", "boolean flag", "<class")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("steps", "five"), ("steps", ""), ("share", "a: b"), ("dry", "maybe")),
        *(("config.deterministic", ""), ("config.model.kv_rank", "bfloat16"), ("config.model.width", "4.5")),
        *(("config.optim.lr", "test"), ("config.seed", "None"), ("config.total_steps", "1e3")),
        *(("config.model", "3"), ("config.probe.measures", "(1,"), ("noconfig.deterministic", "3")),
    ],
)
def test_a_value_of_another_type(name, value, monkeypatch):
    monkeypatch.chdir(ROOT)
    with refuses(f"--{name}={value}") as caught:
        cli.parse(FLAGS, ["--config=configs/quickstart.py", f"--{name}={value}"])
    message = str(caught.value)
    assert not [word for word in PYTHON if word in message.replace("('a','b')", "")]


def test_a_key_of_what_is_no_section(monkeypatch):
    monkeypatch.chdir(ROOT)
    with refuses("seed.x") as caught:
        cli.parse(FLAGS, ["--config=configs/quickstart.py", "--config.seed.x=3"])
    assert not mentions(str(caught.value), "class")


def test_the_example_is_the_value_that_the_config_has(monkeypatch):
    monkeypatch.chdir(ROOT)
    with refuses("--config.model.width=96"):
        cli.parse(FLAGS, ["--config=configs/quickstart.py", "--config.model.width=wide"])


def test_a_renamed_flag_is_taken_by_its_old_name_with_a_warning(capsys):
    flags = [cli.Flag("vmap", "Vectorised.", bool, default=False)]
    assert cli.parse(flags, ["--together"]).vmap is True
    assert mentions(capsys.readouterr().err, "--together", "--vmap")
    assert cli.parse(flags, ["--vmap"]).vmap is True and capsys.readouterr().err == ""
