"""The regime command: rivals of equal parameters, diagnostic tasks, and sentences that claim no more than was shown."""

import jax
import numpy as np
import pytest
from commands import inside, refused
from golden import check_page
from messages import mentions, refuses

from experiments import regime_poles as regime
from experiments import regime_report as reports
from experiments.regime_poles import Shape, Trained
from leanformer import config
from leanformer.errors import TrainingError
from leanformer.runtime import mesh as meshes
from leanformer.training import experiment, streams


START = [
    {"attention_output": condition, "relative_attention_entropy": entropy, "capacity": capacity}
    | {"gaussian": 5.0, "largest_logit": 2.0, "bound": condition > 8}
    for condition, entropy, capacity in ((9.0, 0.5, 3.0), (7.0, 0.6, 2.0), (5.0, 0.7, 1.0))
]
SHAPES = [Shape(3, 8, 8), Shape(6, 4, 4), Shape(12, 2, 2)]


def test_rivals_are_cut_from_the_same_width():
    assert [str(s) for s in regime.rivals(Shape(12, 64, 64))] == ["3x256", "6x128", "12x64", "24x32", "48x16"]
    assert [str(s) for s in regime.rivals(Shape(1, 7, 7))] == ["1x7"]  # 7 heads are too many for a fourfold
    assert [str(s) for s in regime.rivals(Shape(6, 4, 10))] == ["2x12/30", "3x8/20", "6x4/10", "12x2/5"]
    for shape in regime.rivals(Shape(15, 14, 28)):
        assert (shape.heads * shape.head_dim, shape.heads * shape.value_dim) == (210, 420)
    assert [str(s) for s in regime.rivals(Shape(16, 16, 16), 48 / 1024)] == ["8x32", "16x16"]  # 32x8 would be 32x1
    assert Shape(12, 64, 128).scaled(1 / 16) == Shape(12, 4, 8) and Shape(48, 4, 4).scaled(1 / 16) == Shape(48, 1, 1)


def trained(*middles, spread=0.01, pole="rank"):
    noise = spread * np.array([-1.0, 0.1, 0.9])
    return Trained(pole, SHAPES, np.array([10 ** (np.log10(m) + noise * (i + 1)) for i, m in enumerate(middles)]))


CASES = {  # errors of the three shapes, and the shape that is asked about
    "better": (1, trained(0.1, 1.0, 0.9)),
    "best": (2, trained(0.5, 0.3, 0.1, pole="count")),
    "unknown": (0, trained(0.5, 0.5, 0.5, spread=0.3)),
}


@pytest.mark.parametrize("name", CASES)
def test_sentences(name):
    asked, errors = CASES[name]
    check_page(f"regime_{name}", reports.sentences(SHAPES, asked, [errors], START))


def test_a_difference_has_its_interval():
    asked, errors = CASES["better"]
    (_, difference, p), *_ = errors.against(asked)
    low, high = (f"{100 * (1 - 10**x):.3g}" for x in (difference.interval().high, difference.interval().low))
    assert p < 0.05 and 89 < float(low) < 90 < float(high) < 91
    assert mentions(reports.sentences(SHAPES, asked, [errors], START), "3x8", "6x4", 90, f"{low} %", f"{high} %")


def test_the_table_has_intervals_and_all_that_was_measured():
    text = reports.table(SHAPES, [trained(0.1, 1.0, 0.9)], START)
    check_page("regime_table", text)
    lines = text.splitlines()
    assert len(lines) == 4 and mentions(lines[1], "3x8", 0.1, 9, 5, 3) and "0.1 (0.09" in lines[1]
    figure = reports.draw(SHAPES, 1, [trained(0.1, 1.0, 0.9)], START)
    assert len(figure.axes) == 2


@pytest.mark.parametrize("pole", ["rank", *(pytest.param(p, marks=pytest.mark.slow) for p in ("count", "control"))])
def test_every_task_can_be_trained(pole, monkeypatch):
    monkeypatch.setattr(regime, "WIDTH", 8)
    errors = regime.trained(pole, Shape(2, 8, 8), Shape(4, 4, 4), 16, total=20, seeds=2)
    assert errors.shape == (2,) and np.isfinite(errors).all() and errors[0] != errors[1]


