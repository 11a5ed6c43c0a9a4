"""Every config: valid keys, and the exact parameter count in its docstring. test_gpu_lowering.py lowers its program."""

import runpy
from pathlib import Path

import numpy as np
import pytest
from messages import mentions, refuses
from ml_collections import ConfigDict

from leanformer import config
from leanformer.costs import count
from leanformer.runtime import mesh
from leanformer.training import model_setup, run_files


CONFIGS = Path(__file__).parents[2] / "configs"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.py"))
GRID = {  # Leaner Transformers, Figure 3: parameters in millions by layers and heads, head_dim 64, MLP 3072
    12: (62.952, 67.675, 72.398, 77.121, 81.844, 86.568, 91.291, 96.014, 100.737),
    8: (42.472, 45.621, 48.770, 51.919, 55.067, 58.216, 61.365, 64.514, 67.663),
}


def load(name: str, *argument: str) -> ConfigDict:
    c = runpy.run_path(str(CONFIGS / f"{name}.py"))["get_config"](*argument)
    c.model.update({"num_classes": 4} if c.model.get("num_classes") == 0 else {})  # 0: taken from the data
    return c


def count_parameters(c: ConfigDict) -> int:
    *_, (shapes, _) = model_setup.abstract_model(c)
    return count.parameters(shapes)


@pytest.mark.parametrize("name", NAMES)
def test_docstring_has_the_exact_parameter_count(name):
    """And command, hardware and provenance. Layers also declare for every parameter how `tensor` shards it."""
    c, text = load(name), (CONFIGS / f"{name}.py").read_text().split('"""')[1]
    config.check(c)
    graphdef, _, weights = model_setup.abstract_model(c)
    number = count.parameters(weights[0])
    command = f"python -m leanformer.train --config=configs/{name}.py"
    assert mentions(text, command, "Expected:", "Hardware:", "parameters")
    assert mentions(text, number) or (name, number) == ("vit_b", 86_567_656)  # its counts are in the grid
    assert not mesh.undeclared_parameters(model_setup.declared_axes(graphdef, weights))


def test_saved_config_is_read_back_unchanged(tmp_path, monkeypatch):
    """JSON has no tuples, which the checks require."""
    monkeypatch.setattr(run_files, "provenance", dict)
    for name in NAMES:
        c = load(name)
        run_files.write_config(tmp_path, c)
        result = run_files.load_config(tmp_path)
        keys, expected = (repr(sorted(config.iterate_keys(values), key=str)) for values in (result, c))
        assert keys == expected, name
        config.check(result)


@pytest.mark.parametrize(
    "words, expected",
    [
        ("modules=8", 397_378),  # Amsel et al. 2025
        ("modules=64", 1_329_218),
        ("modules=64,rank=1", 1_329_218),  # the rank does not change the count
        ("depth=3,rank=32", 3 * 280_898),
    ],
)
def test_parameter_counts_by_rank_and_modules(words, expected):
    assert count_parameters(load("rank_nn", words)) == expected
    with refuses("rank=48", "width=64"):
        load("rank_nn", "rank=48")


@pytest.mark.parametrize("depth", GRID)
def test_the_grid_of_figure_3(depth):
    result = [count_parameters(load("vit_b", f"depth={depth},heads={heads}")) for heads in range(2, 19, 2)]
    np.testing.assert_array_equal(np.round(np.array(result) / 1e6, 3), GRID[depth])
    assert depth != 8 or result[6:] == [61_364_968, 64_513_768, 67_662_568]  # reported exactly


def find_shadowing(section, prefix=""):
    """Return the dotted keys that have the name of an attribute of ConfigDict: no flag can set them."""
    wrong = [f"{prefix}{key}" for key in section if hasattr(ConfigDict, key)]
    for key, value in section.items():
        wrong += find_shadowing(value, f"{prefix}{key}.") if isinstance(value, ConfigDict) else []
    return wrong


def test_no_key_has_the_name_of_a_method():
    for c in [*(kind.defaults() for kind in config.KINDS.values()), *map(load, NAMES)]:
        assert find_shadowing(c) == []
    assert find_shadowing(ConfigDict({"a": {"items": 1, "b": 2}, "keys": 3})) == ["keys", "a.items"]
