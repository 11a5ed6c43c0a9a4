"""Words for quantities: every score that a task records and every cost of a comparison has an entry."""

from leanformer import text
from leanformer.analysis import comparison
from leanformer.tasks import classification, language, points
from leanformer.training.trainer import TRAIN_METRICS


def test_every_cost_and_training_metric_has_an_entry():
    assert {*comparison.COST_METRICS, *TRAIN_METRICS} <= text.QUANTITIES.keys()
    assert len({quantity.label for quantity in text.QUANTITIES.values()}) == len(text.QUANTITIES)


def test_direction_agrees_with_the_task():
    for task in (classification.Classification, language.TokenObjective, points.PointRegression):
        assert text.QUANTITIES[task.score.name].higher is task.score.higher


def test_averaged_weights_and_unknown_scores():
    top1, averaged, unknown = map(text.lookup, ("top1", "ema_top1", "my_score"))
    assert (averaged.scale, averaged.higher) == (100, True) and averaged.label.startswith(f"{top1.label},")
    assert (unknown.axis, unknown.higher, unknown.scale) == ("my score", None, 1)
