"""Heads of several numbers and ranks in one program: weights are those of each run alone, and zeros stay zeros."""

import json

import jax
import numpy as np
import pytest

from leanformer import config, train
from leanformer import together as command
from leanformer.errors import ConfigError
from leanformer.models.encoder import AveragedAttention
from leanformer.runtime.mesh import make_mesh
from leanformer.training import experiment, padding, report, streams, together
from leanformer.training.checkpoint import Checkpoints
from leanformer.training.grid import grouped, members


STEPS = 6
HEADS = {"a": (2, 3, None), "b": (3, 2, 7), "c": (1, 5, None)}  # number, rank, value width; no run has room for all
EXACT = {  # every option of attention that is not refused, but for `logit_scale`
    **{"temperature": True, "soft_cap": 3.0, "out_bias": False, "modules": 2},
    **{"qkv_init": "orthogonal", "levers_on": "qk", "value_residual": 0.3, "value_mix": "learned"},
}
REFUSED = {
    **{"num_kv_heads": 1, "attention_dropout": 0.1, "qk_norm": "unit", "rotary": 100.0},
    **{"spectral": 0.5, "sigma_reparam": True},
}


def small(name, **model):
    c = config.points()
    seed = sorted(HEADS).index(name)
    c.update(seed=seed, batch_size=8, total_steps=STEPS, log_every=3)
    c.data.update(points=5, dim=7, examples=8)
    num_heads, head_dim, value_dim = HEADS[name]
    c.model.update(width=7, depth=2, num_heads=num_heads, head_dim=head_dim, value_dim=value_dim, mlp_dim=11, **model)
    # Softmax does not see biases of keys: their gradient is rounding alone, which a smaller eps would make large.
    c.optim.update(lr=0.01 / (1 + seed), warmup_steps=3, ema=0.9, weight_decay=0.1, clip_norm=0.5, eps=1e-3)
    c.eval.update(every=3, batch_size=8)
    c.checkpoint.update(every=3, keep=9)
    c.probe.update(every=3, examples=8)
    c.loggers = ()
    return c


def built(configs):
    mesh = make_mesh(devices=jax.devices()[:1])
    return [experiment.build(c, examples=None, mesh=mesh) for c in configs]


def trained(runs, steps):
    """The states of runs after steps of one program, padded, and those of each alone."""
    feeds = [streams.train_batches(run, run.task.open("train")) for run in runs]
    program = together.Together(runs, [run.initial_state() for run in runs])
    alone = [run.initial_state() for run in runs]
    jitted = [jax.jit(run.train_step) for run in runs]
    for number in range(steps):
        hosts = [feed[number] for feed in feeds]
        program.step(hosts)
        alone = [
            step(state, streams.put(run, host), run.run_key())[0]
            for step, run, state, host in zip(jitted, runs, alone, hosts, strict=True)
        ]
    return program, alone


def largest(found, expected):
    leaves = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return max(float(np.abs(np.asarray(a) - b).max()) for a, b in leaves)


CASES = {"scale, adamw": ({"logit_scale": 0.7}, {}), "options, sgd": (EXACT, {"name": "sgd", "b1": 0.5})}


@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_of_each_alone_and_zeros_stay_zeros(case, one_device):
    model, optim = CASES[case]
    configs = [small(name, **model) for name in HEADS]
    for c in configs:
        c.optim.update(**optim)
    runs = built(configs)
    program, alone = trained(runs, STEPS)
    for i, (run, state) in enumerate(zip(runs, alone, strict=True)):
        assert largest(program.state(i).weights, state.weights) < 2e-6, case
        assert largest(program.state(i).ema, state.ema) < 2e-6, case
        padded = together.of(i, program._states)
        again = padding.pad(padding.cut(padded, run.like), padded)
        assert largest((again.params, again.moments, again.ema), (padded.params, padded.moments, padded.ema)) == 0
        assert sum(x.size for x in jax.tree.leaves(padded)) > sum(x.size for x in jax.tree.leaves(state))
        assert largest(state.params, run.initial_state().params) > 1e-3


def test_without_each_ones_scale_of_logits_they_are_others(one_device, monkeypatch):
    monkeypatch.setattr(padding, "scale", lambda run, wide: 1.0)
    program, alone = trained(built([small(name) for name in "ac"]), 3)
    lower, largest_rank = (largest(program.state(i).weights, state.weights) for i, state in enumerate(alone))
    assert lower > 1e-4 and largest_rank < 2e-6


