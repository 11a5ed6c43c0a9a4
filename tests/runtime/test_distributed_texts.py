"""Language, masked tokens and sentences in two processes over gloo: what they do is what one process does."""

import itertools
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import texts_in_turn
from processes import environ, finish, free_port, records
from texts_in_turn import MIDDLE, STEPS


PROGRAM = Path(texts_in_turn.__file__)
# Of sentences the ranks of all numbers told: these are so alike yet that Pearson's correlation has three digits.
METRICS = {
    "language": ("bits_per_byte",),
    "masked": ("accuracy",),
    "sentences": ("spearman", "examples"),
}


def start(data, folder, cache, processes=1):
    where = f"localhost:{free_port()}"
    meet = [[where, str(processes), str(i)] for i in range(processes)] if processes > 1 else [[]]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environ(cache)}
    return [subprocess.Popen([sys.executable, PROGRAM, data, folder, *words], **pipes) for words in meet]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folders of the three tasks, trained by one process and by two."""
    data, cache, *folders = (tmp_path_factory.mktemp(name) for name in ("data", "compiled", "one", "two"))
    texts_in_turn.write(data)
    for processes, folder in enumerate(folders, 1):
        statuses, out, err = finish(start(data, folder, cache, processes), timeout=300)
        assert statuses == [0] * processes, err
        assert f"{processes} process(es)" in out[0] and not any(out[1:])
    return folders


@pytest.mark.slow
@pytest.mark.parametrize("task", METRICS)
def test_two_processes_are_one(runs, task):
    one, two = (folder / task for folder in runs)
    for kind, names, steps in (
        ("train", ("loss", "grad_norm"), range(1, STEPS + 1)),
        ("eval", ("loss", *METRICS[task]), (MIDDLE, STEPS)),
    ):
        result, wanted = ([[records(path, kind)[at][name] for name in names] for at in steps] for path in (two, one))
        np.testing.assert_allclose(result, wanted, rtol=1e-4, err_msg=kind)  # eight steps of 1e-5, see rounding.py
    result, wanted = (records(path, "probe") for path in (two, one))
    assert result.keys() == wanted.keys() and (task != "language" or STEPS in result)
    for step, name in itertools.product(result, ("attention_entropy", "largest_logit")):
        np.testing.assert_allclose(result[step][name]["median"], wanted[step][name]["median"], rtol=1e-3)
    losses = [record["loss"] for record in records(two, "train").values()]
    assert np.abs(np.diff(losses)).min() > 1e-3 * losses[0]  # other batches, draws or weights would be seen