@pytest.mark.parametrize("pole", regime.POLES)
def test_every_task_is_set_up_for_its_examples(pole):
    """Traced: a config that passes the checks, a model of the shape, and the metric that is read."""
    shape = Shape(2, 8, 4)
    c = regime._config(shape, 20)
    regime.POLES[pole].settings(c, shape)
    config.check(c)
    run = experiment.build(c, examples=None, mesh=meshes.make_mesh(devices=jax.devices()[:1]))
    jax.eval_shape(run.train_step, run.like, run.abstract_batch(), jax.eval_shape(jax.random.key, 0))
    sums = jax.eval_shape(run.eval_step, run.like.weights, run.abstract_batch(train=False))
    with np.errstate(all="ignore"):  # sums of no examples
        assert regime.POLES[pole].metric in run.task.metrics({name: np.ones(x.shape) for name, x in sums.items()})
    assert next(iter(streams.train(run, run.task.open("train"), 0))).keys() >= run.abstract_batch().keys()
    assert (c.model.num_heads, c.model.head_dim, c.model.value_dim) == (2, 8, 4)


def test_an_error_that_is_not_finite_is_not_averaged(monkeypatch):
    monkeypatch.setattr(regime, "WIDTH", 8)
    monkeypatch.setattr(regime.steps, "evaluate", lambda *_: {"error": float("nan")})
    monkeypatch.setattr(regime.streams, "train", lambda *_: ())
    monkeypatch.setattr(experiment.Experiment, "compile_train_step", lambda run: None)  # which no batch needs
    with refuses("rank", "2x8", 0, "nan", error=TrainingError):
        regime.trained("rank", Shape(2, 8, 8), Shape(2, 8, 8), 16, total=20, seeds=2)


def test_a_command_that_was_killed_goes_on(tmp_path, monkeypatch):
    words = ["--tokens=8", "--width=16", "--heads=2", "--head_dim=8", "--steps=20", "--seeds=2"]
    folder = tmp_path / "new" / "folder"
    words, told = ["", "", "experiments.regime", *words, f"--out={folder}"], []

    def trained(pole, shape, *_, **__):
        told.append((pole, str(shape)))
        if len(told) == 6:
            raise KeyboardInterrupt
        return np.array([0.5, 0.25]) / len(told)

    monkeypatch.setattr(regime, "trained", trained)
    monkeypatch.setattr(regime, "at_start", lambda *_: START[0])  # which the next test measures
    with pytest.raises(KeyboardInterrupt):
        inside(words)
    before = [*told]
    status, out, _ = inside(words)
    assert status in (None, 0) and (folder / "regime.json").is_file() and told[5] == told[6]
    assert len(set(told)) == len(told) - 1 == out.count(" s)")  # each once, but for the one that did not end
    assert [*told[:6]] == before and f"{np.exp(np.log([0.5, 0.25]).mean()):.3g} (" in out  # the first, read back
    status, _, err = inside([*words[:-2], "--seeds=3", words[-1]])
    assert status == 2 and mentions(err, "trained.json", "seeds=2", 3)


def test_what_is_known_before_training():
    found = regime.at_start(Shape(3, 4, 4), tokens=17, width=12, seeds=2)
    assert 0 < found["relative_attention_entropy"] <= 1 and found["largest_logit"] > 0
    assert found["bound"] is False
    assert found["capacity"] == regime.capacity(Shape(3, 4, 4), 12)
    assert 1 < found["gaussian"] < found["attention_output"]  # tokens are alike once they are averaged
    more, fewer = (regime.capacity(Shape(n, 24 // n, 24 // n), 24) for n in (8, 1))
    assert more > fewer and regime.capacity(Shape(2, 4, 6), 24) is None
    text = reports.sentences(SHAPES, 0, [trained(0.5, 0.4, 0.3)], [known | {"capacity": None} for known in START])
    assert "capacity" not in text and mentions(text, 2)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--heads=0"], ["--heads=0", 1]),
        (["--head_dim=65"], ["--head_dim=65", "--width=64", 64]),
        (["--seeds=1"], ["--seeds=1", 2]),
        (["--steps=3"], ["--steps=3", 20]),
        (["--width=1280", "--heads=12"], ["12x16", "--width=1280", 48, "--heads"]),
    ],
)
def test_refused(words, parts):
    plain = ["--tokens=16", "--width=64", "--heads=4", "--head_dim=16"]
    refused(["", "", "experiments.regime", *plain, *words], *parts)
