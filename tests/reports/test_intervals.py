"""Numbers in the run header and summary: intervals longer than the run, and significant digits."""

import pytest
from messages import mentions, refuses

from leanformer import config
from leanformer.reports import pages
from leanformer.training import progress


def set_steps(c, total, examples=None):
    """Return the intervals of a run of `total` steps."""
    c.update(total_epochs=0.0, total_steps=total)
    return config.intervals(c, examples)


def test_intervals_longer_than_the_run_cause_warnings(tiny, capfd):
    tiny.eval.more.unlock()
    tiny.eval.more["other"] = {"split": "test", "every": 1466}
    tiny.eval.every, tiny.probe.every, tiny.checkpoint.every = 5000, 5001, 2500
    pages.warn_intervals(tiny, set_steps(tiny, 1465))
    lines = capfd.readouterr().err.splitlines()
    assert [line.startswith("WARNING: ") for line in lines] == [True] * 4
    values = {"eval.every": 5000, "probe.every": 5001, "checkpoint.every": 2500, "eval.more.other.every": 1466}
    for line, (key, value) in zip(lines, values.items(), strict=True):
        assert mentions(line, f"{key}={value}", 1465)


@pytest.mark.parametrize(("every", "total"), [(6, 6), (2, 6), (0, 6)])
def test_intervals_within_the_run_cause_no_warning(every, total, tiny, capfd):
    tiny.eval.every = tiny.probe.every = tiny.checkpoint.every = every
    pages.warn_intervals(tiny, set_steps(tiny, total))
    assert capfd.readouterr().err == ""


def test_intervals_in_epochs(tiny, capfd):
    """37 examples in batches of 16: 2.3 steps per epoch, rounded to whole steps, at least one."""
    tiny.batch_size = 16
    for epochs, steps in ((1.0, 2), (2.5, 6), (0.01, 1)):
        tiny.eval.update(every=0, every_epochs=epochs)
        assert config.intervals(tiny, 37).eval == {"": steps}
    tiny.probe.every = tiny.checkpoint.every = 0
    tiny.eval.every_epochs = 3.0
    pages.warn_intervals(tiny, set_steps(tiny, 6, 37))
    assert mentions(capfd.readouterr().err, "eval.every_epochs=3.0", 6)
    with refuses("eval.every_epochs=3.0"):
        config.intervals(tiny, None)
    tiny.eval.every = 4
    with refuses("eval.every=4", "eval.every_epochs=3.0"):
        config.check(tiny)


def test_numbers_are_rounded_to_significant_digits():
    values = {"loss": 0.46707453155517575, "small": 1.23456e-7, "large": 1234567.8, "ppl": 9876.54321}
    rounded = {"loss": "0.4671", "small": "1.235e-07", "large": "1,234,568", "ppl": "9877"}
    assert progress.round_values(values | {"step": 123456, "split": "a"}) == rounded | {"step": 123456, "split": "a"}
