"""URLs in place of folders: refused, as a path would create a local folder named `gs:`."""

import pytest
from messages import refuses

from leanformer.cli.commands import COMMANDS


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("train", ["--config=quickstart", "--workdir=gs://bucket/run"]),
        ("evaluate", ["--workdir=s3://bucket/run"]),
        ("predict", ["--workdir=runs/pets", "gs://bucket/cat.jpg"]),
        ("convert", ["--weights=hf://name/model", "--out=exported"]),
    ],
)
def test_urls_are_refused_before_a_folder_is_made(command, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with refuses(next(word for word in words if "://" in word)):
        COMMANDS[command].parse(words)
    assert not [*tmp_path.iterdir()]
