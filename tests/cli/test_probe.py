"""Probing: measure names, theoretical predictions, the sweep over heads, tables and charts."""

import copy
import json

import jax
import numpy as np
import pytest
from commands import check_refused, command
from golden import check_page
from messages import mentions, refuses
from random_weights import fill_weights

from leanformer import tasks
from leanformer.conditioning import charts, formula, tables
from leanformer.training import model_setup, probing


MEASURES = ["attention_output", "head_output", "attention_probabilities", "attention_entropy", "output_weights"]


def set_two_layers(c):
    """Set two layers of two heads with head_dim 6."""
    c.model.update(depth=2, num_heads=2, head_dim=6)
    c.probe.examples = 8
    return c


@pytest.fixture
def small(tiny):
    return set_two_layers(tiny)


@pytest.fixture(scope="module")
def tiny_model(make_tiny, meshes):
    return model_setup.set_up_model(set_two_layers(make_tiny()), mesh=meshes(1, 1))


@pytest.fixture(scope="module")
def reader(tiny_model):
    return probing.make_reader(tiny_model, tasks.build_task(tiny_model.config).objective, MEASURES)


@pytest.fixture(scope="module")
def images():
    rng = np.random.default_rng(20505)
    return {"image": jax.numpy.asarray(rng.integers(0, 256, (8, 14, 14, 1)), np.uint8)}


@pytest.fixture(scope="module")
def description(tiny_model, reader, images):
    return tables.describe(jax.device_get(reader(fill_weights(tiny_model.weights), images)))


@pytest.fixture(scope="module")
def head_sweep(make_tiny, meshes, images):
    def weights(model, seed):
        return fill_weights(model.weights, seed)

    return probing.sweep(set_two_layers(make_tiny()), meshes(1, 1), images, [1, 2], 2, weights)


def test_measures_are_split_into_activations_and_weights():
    assert probing.split_names(["output_weights", "tokens"]) == (["tokens"], ["output_weights"])
    with refuses("--measures", "kappa", "attention_output", "query_weights"):
        probing.split_names(["tokens", "kappa"])
    with refuses("--measures", "attention_output", "query_weights"):
        probing.split_names([])


def test_prediction_is_for_the_measured_matrix_shape():
    prediction = tables.gaussian_prediction("attention_output", (5, 11))
    assert prediction["shape"] == [5, 11] and prediction["formula"] == formula(5, 11)
    assert prediction["q10"] < prediction["median"] < prediction["q90"]
    assert tables.gaussian_prediction("tokens", (7, 7))["formula"] is None  # infinite, which JSON cannot represent
    for name in ("attention_probabilities", "blocks.landmark_probabilities"):
        assert tables.gaussian_prediction(name, (5, 5)) is None


def test_entries_have_shape_count_and_quantiles(description):
    entries, spectra = description
    json.dumps(entries, allow_nan=False)
    assert entries["attention_output"]["shape"] == [5, 12] and entries["head_output"]["shape"] == [5, 6]
    assert entries["head_output"]["matrices_per_layer"] == 16 and entries["output_weights"]["matrices_per_layer"] == 1
    assert entries["attention_entropy"]["shape"] is None and "attention_entropy" not in spectra
    assert spectra["head_output"].shape == (2, 8, 2, 5)
    for name, entry in entries.items():
        assert len(entry["layers"]) == 2, name
        assert all({"median", "q10", "q90", "count"} <= layer.keys() for layer in entry["layers"])


def test_measures_table(description, monkeypatch):
    entries, _ = description
    text = tables.format_table(entries)
    check_page("probe_table", text)
    assert mentions(text, "5 x 12", "5 x 6", "0 of 16", "0 of 2")
    assert all(mentions(text, f"{name}: {entry['what']}.") for name, entry in entries.items())
    monkeypatch.setenv("COLUMNS", "80")
    lines = tables.format_table(entries).splitlines()
    assert max(map(len, lines)) <= 80 and sum(line.startswith("layer 1 ") for line in lines) > 1


