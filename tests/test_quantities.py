"""Words for quantities: every score that a task records and every cost of a comparison has an entry."""

import pytest

from leanformer import quantities
from leanformer.analysis import frontier
from leanformer.reports.comparison import run_page
from leanformer.tasks import classification, language, points
from leanformer.training.run import TRAIN_METRICS


def test_every_cost_and_training_metric_has_an_entry():
    assert {*frontier.COST_METRICS, *run_page.COSTS, *TRAIN_METRICS} <= quantities.ALL.keys()
    labels = [quantity.label for quantity in quantities.ALL.values()]
    assert len({*labels}) == len(labels)


@pytest.mark.parametrize(
    "score", [classification.Classification.score, language.TokenObjective.score, points.PointRegression.score]
)
def test_direction_is_that_of_the_task(score):
    assert quantities.SCORES[score.name].higher is score.higher


def test_sentence_names_the_direction_and_averaged_weights():
    top1, averaged = quantities.find("top1"), quantities.find("ema_top1")
    assert top1.sentence.endswith("; higher is better.") and (averaged.scale, averaged.higher) == (100, True)
    assert averaged.label.startswith(top1.label) and averaged.label != top1.label
    unknown = quantities.find("my_score")
    assert (unknown.axis, unknown.direction, unknown.scale) == ("my score", "", 1)
