"""Programs for a GPU that is not here: who answers JAX's questions, and what the compiler would get."""

import jax
import jax.numpy as jnp
import pytest
from jax._src.cudnn import fused_attention_stablehlo as checks
from messages import mentions, refuses
from small_runs import lower_eval_step

from leanformer.layers import attention, backends
from leanformer.runtime import target
from leanformer.training import train_setup


AMPERE, HOPPER = target.Gpu("8.0"), target.Gpu("9.0")


def test_jaxs_questions_are_answered_for_the_device_and_only_within():
    before = checks.check_compute_capability
    with target.pretend_attached(target.Gpu("8.6")):
        answers = [checks.check_compute_capability(least) for least in ("8.0", "8.6", "8.9", "10.0")]
        assert answers == [True, True, False, False]
        assert checks.is_cuda_compute_capability_equal("8.6") and not checks.is_cuda_compute_capability_equal("8.0")
    assert checks.check_compute_capability is before
    with pytest.raises(ZeroDivisionError), target.pretend_attached(HOPPER):
        _ = 1 / 0
    assert checks.check_compute_capability is before


def test_a_live_device_answers_for_itself():
    before = checks.check_compute_capability
    with target.pretend_attached(jax.devices()[0]):
        assert checks.check_compute_capability is before


@pytest.mark.parametrize(("device", "taken"), [(AMPERE, False), (HOPPER, True)])
def test_heads_of_256_are_for_hopper(device, taken):
    """JAX's own check says so too: where `resolve` promises cuDNN the program can be traced."""
    x = jax.ShapeDtypeStruct((2, 6, 3, 256), jnp.bfloat16)
    lower = lambda: target.lower(  # noqa: E731
        jax.jit(lambda q, k, v: attention.attend(q, k, v, backend="cudnn")),
        *(x, x, x),
        device=device,
        live=jax.devices()[0],
    )
    about = {"device": device, "dtype": "bfloat16", "head_dim": 256}
    if taken:
        assert backends.resolve("auto", **about)[0] == "cudnn"
        assert "__cudnn$fmhaSoftmax" in lower().as_text()
    else:
        assert backends.resolve("auto", **about)[0] == "xla"
        with refuses(128, error=NotImplementedError):  # JAX's own words
            lower()


def test_an_experiment_is_built_for_the_device_that_is_named(tiny, meshes):
    tiny.dtype = "bfloat16"
    here, there = (train_setup.build(tiny, examples=64, mesh=meshes(1, 1), device=d) for d in (None, target.Gpu("7.5")))
    assert here.model.device is jax.devices()[0] and mentions(here.model.backend_reason, "GPU")
    assert there.model.backend == "xla" and mentions(there.model.backend_reason, "8.0", "7.5")
    assert train_setup.build(tiny, examples=64, mesh=meshes(1, 2), device=HOPPER).model.backend == "cudnn"
    tiny.model.backend = "cudnn"
    with refuses('model.backend="cudnn"', "8.0", "7.5"):
        train_setup.build(tiny, examples=64, mesh=meshes(1, 1), device=target.Gpu("7.5"))


def test_evaluation_of_a_gpu_that_is_not_here_has_its_kernels(tiny, meshes):
    tiny.dtype = "bfloat16"
    run = train_setup.build(tiny, examples=64, mesh=meshes(1, 1), device=HOPPER)
    assert "__cudnn$fmhaSoftmax" in lower_eval_step(run).as_text()