def test_non_finite_values_are_flagged(tiny_model, reader, images):
    weights = jax.tree.map(lambda x: np.full_like(x, np.nan), fill_weights(tiny_model.weights))
    entries, spectra = tables.describe(jax.device_get(reader(weights, images)))
    json.dumps(entries, allow_nan=False)
    flags = tables._flags(entries)
    assert mentions(next(flag for flag in flags if flag.startswith("attention_output")), 0, 1, 8, "NaN")
    assert all(layer["median"] is None for layer in entries["attention_output"]["layers"])
    assert charts.plot_by_layer(entries) and charts.plot_spectra(spectra)


def test_model_setup_ignores_training_settings(small, meshes):
    """A batch size that is not divisible, an unfitting mesh and a warm-up beyond the end of the run are no errors."""
    small.update(batch_size=63, total_epochs=1.0)
    small.eval.batch_size = 61
    small.mesh.update(data=1, fsdp=64)
    small.optim.update(warmup_epochs=0.0, warmup_steps=200)
    model_setup.set_up_model(small, mesh=meshes(1, 2))


@pytest.mark.parametrize(
    ("latent", "projections"),
    [
        ({}, ["query_weights", "key_weights", "value_weights", "output_weights"]),
        ({"attention": "latent", "kv_rank": 5}, ["query_weights", "output_weights"]),
        ({"attention": "latent", "kv_rank": 5, "query_rank": 7}, ["output_weights"]),
    ],
    ids=("plain", "latent", "latent_queries"),
)
def test_projections_match_the_attention_type(small, meshes, images, latent, projections):
    with small.unlocked():
        small.model.update(latent)
    model = model_setup.set_up_model(small, mesh=meshes(1, 1))
    assert probing.projections(model) == projections
    result = jax.eval_shape(
        probing.make_reader(model, tasks.build_task(small).objective, projections), model.weights, images
    )
    assert sorted(result) == sorted(projections)


def test_head_plans_of_both_trade_offs(small):
    plans = probing.head_plans(small.model, [1, 3])
    assert [(trade, p["num_heads"], p["head_dim"]) for trade, p in plans] == [
        *((probing.HEAD_WIDTH, n, 6) for n in (1, 3)),
        *((probing.TOTAL_WIDTH, n, 12 // n) for n in (1, 3)),
    ]
    small.model.value_dim = 9
    assert probing.head_plans(small.model, [3])[1][1] == {"num_heads": 3, "head_dim": 4, "value_dim": 6}
    for heads in (4, 0):  # 4 divides 2 x 6 and not 2 x 9
        with refuses("--heads", heads):
            probing.head_plans(small.model, [heads])


def test_sweep_reports_the_measured_shapes(head_sweep):
    json.dumps(head_sweep, allow_nan=False)
    assert head_sweep["measure"] == "attention_output" and head_sweep["seeds"] == [0, 1]
    assert [p["shape"] for p in head_sweep["points"]] == [[5, 6], [5, 12], [5, 12], [5, 12]]
    assert [p["pooled"]["count"] for p in head_sweep["points"]] == [2 * 2 * 8] * 4
    one, two = head_sweep["points"][1], head_sweep["points"][3]  # the configured heads, at which both trade-offs agree
    assert one["pooled"] == two["pooled"] and len(set(one["by_seed"])) == 2
    assert len(charts.plot_over_heads(head_sweep).axes) == 2


def test_sweep_table(head_sweep):
    """Flags are set here, on the first row only, because singularity in float32 depends on rounding."""
    head_sweep = copy.deepcopy(head_sweep)
    for i, point in enumerate(head_sweep["points"]):
        point["pooled"] |= {"flags": ["FLAG"] * (i == 0), "singular": 0}
    check_page("probe_sweep", tables.format_sweep(head_sweep))


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ([], ["--workdir", "--config"]),
        (["--config=configs/quickstart.py", "--workdir=x"], ["--workdir", "--config"]),
        (["--config=configs/quickstart.py", "--heads=3"], ["--heads", 3]),
        (["--config=configs/quickstart.py", "--measures=kappa"], ["--measures", "kappa", "attention_output"]),
    ],
)
def test_bad_flags_are_one_message(tmp_path, words, parts):
    check_refused([*command("probe", config=None), *words, f"--out={tmp_path}"], *parts)
