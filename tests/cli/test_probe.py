"""The probe's command: names to measures, theory beside them, outside weights, the sweep of heads, tables, charts."""

import json

import jax
import numpy as np
import pytest
from commands import command, inside, run

from leanformer.conditioning import charts, formula, tables
from leanformer.data.images.synthetic import Synthetic
from leanformer.errors import ConfigError
from leanformer.models import vit
from leanformer.training import experiment, probing, streams
from tests.cli.test_train import TINY


MEASURES = ["attention_output", "head_output", "attention_probabilities", "attention_entropy", "output_weights"]


@pytest.fixture
def small(tiny):
    """Two layers, two heads of six."""
    tiny.model.update(depth=2, num_heads=2, head_dim=6)
    tiny.probe.examples = 8
    return tiny


@pytest.fixture
def built(small, meshes):
    return experiment.build(probing.bare(small), examples=1, mesh=meshes(1, 1))


@pytest.fixture
def images(rng):
    return {"image": jax.numpy.asarray(rng.integers(0, 256, (8, 14, 14, 1)), np.uint8)}


@pytest.fixture
def found(built, images):
    return tables.describe(jax.device_get(probing.make_reader(built, MEASURES)(built.random_weights(0), images)))


def test_names_are_told_apart():
    assert probing.split_names(["output_weights", "tokens"]) == (["tokens"], ["output_weights"])
    for names in (["tokens", "kappa"], []):
        with pytest.raises(ConfigError, match="attention_output.*\n.*query_weights"):
            probing.split_names(names)


def test_taps_under_other_names_than_the_family_says_are_refused(built, images, monkeypatch):
    monkeypatch.setattr(vit.Model, "stacks", lambda model: {"trunk": model.blocks.layers})
    read = probing.make_reader(built, ["tokens"])
    with pytest.raises(
        ConfigError, match="models.vit returns taps of blocks, and its stacks are trunk. Return those, or"
    ):
        jax.eval_shape(read, built.like.weights, images)


def test_theory_is_of_the_matrix_measured():
    said = tables.theory("attention_output", (5, 11))
    assert said["shape"] == [5, 11] and said["formula"] == formula(5, 11)
    assert said["q10"] < said["median"] < said["q90"]
    assert tables.theory("tokens", (7, 7))["formula"] is None  # infinite, which JSON has not
    for name in ("attention_probabilities", "blocks.landmark_probabilities"):
        assert tables.theory(name, (5, 5)) is None


def test_entries_have_shape_count_and_quantiles(found):
    entries, spectra = found
    json.dumps(entries, allow_nan=False)
    assert entries["attention_output"]["shape"] == [5, 12] and entries["head_output"]["shape"] == [5, 6]
    assert entries["head_output"]["matrices_per_layer"] == 16 and entries["output_weights"]["matrices_per_layer"] == 1
    assert entries["attention_entropy"]["shape"] is None and "attention_entropy" not in spectra
    assert spectra["head_output"].shape == (2, 8, 2, 5)
    for name, entry in entries.items():
        assert len(entry["layers"]) == 2, name
        assert all({"median", "q10", "q90", "count"} <= layer.keys() for layer in entry["layers"])


def test_a_table_says_what_each_figure_is(found):
    entries, _ = found
    text = tables.table(entries)
    assert max(map(len, text.split(tables.LEGEND)[0].splitlines())) <= tables.LINE
    for said in (*MEASURES, "5 x 12", "condition number", "value", "layer 1", "Gaussian", "0 of 16", "0 of 2"):
        assert said in text


def test_numbers_that_are_not_finite_are_flagged(built, images):
    weights = jax.tree.map(lambda x: np.full_like(x, np.nan), built.random_weights(0))
    entries, spectra = tables.describe(jax.device_get(probing.make_reader(built, MEASURES)(weights, images)))
    json.dumps(entries, allow_nan=False)
    text = tables.table(entries)
    assert "none finite*" in text and "attention_output, layer 0, 1: 8 of 8 matrices hold a NaN" in text
    assert charts.by_layer(entries) and charts.over_steps([0, 1], [entries] * 2) and charts.spectra(spectra)


def test_bounds_are_drawn_as_bounds_and_bands_are_seen(found):
    entries, _ = found
    layers = [dict(layer, q10=10.0, median=100.0, q90=5000.0) for layer in entries["attention_output"]["layers"]]
    entry = entries["attention_output"] | {"layers": layers, "theory": None}
    (axes,) = charts.by_layer({"attention_output": entry}).axes
    low, high = axes.get_ylim()
    assert low <= 10 and high >= 5000 and not [line for line in axes.lines if "singular" in line.get_label()]
    layers[0]["singular"] = 3
    (axes,) = charts.by_layer({"attention_output": entry}).axes
    assert [line.get_label() for line in axes.lines][-1] == "singular in float32: at least this"
    nothing = [dict(layer, q10=None, median=None, q90=None, singular=0) for layer in layers]
    (axes,) = charts.by_layer({"attention_output": entry | {"layers": nothing}}).axes
    assert [text.get_text() for text in axes.texts] == ["no finite value"]


def test_panels_that_share_an_axis_show_all_of_both(small, meshes, images):
    swept = probing.sweep(small, meshes(1, 1), images, [1, 2], 1)
    for point, middle in zip(swept["points"], (1e5, 4.0, 3.0, 4.0), strict=True):
        point["pooled"] |= {"q10": middle / 2, "median": middle, "q90": 2 * middle}
        point["by_seed"] = [middle]
    for axes in charts.over_heads(swept).axes:
        low, high = axes.get_ylim()
        assert low <= 1.5 and high >= 2e5


