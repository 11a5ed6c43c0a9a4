"""A run as long as its seconds: rates by the share of them that is used, by a clock that the test moves."""

import itertools
import json
import types

import jax.numpy as jnp
import numpy as np
import pytest
from power_cuts import power_cut

from leanformer import config, train
from leanformer.config import Ramp
from leanformer.errors import ConfigError
from leanformer.training import budget, experiment, goodput, loop, progress, report, schedules, streams, together
from leanformer.training import step as steps


LEVELS = {"lr": 3e-3, "warmup_lr": 1e-4, "final_lr": 2e-4}
SECONDS = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0, 5.0, 3.0, 5.0, 8.0, 9.0]  # of steps, one after the other
WAIT = 0.25  # for the data of each, but of the first of an attempt
TOTAL = 29.0
CUT, KEPT = 5, 4  # steps of the first attempt, and those that its last checkpoint has


def curve(share, schedule, warmup, low, peak, end, decay=0.2):
    """By hand, of numbers."""
    if share < warmup:
        return low + (peak - low) * share / warmup
    left = {
        "cosine": lambda: 0.5 + 0.5 * np.cos(np.pi * (share - warmup) / (1 - warmup)),
        "linear": lambda: (1 - share) / (1 - warmup),
        "wsd": lambda: min(1, (1 - share) / decay),
        "constant": lambda: 1,
    }[schedule]()
    return end + (peak - end) * left


@pytest.mark.parametrize("warmup", [0.0, 0.3, 0.75])
@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
def test_the_rate_is_a_function_of_the_share(schedule, warmup):
    o = config.base().optim
    o.update(LEVELS, schedule=schedule, warmup_share=warmup, b1=0.95, b1_peak=0.85)
    at = schedules.by_share(o)
    for share in (0.0, 0.11, 0.299, 0.31, 0.5, 0.74, 0.76, 0.83, 0.97, 1.0):
        for step in (0, 7):  # which says nothing
            rate, b1 = at(jnp.int32(step), jnp.float32(share))
            low, peak, end = LEVELS["warmup_lr"], LEVELS["lr"], LEVELS["final_lr"]
            np.testing.assert_allclose(rate, curve(share, schedule, warmup, low, peak, end), rtol=3e-6)
            np.testing.assert_allclose(b1, curve(share, "linear", warmup, 0.95, 0.85, 0.95), rtol=1e-6)
    with pytest.raises(TypeError):
        at(jnp.int32(3))


def test_warm_up_by_share_of_steps_and_of_examples():
    o = config.base().optim
    o.update(schedule="linear", warmup_epochs=0.0, warmup_share=0.25, lr=1.0, final_lr=0.0, warmup_lr=0.0)
    warmup, at = schedules.make(o, Ramp(64), examples=None, total=92, by_examples=True)
    assert warmup == 23
    np.testing.assert_allclose(
        [at(jnp.int32(step))[0] for step in (0, 13, 23, 61)], [0, 13 / 23, 1, 31 / 69], atol=1e-7
    )
    ramp = Ramp(full=64, start=16, increment=16, steps=60)  # 3840 examples in 90 steps
    warmup, at = schedules.make(o, ramp, examples=None, total=90, by_examples=True)
    assert (warmup, ramp.first(warmup)) == (40, 960)
    np.testing.assert_allclose(at(jnp.int32(20))[0], 320 / 960, rtol=1e-6)
    o.warmup_share = 0.999
    with pytest.raises(ConfigError, match=r"optim.warmup_share=0.999\) is 92 steps, and the whole run is 92"):
        schedules.make(o, Ramp(64), examples=None, total=92, by_examples=False)


def test_steps_and_waiting_count_and_nothing_else(monkeypatch):
    books = {"steps": 6.0, "data wait": 1.5, "compile": 100.0, "evaluation": 100.0, "checkpoint": 9.0, "start-up": 50.0}
    one = budget.Budget(30.0, books, every=5)
    assert one.used == 0.25 and not one.spent and str(one) == "25.0 % of 30 s used"
    one.read(3, books | {"steps": 13.5})
    assert one.used == 0.5
    one.read(4, books | {"steps": 31.0})
    assert one.used == 1.0 and one.spent
    assert budget.Budget(30.0, {}, every=5).used == 0.0
    # Of several processes the first speaks, and only now and then.
    told = {}
    monkeypatch.setattr(budget, "peers", types.SimpleNamespace(count=lambda: 2, same=lambda x: told.get("first", x)))
    two = budget.Budget(30.0, {}, every=5)
    told["first"] = 0.125
    used = []
    for step in range(1, 11):
        two.read(step, books)
        used.append(two.used)
        told["first"] = 0.125 + step / 100
    assert used == [0.0] * 4 + [0.125 + 0.04] * 5 + [0.125 + 0.09]


class Time:
    """Stands in for the module `time` where seconds are booked."""

    def __init__(self):
        self.now, self.spent = 1000.0, iter(SECONDS)

    def time(self):
        return self.now

    monotonic = time


