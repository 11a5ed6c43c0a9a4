"""cuDNN's attention is compared with the reference before the first step; JAX's own attention replaces its kernel."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from messages import mentions, refuses

from leanformer.layers import attention
from leanformer.layers.masks import Mask
from leanformer.training import kernel_check, model_setup, train_setup


KERNEL = jax.nn.dot_product_attention


def right(*qkv, implementation, **options):
    return KERNEL(*qkv, **options)


def without_padding(*qkv, implementation, key_value_seq_lengths=None, **options):
    return KERNEL(*qkv, **options)


def not_finite(*qkv, **options):
    return right(*qkv, **options) * jnp.nan


def refused(*qkv, **options):
    raise jax.errors.JaxRuntimeError("INTERNAL: no execution plan\n in external/xla")


def refused_when_run(*qkv, **options):
    return refused() if qkv[0].shape[0] == kernel_check.BATCH else right(*qkv, **options)


def refused_second_time(*qkv, implementation, **options):
    """Fail in programs that call it twice, as cuDNN's backward pass does with deterministic kernels."""
    refused_second_time.calls += qkv[0].shape[0] == kernel_check.BATCH
    if refused_second_time.calls == 2:
        raise IndexError("raw_hash_map<>::at")
    return KERNEL(*qkv, **options)


refused_second_time.calls = 0


@jax.custom_vjp
def without_gradient(x):
    return x


without_gradient.defvjp(lambda x: (x, None), lambda _, g: (0 * g,))


def wrong_gradient(*qkv, **options):
    return without_gradient(right(*qkv, **options))


@pytest.fixture
def build(tiny, monkeypatch):
    """Return a function that builds the setup of a run whose backend is cuDNN with a given kernel."""
    monkeypatch.setattr(model_setup, "_select_backend", lambda c, device: ("cudnn", "fits"))

    def make(kernel, configured="auto"):
        monkeypatch.setattr(jax.nn, "dot_product_attention", kernel)
        tiny.model.backend = configured
        return train_setup.build(tiny, examples=64)

    return make


def test_correct_kernel_is_kept(build):
    run = build(right)
    assert run.model.backend == "cudnn" and mentions(run.model.backend_reason, "fits", "device")
    (call,) = kernel_check.find_calls(run.model, run.task)
    assert call.queries == call.keys == (6, 3, 8) and call.mask == Mask(lengths=True)  # 5 tokens, padded


@pytest.mark.parametrize(
    ("kernel", "part"),
    [
        *((without_padding, "head dimension 8"), (not_finite, "inf"), (wrong_gradient, "relative error 1")),
        *((refused, "INTERNAL"), (refused_when_run, "6 x 6 tokens"), (refused_second_time, "raw_hash_map<>::at")),
    ],
)
def test_wrong_or_failing_kernel_is_replaced_or_refused(build, monkeypatch, kernel, part):
    monkeypatch.setattr(refused_second_time, "calls", 0)
    model = build(kernel).model
    assert model.backend == "xla" and mentions(model.backend_reason, part)
    assert model.config.model.backend == "auto"
    with attention.recorded_calls() as calls:
        jax.eval_shape(lambda weights: model.merge(weights).blocks(jnp.zeros((8, 5, 12))), model.weights)
    assert not calls
    monkeypatch.setattr(refused_second_time, "calls", 0)
    with refuses('model.backend="cudnn"', part, 'model.backend="xla"'):
        build(kernel, configured="cudnn")


def test_refusal_of_one_process_counts_for_all(build, monkeypatch):
    """Otherwise the processes would run different programs."""
    monkeypatch.setattr(kernel_check.multihost, "all_gather_host", lambda mine: [mine, "it fails there"])
    assert mentions(build(right).model.backend_reason, "there")


def test_absent_gpus_are_not_checked(build, monkeypatch):
    run = build(right)
    model = dataclasses.replace(run.model, device=object())
    monkeypatch.setattr(kernel_check, "find_calls", None)
    assert kernel_check.with_working_attention(model, run.task) is model
