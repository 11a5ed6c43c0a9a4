"""A batch that grows: the same examples in the same order, whoever trains and however often it is stopped."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from power_cuts import power_cut

from leanformer import config, data, together, train
from leanformer.config import Ramp
from leanformer.costs import remedies
from leanformer.errors import ConfigError
from leanformer.training import experiment, report, schedules, streams
from leanformer.training.checkpoint import Checkpoints


RAMP = Ramp(full=16, start=4, increment=4, steps=7)
SIZES = [4, 4, 8, 8, 12, 12, 12, 16, 16]  # of its first steps


class Numbers:
    num_classes, classes = 211, None

    def __len__(self):
        return 211

    def __getitem__(self, index):
        return {"label": index}

    def name(self, index):
        return f"number {index}"


def batches(ramp, **options):
    return data.Batches(Numbers(), lambda i, x, draws: {"drawn": draws().integers(9**9)}, batch_size=ramp, **options)


def test_sizes_and_places_by_step():
    assert [RAMP.at(step).size for step in range(9)] == SIZES
    assert [RAMP.first(step) for step in range(9)] == [sum(SIZES[:step]) for step in range(9)]
    assert RAMP.sizes == [4, 8, 12, 16]
    assert [Ramp(16).first(step) for step in (0, 1, 7)] == [0, 16, 112] and Ramp(16).sizes == [16]
    assert [RAMP.steps_for(RAMP.first(step)) for step in range(40)] == [*range(40)]
    assert [RAMP.steps_for(x) for x in (0, 1, 3, 7, 13, 17)] == [0, 0, 1, 2, 3, 3]
    assert [Ramp(16, 2, 7, 3).micro_batches(size, 4) for size in (2, 9, 16)] == [1, 2, 4]
    assert [RAMP.micro_batches(size, 4) for size in RAMP.sizes] == [1, 2, 3, 4]


def test_batches_of_any_number_of_processes_are_the_order_without_a_ramp():
    plain = batches(4, train=True, seed=5)
    wanted = [plain[step] for step in range(3 * 211 // 4)]
    for processes in (1, 2, 4):
        parts = [batches(RAMP, train=True, seed=5, process=i, processes=processes) for i in range(processes)]
        found = [part[step] for step in range(40) for part in parts]
        for name in ("index", "drawn"):
            flat = np.concatenate([batch[name] for batch in found])
            np.testing.assert_array_equal(flat, np.concatenate([b[name] for b in wanted])[: len(flat)])
    assert len(flat) == RAMP.first(40) > 2 * 211
    with pytest.raises(data.loader.DataError, match="global batch of 4 cannot be split over 8 processes"):
        batches(RAMP, train=True, processes=8)


def test_the_rate_follows_the_measure_of_the_length():
    """By examples where the length is in epochs: half of them, half of the rate, which is not half of the steps."""
    o = config.base().optim
    o.update(schedule="linear", warmup_epochs=0.0, lr=1.0, final_lr=0.0, warmup_lr=0.0)
    ramp = Ramp(full=64, start=16, increment=16, steps=60)
    total, length = 90, ramp.first(90)
    rates = {by: schedules.make(o, ramp, examples=999, total=total, by_examples=by)[1] for by in (True, False)}
    for step in (0, 11, 20, 47, 59, 60, 89, 90):
        here = jax.numpy.int32(step)
        np.testing.assert_allclose(rates[True](here)[0], 1 - ramp.first(step) / length, atol=1e-7)
        np.testing.assert_allclose(rates[False](here)[0], 1 - step / total, atol=1e-7)
    o.update(warmup_epochs=0.5)
    warmup, rate = schedules.make(o, ramp, examples=1280, total=total, by_examples=True)
    assert (warmup, ramp.first(warmup)) == (30, 640)  # 20 batches of 16 and 10 of 32
    np.testing.assert_allclose(rate(jax.numpy.int32(10))[0], 160 / 640, rtol=2e-6)
    np.testing.assert_allclose(rate(jax.numpy.int32(30))[0], 1.0, rtol=2e-6)
    o.update(schedule="wsd", decay_share=0.9)
    with pytest.raises(ConfigError, match=r"640 examples of warm-up and 3456 of decay .* than the run's 3840"):
        schedules.make(o, ramp, examples=1280, total=total, by_examples=True)


def test_length_by_tokens():
    c = config.language()
    c.update(total_steps=0, total_tokens=128 * 64 * 50.0)
    config.check(c)
    assert config.total_steps(c, None) == 50
    c.update(batch_ramp_start=32, batch_ramp_steps=30)  # 10 steps each of 32, 64 and 96: 15 whole batches
    assert config.total_steps(c, None) == 30 + 35
    c.total_tokens = 1e20
    with pytest.raises(ConfigError, match=r"total_tokens=1e.20 are 1.2e.16 steps: too many"):
        config.total_steps(c, 7)
    c.total_steps = 7
    with pytest.raises(
        ConfigError, match=r"exactly one of total_steps=7, total_epochs=0.0, total_tokens=1e.20 and total_s"
    ):
        config.check(c)


@pytest.fixture
def growing(tiny):
    """Batches of 8 and then of 32, in micro-batches of 8."""
    tiny.update(batch_size=32, accumulate=4, total_steps=5, log_every=1, loggers=())
    tiny.update(batch_ramp_start=8, batch_ramp_increment=24, batch_ramp_steps=3)
    tiny.model.update(width=16, depth=1, num_heads=4, mlp_dim=24)
    tiny.checkpoint.every, tiny.probe.every, tiny.eval.every = 1, 0, 0
    return tiny


def kept(workdir, run):
    with Checkpoints(workdir / "checkpoints") as saved:
        return saved.restore(run.like)[0]


def records(workdir):
    found = report.read_records(workdir / "metrics.jsonl")
    return [{key: value for key, value in r.items() if key not in report.TIMING} for r in found]


def test_killed_in_the_ramp_it_goes_on_bit_for_bit(growing, tmp_path, monkeypatch, unchecked, keeping):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert train.train(growing, whole) == 0
    with power_cut(monkeypatch, 2):
        train.train(growing, killed)
    assert train.train(growing, killed) == 0
    assert records(whole) == records(killed)
    seen = [r["examples_seen"] for r in records(whole) if r["kind"] == "train"]
    assert seen == [8, 16, 24, 56, 88]
    assert json.loads((whole / "summary.json").read_text())["examples_seen"] == 88
    run = experiment.build(growing, examples=999, mesh=None)
    for a, b in zip(jax.tree.leaves(kept(whole, run)), jax.tree.leaves(kept(killed, run)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_eight_devices_are_one(growing, meshes, unchecked):
    """Losses and gradients by the program of each size."""
    found = {}
    for shape in ((1, 1), (4, 2)):
        run = experiment.build(growing, examples=64, mesh=meshes(*shape))
        batches, state, key = streams.train_batches(run, run.task.open("train")), run.initial_state(), run.run_key()
        steps = {size: run.compile_train_step(size) for size in run.ramp.sizes}
        lines = []
        for step in range(5):
            state, metrics = steps[run.ramp.at(step).size](state, streams.put(run, batches[step]), key)
            lines.append([float(metrics["loss"]), float(metrics["grad_norm"])])
        found[shape] = np.array(lines)
    np.testing.assert_allclose(found[4, 2], found[1, 1], rtol=3e-5)
    assert len({*found[1, 1][:, 0]}) == 5


def test_what_cannot_share_a_growing_batch_says_so(growing, meshes, tmp_path):
    config.check(growing)
    with pytest.raises(ConfigError, match="batch_size / accumulate is 8, which 16 devices"):
        growing.mesh.data = 16
        config.check(growing)
    growing.mesh.data = -1
    with pytest.raises(
        ConfigError, match="Runs cannot be trained together where batch_ramp_start=8 asks for a program"
    ):
        together.train([(tmp_path / "a", growing)])
    growing.update(batch_ramp_start=6, batch_ramp_increment=13, batch_ramp_steps=2)  # 6, 19, 32
    assert [s.changes["accumulate"] for s in remedies.accumulations(growing, 1)] == [32]
    assert remedies.smaller_batch(growing, 1) is None and not remedies.shared(growing, 1)
    growing.update(accumulate=1)
    assert remedies.shared(growing, 1) and not remedies.shared(growing, 2)


def test_a_ramp_is_a_frozen_value():
    assert dataclasses.replace(RAMP, steps=9).first(9) == 3 * (4 + 8 + 12)
