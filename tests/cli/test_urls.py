"""URLs in place of folders: workdirs in object stores, and refusals before a folder named `gs:` is made."""

import importlib.util

import pytest
from messages import refuses

from leanformer.cli.commands import COMMANDS


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("sweep", ["--config=quickstart", "--workdir=gs://bucket/sweep"]),
        ("train", ["--config=quickstart", "--workdir=hf://name/run"]),
        ("train", ["--config=quickstart", "--workdir=gs://bucket"]),
        ("evaluate", ["--workdir=s3://bucket/../run"]),
        ("predict", ["--workdir=runs/pets", "gs://bucket/cat.jpg"]),
        ("compare", ["runs/pets", "--out=gs://bucket/run"]),
        ("probe", ["--workdir=runs/pets", "--out=s3://bucket/run"]),
        ("convert", ["--weights=gs://bucket/model", "--out=exported"]),
    ],
)
def test_urls_are_refused_before_a_folder_is_made(command, words, here, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: True)  # a missing package is not the reason
    with refuses(next(word for word in words if "://" in word)):
        COMMANDS[command].parse(words)
    assert not [*here.iterdir()]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("train", ["--config=quickstart", "--workdir=gs://bucket/run"]),
        ("evaluate", ["--workdir=gs://bucket/run"]),
        ("predict", ["--workdir=gs://bucket/run", "cat.jpg"]),
        ("generate", ["--workdir=gs://bucket/run"]),
        ("embed", ["--workdir=gs://bucket/run", "--texts=texts.txt"]),
        ("probe", ["--workdir=gs://bucket/run"]),
        ("compare", ["gs://bucket/run"]),
        ("convert", ["gs://bucket/run", "--out=exported"]),
    ],
)
def test_workdirs_may_be_urls_with_the_package_for_them(command, words, here, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: True)
    values = COMMANDS[command].parse(words)
    assert "gs://bucket/run" in (values.workdir if hasattr(values, "workdir") else values.words)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with refuses("gs://bucket/run", "gcsfs", "'.[gcs]'"):
        COMMANDS[command].parse(words)
    assert not [*here.iterdir()]