@pytest.mark.parametrize("name", REFUSED)
def test_what_counts_heads_or_channels_is_refused(name):
    assert REFUSED.keys() | EXACT.keys() | {"logit_scale", "rotary_width"} == AveragedAttention.options.keys()
    configs = [small(run, **{name: REFUSED[name]}) for run in "ab"]
    with pytest.raises(
        ConfigError, match=f"differ in model.head_dim, and zeros cannot fill heads .* model.{name}=.* one by"
    ):
        together.check(configs)
    together.check([small("a", **{name: REFUSED[name]})] * 2)


def test_other_models_and_optimizers_are_refused():
    muon = [small(name) for name in "ab"]
    for c in muon:
        c.optim.name = "muon"
    with pytest.raises(ConfigError, match='optim.name="muon" is none of adamw, sgd, .* Train them one by'):
        together.check(muon)
    nystrom = [small(name, attention="nystrom") for name in "ab"]
    with pytest.raises(ConfigError, match="model.name=\"encoder\" does not say .* model.attention='nystrom' stays"):
        together.check(nystrom)
    wider = [small("a"), small("b")]
    wider[1].model.mlp_dim = 13
    with pytest.raises(ConfigError, match="differ in model.mlp_dim: together .* model.num_heads, model.head_dim"):
        together.check(wider)


def weights(folder, c, step=STEPS):
    [run] = built([c])
    with Checkpoints(folder / "checkpoints") as saved:
        return saved.restore(run.like, step)[0].weights


def test_folders_are_those_of_each_alone(tmp_path, one_device, monkeypatch):
    """A group goes on where it stopped, and one of it goes on alone: all that is recorded is of its own shape."""
    configs = {name: small(name) for name in "ab"}
    for _ in range(2):
        asked = iter(range(100))  # once a step, and before each batch of an evaluation: two of them follow on step 3

        def stopped(self, asked=asked):
            self.status = 75
            return next(asked) >= 2

        with monkeypatch.context() as patch:
            patch.setattr(command.StopRequest, "now", stopped)
            assert command.train([(tmp_path / name, c) for name, c in configs.items()]) == 75
    reached = {int(path.name) for name in configs for path in (tmp_path / name / "checkpoints").iterdir()}
    assert reached == {3, 4}
    folders = (tmp_path / "a", tmp_path / "alone")
    for folder in folders:
        assert train.train(configs["a"], folder) == 0
    assert largest(*(weights(folder, configs["a"]) for folder in folders)) < 2e-6
    ours, theirs = (report.read_records(folder / "metrics.jsonl") for folder in folders)
    assert [(r["step"], r["kind"]) for r in ours] == [(r["step"], r["kind"]) for r in theirs]
    probes = [[r["attention_output"] for r in records if r["kind"] == "probe"] for records in (ours, theirs)]
    assert len(probes[0]) == 3 and [p["shape"] for p in probes[0]] == [p["shape"] for p in probes[1]]
    np.testing.assert_allclose(*([p["median"] for p in of] for of in probes), rtol=1e-3)


def test_figures_of_cost_are_of_each_ones_own_shape(tmp_path, one_device):
    configs = {name: small(name) for name in "ab"}
    for c in configs.values():
        c.update(total_steps=4)
        c.probe.every = 0
    assert command.train([(tmp_path / name, c) for name, c in configs.items()]) == 0
    for name, run in zip(configs, built(configs.values()), strict=True):
        said = json.loads((tmp_path / name / "summary.json").read_text())
        assert said["params"] == sum(x.size for x in jax.tree.leaves(run.like.params)), name
        assert [said["forward_flops"], said["train_flops"]] == [*run.flops_per_example] and said["together"] == 2


def test_a_sweep_groups_ranks_where_it_is_asked_to(tmp_path):
    ranks = [f"rank_nn_small:rank={rank}" for rank in (8, 4)]
    assert [len(unit.members) for unit in grouped(members(ranks, [], [], 2, tmp_path))] == [2, 2]
    assert [len(unit.members) for unit in grouped(members(ranks, [], [], 2, tmp_path), padded=True)] == [4]
    muon = members(ranks, [], ["optim.name=muon"], 2, tmp_path)
    assert [len(unit.members) for unit in grouped(muon, padded=True)] == [2, 2]