@pytest.fixture
def clocked(monkeypatch):
    """Steps take SECONDS, their data WAIT, and an evaluation more than all of them."""
    time = Time()
    put, train_stream, evaluate = streams.put, streams.train, steps.evaluate

    def slow_put(run, host):
        placed = put(run, host)
        time.now += next(time.spent)
        return placed

    def slow_stream(*args):
        for batch in train_stream(*args):
            time.now += WAIT
            yield batch

    def slow_evaluate(*args):
        time.now += 7000.0
        return evaluate(*args)

    monkeypatch.setattr(goodput, "time", time)
    monkeypatch.setattr(streams, "put", slow_put)
    monkeypatch.setattr(streams, "train", slow_stream)
    monkeypatch.setattr(steps, "evaluate", slow_evaluate)
    return time


@pytest.fixture
def short(plain, one_device):
    plain.update(total_steps=0, total_seconds=TOTAL, log_every=1, loggers=(), batch_ramp_start=8, batch_ramp_steps=3)
    plain.model.update(width=16, depth=1, num_heads=4, mlp_dim=24)
    plain.augment.rand_magnitude = 0.0
    plain.optim.update(LEVELS, schedule="linear", warmup_share=0.375, ema=0.0)
    plain.eval.every, plain.checkpoint.every, plain.probe.every = 3, KEPT, 0
    config.check(plain)
    return plain


def kinds(workdir, kind):
    return {r["step"]: r for r in report.read_records(workdir / "metrics.jsonl") if r["kind"] == kind}


def summary(workdir):
    return json.loads((workdir / "summary.json").read_text())


def used_before(*attempts):
    """The share that is used before each step, to the one with which there is nothing left, of steps that took so long;
    the wait for the first batch of an attempt is of its start."""
    spent = [seconds + WAIT * (i > 0) for attempt in attempts for i, seconds in enumerate(attempt)]
    ends = list(itertools.accumulate(spent))
    last = next(i for i, end in enumerate(ends) if end >= TOTAL)
    return np.array([0.0, *ends[:last]]) / TOTAL


@pytest.mark.slow
def test_a_run_ends_with_its_seconds_and_goes_on_with_what_was_used(
    short, clocked, tmp_path, capsys, monkeypatch, unchecked, keeping
):
    with power_cut(monkeypatch, CUT):
        train.train(short, tmp_path)
    page = capsys.readouterr().out
    assert "29 s of steps and waiting for data, 37.5 % of them warm-up" in page and "not bit for bit" in page
    assert train.train(short, tmp_path) == 0
    out = capsys.readouterr().out
    assert f"Going on from step {KEPT} in {tmp_path}, 33.6 % of 29 s used." in out and "Done." in out

    shares = used_before(SECONDS[:KEPT], SECONDS[CUT:])  # the fifth was done twice
    found = kinds(tmp_path, "train")
    assert [*found] == [*range(1, len(shares) + 1)] and len(shares) == 8
    np.testing.assert_array_equal([r["budget_used"] for r in found.values()], shares.astype(np.float32))
    wanted = [curve(share, "linear", 0.375, LEVELS["warmup_lr"], LEVELS["lr"], LEVELS["final_lr"]) for share in shares]
    np.testing.assert_allclose([r["lr"] for r in found.values()], wanted, rtol=3e-6)
    assert [r["examples_seen"] for r in found.values()] == [8, 16, 24, 40, 56, 72, 88, 104]  # by the step alone
    assert [*kinds(tmp_path, "eval")] == [3, 6, 8]
    end = summary(tmp_path)
    assert (end["steps"], end["budget_used"], end["stopped_early"]) == (8, 1.0, False)
    assert end["seconds"]["steps"] + end["seconds"]["data wait"] == pytest.approx(32.5)
    assert end["seconds"]["evaluation"] >= 3 * 7000 and (tmp_path / "checkpoints" / "8").is_dir()

    before = clocked.now
    assert train.train(short, tmp_path) == 0
    assert "This run is complete: 8 steps" in (out := capsys.readouterr().out) and "total_seconds to go on" in out
    assert clocked.now == before and summary(tmp_path) == end
    short.total_seconds += 5.0
    assert train.train(short, tmp_path) == 0
    assert summary(tmp_path)["steps"] == 9 and [*kinds(tmp_path, "train")] == [*range(1, 10)]


def test_runs_together_have_no_clock_of_their_own(short):
    with pytest.raises(ConfigError, match="together where total_seconds=29.0 would be those of all of them"):
        together.check([short])


def test_what_needs_no_number_of_steps(short):
    assert config.total_steps(short, 64) is None and config.total_steps(short, None) is None
    run = experiment.build(short, examples=None, mesh=None)
    assert (run.total, run.warmup) == (None, None)
    by_steps = short.copy_and_resolve_references()
    by_steps.update(total_seconds=0.0, total_steps=5)
    assert run.flops_per_example == experiment.build(by_steps, examples=64, mesh=None).flops_per_example
    short.eval.patience = 2
    assert loop.given_up(short, 9, None).startswith("It ends at step 9, before total_seconds=29.0 are used: the last 2")


def test_the_time_left_is_by_the_share(capsys, monkeypatch):
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: False, raising=False)
    line = progress.Progress(start=0, total=None)
    for step, wall_s, used in ((1, 90.0, 0.1), (8, 100.0, 0.3)):
        line.say(step, "train", {"loss": 1.0, "budget_used": used, "wall_s": wall_s})
    first, second = capsys.readouterr().out.splitlines()
    assert first == "step 1  train  loss 1  budget_used 10.0%"
    assert second == "step 8  train  loss 1  budget_used 30.0%  left 00:00:35"
