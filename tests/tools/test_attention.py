"""The check of cuDNN's attention on a GPU, with JAX's own attention, or wrong kernels, in place of cuDNN's."""

import jax
import jax.numpy as jnp
import pytest

from leanformer.layers.masks import Mask
from leanformer.training import model_setup, train_setup
from tools.gpu import attention


KERNEL = jax.nn.dot_product_attention


def right(*qkv, implementation, **options):
    return KERNEL(*qkv, **options)


def without_padding(*qkv, implementation, key_value_seq_lengths=None, **options):
    return KERNEL(*qkv, **options)


def not_finite(*qkv, **options):
    return right(*qkv, **options) * jnp.nan


def refused(*qkv, **options):
    if qkv[0].shape[0] == attention.BATCH:
        raise jax.errors.JaxRuntimeError("INTERNAL: no execution plan\n in external/xla")
    return right(*qkv, **options)


@jax.custom_vjp
def without_gradient(x):
    return x


without_gradient.defvjp(lambda x: (x, None), lambda _, g: (0 * g,))


def wrong_gradient(*qkv, **options):
    return without_gradient(right(*qkv, **options))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        (right, ": right"),
        (wrong_gradient, "error 1,"),
        (without_padding, "head dimension 8: wrong"),
        (not_finite, "error inf"),
        (refused, "6 x 6 tokens, head dimension 8: fails: INTERNAL"),
    ],
)
def test_calls_of_a_training_step_are_checked(tiny, monkeypatch, capsys, kernel, words):
    monkeypatch.setattr(model_setup, "_select_backend", lambda c, device: ("cudnn", "fits"))
    monkeypatch.setattr(jax.nn, "dot_product_attention", kernel)
    run = train_setup.set_up_training(tiny, examples=64)
    (call,) = attention.find_calls(run)
    assert call.queries == call.keys == (6, 3, 8) and call.mask == Mask(lengths=True)  # 5 tokens, padded
    assert attention.check(run) == (kernel is not right)
    assert words in capsys.readouterr().out


def test_a_step_without_calls_does_not_pass(tiny, capsys):
    assert attention.check(train_setup.set_up_training(tiny, examples=64)) == 1
    assert "nothing was checked" in capsys.readouterr().out
