"""Numbers of examples on the page of a run."""

import json

from leanformer.analysis.runs import Run
from leanformer.reports.comparison.run_page import _describe_split
from leanformer.tasks import artifacts


def test_examples_are_those_that_were_evaluated(tmp_path):
    run = Run(tmp_path, 0, {"data.eval_split": "t10k"}, "", {}, [], 0.5)
    assert _describe_split(run, "data.eval_split") == "t10k"  # runs older than the record
    (tmp_path / artifacts.RECORD).write_text(json.dumps({"splits": {"t10k": {"examples": 2000}}}))
    found = [_describe_split(run, "data.eval_split", used) for used in (0, 500, 5000)]
    assert [text.removeprefix("t10k ") for text in found] == [f"({n} examples)" for n in ("2,000", "500", "2,000")]
