"""Every config: exact parameter counts, and valid keys. Its programs are lowered in test_gpu_lowering.py."""

import runpy
from pathlib import Path

import numpy as np
import pytest
from messages import mentions, refuses

from leanformer import config
from leanformer.config import key_docs
from leanformer.costs import count
from leanformer.runtime import mesh
from leanformer.tasks import artifacts
from leanformer.training import model_setup, run_files, state


CONFIGS = Path(__file__).parents[2] / "configs"
PARAMETERS = {
    "bert": 109_514_298,
    "bert_crammed_10x24": 84_182_017,
    "bert_crammed_16x12": 119_589_889,
    "cifar10": 3_722_250,
    "davit_b_lean": 62_653_416,
    "davit_b_original": 87_954_408,
    "davit_l_lean": 139_985_896,
    "davit_l_original": 196_811_752,
    "deit_b_12x12": 86_567_656,
    "deit_b_7x16": 40_112_872,
    "deit_l_24x16": 203_614_184,
    "deit_l_8x30": 98_597_864,
    "glue": 120_379_395,
    "gpt2": 124_439_808,
    "gpt2_tinystories_12x12": 89_160_785,
    "gpt2_tinystories_4x16": 64_150_609,
    "llama_small": 114_114_048,
    "minilm": 22_565_376,
    "nanochat_small": 162_151_680,
    "nystromformer_image": 174_986,
    "nystromformer_image_1x4": 158_090,
    "nystromformer_image_2x2": 174_986,
    "nystromformer_listops": 209_802,
    "nystromformer_listops_1x4": 192_906,
    "nystromformer_listops_2x2": 209_802,
    "nystromformer_listops_short": 91_530,
    "nystromformer_pathfinder": 173_954,
    "nystromformer_pathfinder_1x4": 157_058,
    "nystromformer_pathfinder_2x2": 173_954,
    "nystromformer_retrieval": 395_138,
    "nystromformer_retrieval_1x4": 378_242,
    "nystromformer_retrieval_2x2": 395_138,
    "nystromformer_text": 370_562,
    "nystromformer_text_1x4": 353_666,
    "nystromformer_text_2x2": 370_562,
    "quickstart": 269_194,
    "quickstart_baseline": 678_730,
    "own_images": 14_566_276,
    "rank_icl": 9_534_977,
    "rank_nn": 280_898,
    "rank_nn_small": 9_554,
    "rank_retrieval": 8_643,
    "quickstart_bert": 460_288,
    "quickstart_gpt": 478_720,
    "quickstart_gpt_baseline": 875_264,
    "tnt_b_12x10": 65_406_600,
    "tnt_b_8x16": 30_883_080,
    "vit_b": 86_567_656,
    "vit_b_12x12": 86_567_656,
    "vit_b_7x16": 40_112_872,
    "vit_l_24x16": 203_614_184,
    "vit_l_8x30": 98_597_864,
    "vit_s_12x6_p14": 21_632_650,
    "volo_d3_lean": 47_454_032,
    "volo_d3_original": 86_325_072,
    "volo_d4_lean": 105_556_976,
    "volo_d4_original": 192_961_520,
    "xcit_l_12x24": 103_792_744,
    "xcit_l_24x16": 189_096_136,
    "xcit_m_12x16": 59_002_600,
    "xcit_m_24x8": 84_395_752,
}
GRID = {  # Leaner Transformers, Figure 3: parameters in millions by layers and heads, head_dim 64, MLP 3072
    12: (62.952, 67.675, 72.398, 77.121, 81.844, 86.568, 91.291, 96.014, 100.737),
    8: (42.472, 45.621, 48.770, 51.919, 55.067, 58.216, 61.365, 64.514, 67.663),
}


def load(name: str, *argument: str) -> config.ConfigDict:
    c = runpy.run_path(str(CONFIGS / f"{name}.py"))["get_config"](*argument)
    c.model.update({"num_classes": 4} if c.model.get("num_classes") == 0 else {})  # 0: taken from the data
    return c


def count_parameters(c: config.ConfigDict) -> int:
    *_, (shapes, _) = model_setup.abstract_model(c)
    return count.parameters(shapes)


def test_table_covers_every_config():
    assert {path.stem for path in CONFIGS.glob("*.py")} == set(PARAMETERS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_counts(name):
    """Layers also declare for every parameter how `tensor` shards it."""
    c = load(name)
    config.check(c)
    graphdef, _, weights = model_setup.abstract_model(c)
    assert count.parameters(weights[0]) == PARAMETERS[name]
    assert not mesh.undeclared_parameters(state.declared_axes(graphdef, weights))


def test_saved_config_is_read_back_unchanged(tmp_path, monkeypatch):
    """JSON has no tuples, which the checks require."""
    monkeypatch.setattr(run_files, "provenance", dict)
    for name in PARAMETERS:
        c = load(name)
        run_files.write_config(tmp_path, c)
        result = artifacts.load_config(tmp_path)
        keys, expected = (repr(sorted(key_docs.iterate_keys(values), key=str)) for values in (result, c))
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
    with refuses("rank=48", 32, 64):
        load("rank_nn", "rank=48")


@pytest.mark.parametrize("depth", GRID)
def test_the_grid_of_figure_3(depth):
    result = [count_parameters(load("vit_b", f"depth={depth},heads={heads}")) for heads in range(2, 19, 2)]
    np.testing.assert_array_equal(np.round(np.array(result) / 1e6, 3), GRID[depth])
    assert depth != 8 or result[6:] == [61_364_968, 64_513_768, 67_662_568]  # reported exactly


def test_config_argument_error_lists_the_valid_arguments():
    with refuses("depth", "heads", "head_dim", "mlp_ratio", "'head'"):
        load("vit_b", "head=3")
    with refuses("int", "depth"):
        load("vit_b", "depth=x")


def test_docstrings_have_command_hardware_and_parameters():
    for name, number in PARAMETERS.items():
        text = (CONFIGS / f"{name}.py").read_text().split('"""')[1]
        assert mentions(text, f"python -m leanformer.train --config=configs/{name}.py", "Expected:", "Hardware:"), name
        assert mentions(text, "parameters") and (name == "vit_b" or mentions(text, number)), name