class Three(Synthetic):
    def __len__(self):
        return 3


def test_too_few_examples_are_told(built):
    with pytest.raises(ConfigError, match="probe.examples=8, and the evaluation split has 3. Set --config.probe.exam"):
        streams.probe(built, Three("train", 14, 1, 5))


def test_a_run_of_many_devices_is_probed_on_few(small, meshes):
    small.update(batch_size=64)
    small.eval.batch_size = 64
    small.mesh.update(data=1, fsdp=64)
    experiment.build(probing.bare(small), examples=1, mesh=meshes(1, 1))


def test_warmup_does_not_keep_a_model_from_being_counted(small, meshes):
    small.update(total_steps=0, total_epochs=30.0)
    small.optim.update(warmup_epochs=0.0, warmup_steps=200)
    built = experiment.build(small, examples=1600, mesh=meshes(1, 1))
    assert built.flops_per_example[0] > 0
    experiment.build(probing.bare(small), examples=1, mesh=meshes(1, 1))


@pytest.mark.parametrize(
    ("latent", "projections"),
    [
        ({}, ["query_weights", "key_weights", "value_weights", "output_weights"]),
        ({"attention": "latent", "kv_rank": 5}, ["query_weights", "output_weights"]),
        ({"attention": "latent", "kv_rank": 5, "query_rank": 7}, ["output_weights"]),
    ],
    ids=("plain", "latent", "latent_queries"),
)
def test_projections_are_those_there_are(small, meshes, images, latent, projections):
    with small.unlocked():
        small.model.update(latent)
    run = experiment.build(probing.bare(small), examples=1, mesh=meshes(1, 1))
    assert probing.projections(run) == projections
    found = probing.make_reader(run, projections)(run.random_weights(0), images)
    assert sorted(found) == sorted(projections)


def test_a_share_of_warm_up_keeps_no_model_from_being_counted(small, meshes):
    small.update(total_steps=0, total_epochs=1.0)
    small.optim.update(warmup_share=0.6)
    assert experiment.build(probing.bare(small), examples=1, mesh=meshes(1, 1)).total == 1


def test_plans_of_both_trades(small):
    plans = probing.head_plans(small.model, [1, 3])
    assert [(trade, p["num_heads"], p["head_dim"]) for trade, p in plans] == [
        *((probing.HEAD_WIDTH, n, 6) for n in (1, 3)),
        *((probing.TOTAL_WIDTH, n, 12 // n) for n in (1, 3)),
    ]
    small.model.value_dim = 9
    assert probing.head_plans(small.model, [3])[1][1] == {"num_heads": 3, "head_dim": 4, "value_dim": 6}
    for heads in (4, 0):  # 4 divides 2 x 6 and not 2 x 9
        with pytest.raises(ConfigError, match="Heads that can: 1, 2, 3"):
            probing.head_plans(small.model, [heads])


def test_a_sweep_measures_the_shapes_it_says(small, meshes, images):
    swept = probing.sweep(small, meshes(1, 1), images, [1, 2], 2)
    json.dumps(swept, allow_nan=False)
    assert swept["measure"] == "attention_output" and swept["seeds"] == [0, 1]
    assert [p["shape"] for p in swept["points"]] == [[5, 6], [5, 12], [5, 12], [5, 12]]
    assert [p["pooled"]["count"] for p in swept["points"]] == [2 * 2 * 8] * 4
    one, two = swept["points"][1], swept["points"][3]  # the configured heads, where the trades meet
    assert one["pooled"] == two["pooled"] and len(set(one["by_seed"])) == 2
    assert "fixed total width" in tables.sweep_table(swept)
    assert len(charts.over_heads(swept).axes) == 2


@pytest.mark.slow
def test_a_command_from_checkpoints_to_charts(tmp_path):
    changes = TINY | {"total_steps": 4, "checkpoint.every": 2, "eval.every": 0, "probe.every": 0, "probe.examples": 4}
    status, _, err = run(command("train", tmp_path, changes))
    assert status == 0, err
    status, out, err = run([*command("probe", tmp_path, config=None), "--all", "--heads=2,4", "--seeds=1"])
    assert status == 0, err
    found = json.loads((tmp_path / "probe" / "probe.json").read_text())
    assert [snapshot["step"] for snapshot in found["snapshots"]] == [2, 4] and found["examples"] == 4
    assert found["versions"]["jax"] and len(found["sweep"]["points"]) == 4
    for name, entry in found["snapshots"][-1]["measures"].items():
        assert name in out and len(entry["layers"]) == 3
    names = {"by_layer.png", "over_steps.png", "over_heads.png", "spectra.png"}
    assert {p.name for p in (tmp_path / "probe").iterdir()} == names | {"probe.json"}
    assert all((tmp_path / "probe" / name).stat().st_size > 10_000 for name in names)


BAD = [
    ([], "Give one of --workdir=DIR and --config=FILE"),
    (["--config=configs/nope.py"], "cannot be loaded"),
    (["--config=configs/quickstart.py", "--step=3"], "--step goes with --workdir only"),
    (["--config=configs/quickstart.py", "--heads=3"], "Heads that can: 1, 2, 4, 8"),
    (["--config=configs/quickstart.py", "--measures=kappa"], "kappa is no measure here"),
    (["--config=configs/quickstart.py", "--examples=0"], "probe.examples=0 must be at least 1"),
]


@pytest.mark.parametrize(("words", "message"), BAD, ids=[" ".join(words[-1:]) for words, _ in BAD])
def test_bad_flags_are_one_message(tmp_path, words, message):
    status, _, err = inside([*command("probe", config=None), *words, f"--out={tmp_path}"])
    assert status == 2 and message in err
