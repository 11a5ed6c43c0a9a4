"""Language, masked and sentence tasks in two processes over gloo: same results as in one process."""

import itertools
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import run_text_tasks
from processes import find_free_port, make_environment, read_records_by_step, wait_for_processes
from run_text_tasks import FIRST_EVAL_STEP, STEPS


PROGRAM = Path(run_text_tasks.__file__)
# Spearman's rank correlation for sentences: predictions this early differ so little that Pearson's correlation is
# only precise to three digits.
METRICS = {
    "language": ("bits_per_byte",),
    "masked": ("accuracy",),
    "sentences": ("spearman", "examples"),
}


def start(data, folder, cache, processes=1):
    address = f"localhost:{find_free_port()}"
    process_args = [[address, str(processes), str(i)] for i in range(processes)] if processes > 1 else [[]]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": make_environment(cache)}
    return [subprocess.Popen([sys.executable, PROGRAM, data, folder, *words], **pipes) for words in process_args]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Train the three tasks in one process and in two, and return both folders."""
    data, cache, *folders = (tmp_path_factory.mktemp(name) for name in ("data", "compiled", "one", "two"))
    run_text_tasks.write_texts(data)
    for processes, folder in enumerate(folders, 1):
        statuses, out, err = wait_for_processes(start(data, folder, cache, processes), timeout=300)
        assert statuses == [0] * processes, err
        assert f"{processes} process(es)" in out[0] and not any(out[1:])
    return folders


@pytest.mark.slow
@pytest.mark.parametrize("task", METRICS)
def test_two_processes_match_one_process(runs, task):
    one, two = (folder / task for folder in runs)
    for kind, names, steps in (
        ("train", ("loss", "grad_norm"), range(1, STEPS + 1)),
        ("eval", ("loss", *METRICS[task]), (FIRST_EVAL_STEP, STEPS)),
    ):
        result, expected = (
            [[read_records_by_step(path, kind)[step][name] for name in names] for step in steps] for path in (two, one)
        )
        np.testing.assert_allclose(result, expected, rtol=1e-4, err_msg=kind)  # eight steps of 1e-5, see rounding.py
    result, expected = (read_records_by_step(path, "probe") for path in (two, one))
    assert result.keys() == expected.keys() and (task != "language" or STEPS in result)
    for step, name in itertools.product(result, ("attention_entropy", "largest_logit")):
        np.testing.assert_allclose(result[step][name]["median"], expected[step][name]["median"], rtol=1e-3)
    losses = [record["loss"] for record in read_records_by_step(two, "train").values()]
    assert np.abs(np.diff(losses)).min() > 1e-3 * losses[0]  # other batches, random draws or weights would fail
