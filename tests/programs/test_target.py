"""Programs for GPUs that are not attached: answers to JAX's device queries, and the lowered programs."""

import jax
import jax.numpy as jnp
import pytest
from jax._src.cudnn import fused_attention_stablehlo as checks
from messages import mentions, refuses

from leanformer.layers import attention, backends
from leanformer.programs import target
from leanformer.training import train_setup


AMPERE, HOPPER = target.Gpu("8.0"), target.Gpu("9.0")


def test_jax_device_queries_are_patched_only_inside_the_context():
    before = checks.check_compute_capability
    with target.pretend_attached(target.Gpu("8.6")):
        answers = [checks.check_compute_capability(capability) for capability in ("8.0", "8.6", "8.9", "10.0")]
        assert answers == [True, True, False, False]
        assert checks.is_cuda_compute_capability_equal("8.6") and not checks.is_cuda_compute_capability_equal("8.0")
    assert checks.check_compute_capability is before
    with pytest.raises(ZeroDivisionError), target.pretend_attached(HOPPER):
        _ = 1 / 0
    assert checks.check_compute_capability is before


def test_queries_of_a_live_device_are_not_patched():
    before = checks.check_compute_capability
    with target.pretend_attached(jax.devices()[0]):
        assert checks.check_compute_capability is before


@pytest.mark.parametrize(("device", "supported"), [(AMPERE, False), (HOPPER, True)])
def test_head_dim_256_requires_hopper(device, supported):
    """JAX's own check agrees: if `resolve` selects cuDNN, the program can be traced."""
    x = jax.ShapeDtypeStruct((2, 6, 3, 256), jnp.bfloat16)
    lower = lambda: target.lower(  # noqa: E731
        jax.jit(lambda q, k, v: attention.attend(q, k, v, backend="cudnn")),
        *(x, x, x),
        device=device,
        live=jax.devices()[0],
    )
    options = {"device": device, "dtype": "bfloat16", "head_dim": 256}
    if supported:
        assert backends.resolve("auto", **options)[0] == "cudnn"
        assert "__cudnn$fmhaSoftmax" in lower().as_text()
    else:
        assert backends.resolve("auto", **options)[0] == "xla"
        with refuses(128, error=NotImplementedError):  # a message of JAX
            lower()


def test_setup_is_built_for_the_named_device(tiny, meshes):
    tiny.dtype = "bfloat16"
    attached, turing = (
        train_setup.build(tiny, examples=64, mesh=meshes(1, 1), device=d) for d in (None, target.Gpu("7.5"))
    )
    assert attached.model.device is jax.devices()[0] and mentions(attached.model.backend_reason, "GPU")
    assert turing.model.backend == "xla" and mentions(turing.model.backend_reason, "8.0", "7.5")
    assert train_setup.build(tiny, examples=64, mesh=meshes(1, 2), device=HOPPER).model.backend == "cudnn"
    tiny.model.backend = "cudnn"
    with refuses('model.backend="cudnn"', "8.0", "7.5"):
        train_setup.build(tiny, examples=64, mesh=meshes(1, 1), device=target.Gpu("7.5"))
