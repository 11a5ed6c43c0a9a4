"""FLOPs and bytes against closed forms."""

import jax
import jax.numpy as jnp
import pytest

from leanformer.costs import count, devices
from leanformer.training import train_setup


def test_flops_of_matmuls_and_convolutions():
    a, b = jnp.ones((3, 5, 7)), jnp.ones((3, 7, 11))
    assert count.flops(lambda a, b: a @ b, a, b) == 2 * 3 * 5 * 7 * 11
    x, k = jnp.ones((2, 9, 9, 4)), jnp.ones((3, 3, 4, 5))

    def conv(x, k):
        return jax.lax.conv_general_dilated(x, k, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    assert count.flops(conv, x, k) == 2 * (2 * 7 * 7 * 5) * (3 * 3 * 4)


def test_flops_of_loops_and_inner_programs():
    w = jnp.ones((5, 5))

    def run_loop(x):
        return jax.lax.scan(lambda x, _: (jax.checkpoint(jax.jit(lambda x: x @ w))(x), None), x, length=7)[0]

    assert count.flops(run_loop, jnp.ones((3, 5))) == 7 * 2 * 3 * 5 * 5
    with pytest.raises(NotImplementedError):
        count.flops(lambda x: jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: x @ w, x), jnp.ones((3, 5)))


def test_vit_flops_match_closed_form(tiny):
    m = tiny.model
    tokens, inner = 5, m.num_heads * m.head_dim
    layer = 4 * 2 * tokens * m.width * inner + 2 * 2 * tokens**2 * inner + 2 * 2 * tokens * m.width * m.mlp_dim
    patches = 2 * (tokens - 1) * 49 * m.width
    forward, training = train_setup.set_up_training(tiny, examples=9, mesh=None).flops_per_example
    head = 2 * m.width * m.num_classes
    normaliser = 2 * tokens**2 * m.num_heads  # the row sums of the softmax, written as a product with ones
    assert forward in (m.depth * layer + patches + head, m.depth * (layer + normaliser) + patches + head)
    assert 2.7 * forward < training < 3.1 * forward


def test_remat_accumulation_and_batch_do_not_change_model_flops(tiny):
    plain = train_setup.set_up_training(tiny, examples=9, mesh=None).flops_per_example
    tiny.update(accumulate=4, batch_size=32)
    tiny.model.remat = "block"
    assert train_setup.set_up_training(tiny, examples=9, mesh=None).flops_per_example == plain


def test_parameters_by_module_add_up(tiny):
    params = train_setup.set_up_training(tiny, examples=9, mesh=None).state.params
    assert sum(count.by_module(params).values()) == count.parameters(params)
    assert count.by_module(params)["blocks.layers.mlp"] == 3 * (12 * 20 + 20 + 20 * 12 + 12)


def test_strided_convolution_gradients_cost_as_much_as_forward():
    def total(kernel, x):
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, kernel, (2, 2), ((1, 1), (1, 1)), dimension_numbers=numbers).sum()

    kernel, x = jnp.ones((3, 3, 5, 7)), jnp.ones((2, 8, 12, 5))
    forward = count.flops(total, kernel, x)
    assert forward == 2 * (2 * 4 * 6 * 7) * (3 * 3 * 5)
    both = count.flops(jax.value_and_grad(total, argnums=(0, 1)), kernel, x)
    assert abs(both / (3 * forward) - 1) < 0.15  # the padded edge of the input's gradient is counted too


def test_peak_memory_of_a_program():
    x = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    assert devices.peak_memory(jax.jit(lambda x: x + 1).lower(x).compile()) == 2 * 256 * 256 * 4
    assert devices.peak_memory(jax.jit(lambda x: x + 1, donate_argnums=0).lower(x).compile()) == 256 * 256 * 4
