"""The state of a folder is that of the run that trained there: a command that trains nothing changes none of it."""

import numpy as np
import pytest

from leanformer import pretrained, report
from leanformer.errors import WeightsError
from leanformer.train import train


@pytest.fixture
def small(tiny):
    """Two steps."""
    tiny.update(total_steps=2, batch_size=8)
    tiny.eval.update(every=0, batch_size=1024)
    tiny.probe.every = 0
    return tiny


@pytest.mark.slow
def test_a_finished_run_keeps_its_config(small, tmp_path, capfd):
    assert train(small, tmp_path) == 0
    before = (tmp_path / "config.json").read_bytes()
    small.optim.lr = 0.5
    assert train(small, tmp_path) == 0
    assert "This run is complete: 2 steps" in capfd.readouterr().out
    assert (tmp_path / "config.json").read_bytes() == before
    small.total_steps = 3
    assert train(small, tmp_path) == 0
    assert report.read_config(tmp_path).optim.lr == 0.5


@pytest.mark.slow
def test_a_start_that_fails_leaves_no_config_and_the_next_is_told_of_no_change(small, tmp_path, capfd, monkeypatch):
    pretrained.write(tmp_path / "other.safetensors", {"x": np.zeros(3)})
    small.init_from.path = str(tmp_path / "other.safetensors")
    run = tmp_path / "run"
    with pytest.raises(WeightsError):
        train(small, run)
    small.init_from.path = None
    with monkeypatch.context() as broken:
        broken.setattr("leanformer.data.source.Synthetic.__getitem__", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(small, run)
    assert not (run / "config.json").exists()
    small.optim.lr = 0.5
    assert train(small, run) == 0
    assert "CHANGED" not in capfd.readouterr().err and report.read_config(run).optim.lr == 0.5
