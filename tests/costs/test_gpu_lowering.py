"""Lowering of every config's programs for GPUs, from shapes alone, on a machine without a GPU."""

import functools
import itertools
import re
import runpy
from pathlib import Path

import jax
import pytest
from small_runs import lower_eval_step, lower_probe_step

from leanformer import config
from leanformer.training import train_setup
from leanformer.training.train_setup import Setup
from tools.gpu.absent import Gpu, pretend_attached


CONFIGS = {path.stem: path for path in sorted((Path(__file__).parents[2] / "configs").glob("*.py"))}
FORWARD, BACKWARD = "@__cudnn$fmhaSoftmax(", "@__cudnn$fmhaSoftmaxBackward("
AMPERE, HOPPER = Gpu("8.0"), Gpu("9.0")
WITHOUT_CUDNN = {"gpt2_tinystories_12x12"} | {  # head_dim 42, as in the paper; the others are float32
    *("quickstart", "quickstart_baseline", "nystromformer_listops_short", "quickstart_gpt", "quickstart_gpt_baseline"),
    *("quickstart_bert", "rank_icl", "rank_nn", "rank_nn_small", "rank_retrieval"),
}
# Every other config differs from one of these only in sizes, such as depth and heads.
REPRESENTATIVES = {
    *("deit_b_7x16", "vit_b_7x16", "xcit_m_12x16", "tnt_b_8x16", "volo_d3_lean", "davit_b_lean"),
    *("nystromformer_text", "nystromformer_retrieval", "llama_small", "gpt2_tinystories_12x12", "bert_crammed_16x12"),
    *("glue", "minilm", "rank_nn_small"),
}
TIERS = [pytest.param(name, marks=[pytest.mark.slow] * (name != "vit_b_7x16")) for name in CONFIGS]  # ten seconds each


@functools.cache
def build_setup(name, device=AMPERE, **model):
    c = runpy.run_path(str(CONFIGS[name]))["get_config"]()
    c.model.update({"num_classes": 4} if c.model.get("num_classes") == 0 else {})  # 0: taken from the data
    c.model.update(model)
    config.check(c)
    with pretend_attached(device):
        return train_setup.set_up_training(c, examples=1_281_167, device=device)


@pytest.fixture(autouse=True)
def ampere():
    """JAX's checks of cuDNN answer for an A100 while programs are lowered."""
    with pretend_attached(AMPERE):
        yield


def count_calls(text):
    """Return the number of cuDNN forward and backward kernel calls in a program; a stack of layers appears once."""
    return text.count(FORWARD), text.count(BACKWARD)


def find_matrices(text, sizes):
    """Return the float32 arrays B N T S or B N S T of these sizes in a program, with or without an added token."""
    names = []
    for batch, heads, t, s in sizes:
        for rows, columns in itertools.product((t, t - 1), (s, s - 1)):
            names += [f"{batch}x{heads}x{rows}x{columns}xf32", f"{batch}x{heads}x{columns}x{rows}xf32"]
    return [name for name in names if f"tensor<{name}>" in text]


def find_tf32(text):
    """Return the matmuls of float32 matrices that GPUs compute in TF32, which has 10 bits of mantissa."""
    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert products
    return [line for line in products if re.search(r": \(tensor<[\dx]*f32>", line) and "HIGHEST" not in line]


def find_call_sizes(text):
    """Return B, N, T and S of every call of the forward kernel."""
    shape = r"intermediate_tensor_shape[^}]*?dimensions\W+(\d+)\W+(\d+)\W+(\d+)\W+(\d+)"
    result = {tuple(map(int, numbers)) for numbers in re.findall(shape, text.replace("\\22", '"'))}
    assert bool(result) == (FORWARD in text)
    return result


@pytest.mark.parametrize("name", TIERS)
def test_programs_lower_and_training_runs_forward_kernel_once(name):
    """Training preserves shapes and dtypes of the state. With a fused kernel there is no float32 attention matrix."""
    run = build_setup(name)
    assert (run.model.backend == "cudnn") == (name not in WITHOUT_CUDNN)
    lowered = run.lower_train_step()
    state, metrics = lowered.out_info
    assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == jax.tree.map(lambda x: (x.shape, x.dtype), run.state)
    assert metrics["loss"].shape == ()
    text = lowered.as_text()
    forward, backward = count_calls(text)
    assert forward == backward and (forward > 0) == (run.model.backend == "cudnn")
    assert find_matrices(text, find_call_sizes(text)) == []
    bfloat16 = run.config.dtype == "bfloat16"
    gradients = run.config.model.name in ("xcit", "davit")  # of attention between channels: (B, N, H, H) x (B, T, N, H)
    assert not (bfloat16 and find_tf32(text)) or gradients

    text = lower_eval_step(run).as_text()
    forward, backward = count_calls(text)
    assert (forward > 0) == (run.model.backend == "cudnn") and backward == 0
    assert not (bfloat16 and find_tf32(text))
    if run.config.probe.every:
        text = lower_probe_step(run).as_text()
        assert not (bfloat16 and find_tf32(text)) and "f64" in text  # singular values in float64


def test_representatives_cover_every_architecture():
    """All but two train in bfloat16 with cuDNN; those two cover float32 and head_dim 42."""
    architectures = {name: config.load(str(path)).model.name for name, path in CONFIGS.items()}
    assert {architectures[name] for name in REPRESENTATIVES} == {
        *architectures.values()
    } and architectures.keys() > REPRESENTATIVES
    assert len(REPRESENTATIVES & WITHOUT_CUDNN) == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit_b_7x16", "nystromformer_text"])
def test_programs_for_hopper_and_ampere_are_equal(name):
    for lower in (Setup.lower_train_step, lower_eval_step):
        text = lower(build_setup(name)).as_text()
        with pretend_attached(HOPPER):
            assert lower(build_setup(name, HOPPER)).as_text() == text
