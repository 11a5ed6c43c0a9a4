"""Configs of published models with layers of different sizes, and their parameter counts."""

import pytest
from commands import check_refused, run_in_process

from leanformer import cli, tasks
from study.published import atlas_models


# Of each kind of set a row with unequal layers, traced as a whole.
ROWS = {
    "language_models:pareto_GPT2_lm1b_arm/M2": 0,
    "language_models:random_GPT2_lm1b/config_0_j1": None,
    "language_models:random_TransXL_wt103/config_1_j1": None,
    "vision_autoformer:gt_autoformer-1": 0,
}


@pytest.mark.parametrize("name", ROWS)
def test_counts_of_whole_models(name):
    """The difference of Transformer-XL per layer: position projection, biases of projections, two learned biases."""
    model = atlas_models.find(name)
    depth, width = model.sizes["depth"], model.sizes["width"]
    more = depth * (width**2 - 4 * width + 2 * width) - 2 * width if ROWS[name] is None else ROWS[name]
    assert model.counted - atlas_models.count_model(model) == more == model.expected
    assert atlas_models.count_by_line(model) == atlas_models.count_model(model)


def test_all_autoformers_have_the_parameters_of_their_table():
    assert [*atlas_models.compare("vision_autoformer")] == [("vision_autoformer", 200, 200, 0)]


def test_command_trains_the_row():
    words = ["", "", "study.published.atlas_models"]
    name = "vision_autoformer:gt_autoformer-1"
    status, out, err = run_in_process([*words, f"--row={name}"])
    assert (status, err) == (0, "") and "9,573,100 here, 9,573,100" in out
    command = out.splitlines()[0].split()[3:-1]
    c = cli.parse([cli.CONFIG], command).config
    tasks.resolve(c)
    sizes = atlas_models.find(name).sizes
    assert {key: c.model[key] for key in sizes} == sizes and len({*sizes["num_heads"]}) > 1
    check_refused([*words, "--row=bert:0"], "bert:0", "WMA")
    check_refused([*words, "--row=bert:500"], "bert:500", "500")
    check_refused([*words, "--row=pit:1"], "pit", "bert")
