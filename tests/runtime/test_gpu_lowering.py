"""Every config's programs as GPUs would get them: traced and lowered for them, by shapes, on a machine without one."""

import functools
import itertools
import re
import runpy
from pathlib import Path

import jax
import pytest
from small_runs import lower_eval_step, lower_probe_step

from leanformer import config
from leanformer.layers.stack import REMAT
from leanformer.runtime import mesh as meshes
from leanformer.runtime import target
from leanformer.training import model_setup, train_setup
from leanformer.training.train_setup import TrainSetup


CONFIGS = {path.stem: path for path in sorted((Path(__file__).parents[2] / "configs").glob("*.py"))}
FORWARD, BACKWARD = "@__cudnn$fmhaSoftmax(", "@__cudnn$fmhaSoftmaxBackward("
AMPERE, HOPPER = target.Gpu("8.0"), target.Gpu("9.0")
WITHOUT = {"gpt2_tinystories_12x12"} | {  # heads of 42, as printed; and float32
    *("quickstart", "quickstart_baseline", "nystromformer_listops_short", "quickstart_gpt", "quickstart_gpt_baseline"),
    *("quickstart_bert", "rank_icl", "rank_nn", "rank_nn_small", "rank_retrieval"),
}
# In the fast tier. The others differ from one of these in numbers alone, such as depth and heads.
REPRESENTATIVES = {
    *("deit_b_7x16", "vit_b_7x16", "xcit_m_12x16", "tnt_b_8x16", "volo_d3_lean", "davit_b_lean"),
    *("nystromformer_text", "nystromformer_retrieval", "llama_small", "gpt2_tinystories_12x12", "bert_crammed_16x12"),
    *("glue", "minilm", "rank_nn_small"),
}
TIERS = [name if name in REPRESENTATIVES else pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS]


@functools.cache
def built(name, device=AMPERE, **model):
    c = runpy.run_path(str(CONFIGS[name]))["get_config"]()
    c.model.update({"num_classes": 4} if c.model.get("num_classes") == 0 else {})  # 0: that of the data
    c.model.update(model)
    config.check(c)
    mesh = meshes.make_mesh(devices=jax.devices()[:1])
    with target.pretend_attached(device):
        return train_setup.build(c, examples=1_281_167, mesh=mesh, device=device)


def calls(text):
    """Calls of cuDNN's forward and backward kernels in the program's text, where a stack of layers stands once."""
    return text.count(FORWARD), text.count(BACKWARD)


def matrices(text, sizes):
    """Float32 arrays B N T S, or B N S T, of these sizes, an added token counted or not."""
    names = []
    for batch, heads, t, s in sizes:
        for rows, columns in itertools.product((t, t - 1), (s, s - 1)):
            names += [f"{batch}x{heads}x{rows}x{columns}xf32", f"{batch}x{heads}x{columns}x{rows}xf32"]
    return [name for name in names if f"tensor<{name}>" in text]


def sizes_of_calls(text):
    """B, N, T and S of every call of the forward kernel."""
    shape = r"intermediate_tensor_shape[^}]*?dimensions\W+(\d+)\W+(\d+)\W+(\d+)\W+(\d+)"
    result = {tuple(map(int, numbers)) for numbers in re.findall(shape, text.replace("\\22", '"'))}
    assert bool(result) == (FORWARD in text)
    return result


@pytest.mark.parametrize("name", TIERS)
def test_every_program_lowers_and_training_runs_the_forward_kernel_once(name):
    """And leaves a state of the shapes that it found, and has no float32 matrix where a fused kernel serves."""
    run = built(name)
    assert (run.model.backend == "cudnn") == (name not in WITHOUT)
    lowered = run.lower_train_step()
    state, metrics = lowered.out_info
    assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == jax.tree.map(lambda x: (x.shape, x.dtype), run.state)
    assert metrics["loss"].shape == ()
    text = lowered.as_text()
    forward, backward = calls(text)
    assert forward == backward and (forward > 0) == (run.model.backend == "cudnn")
    assert matrices(text, sizes_of_calls(text)) == []

    forward, backward = calls(lower_eval_step(run).as_text())
    assert (forward > 0) == (run.model.backend == "cudnn") and backward == 0
    if run.config.probe.every:
        assert "stablehlo" in lower_probe_step(run).as_text()
    # A program follows the device by its backend alone: what lowers for compute capability 8.0 lowers for 9.0.
    assert run.model.backend == model_setup._select_backend(run.config, HOPPER)[0]


def test_representatives_are_of_every_family():
    """Of those that train at scale in bfloat16; the two that do not are here for float32, and heads of 42."""
    families = {name: config.load(str(path)).model.name for name, path in CONFIGS.items()}
    assert {families[name] for name in REPRESENTATIVES} == {*families.values()} and families.keys() > REPRESENTATIVES
    assert len(REPRESENTATIVES & WITHOUT) == 2


@pytest.mark.parametrize("name", ["vit_b_7x16", pytest.param("nystromformer_text", marks=pytest.mark.slow)])
def test_hopper_gets_the_same_program(name):
    for lower in (TrainSetup.lower_train_step, lower_eval_step):
        assert lower(built(name)).as_text() == lower(built(name, HOPPER)).as_text()


def test_keeping_less_runs_the_forward_kernel_twice(monkeypatch, unchecked):
    """What the count above would see."""
    block = built("vit_b_7x16", remat="block").lower_train_step()
    assert calls(block.as_text()) == (2, 1)
    names = jax.checkpoint_policies.save_only_these_names("dropout", "attended")
    monkeypatch.setitem(REMAT, "light", names)
    assert calls(built.__wrapped__("vit_b_7x16").lower_train_step().as_text()) == (2, 1)


def test_without_the_kernel_there_are_matrices_of_tokens_by_tokens():
    """What the search above would see."""
    text = lower_eval_step(built("vit_b_7x16", backend="xla")).as_text()
    assert matrices(text, {(built("vit_b_7x16").config.eval.batch_size, 16, 198, 198)})
