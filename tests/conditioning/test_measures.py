"""Every measure against NumPy in float64 on a small ViT, and taps that do not change outputs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from messages import refuses
from random_weights import fill_weights
from scipy.special import entr

from leanformer import models
from leanformer.conditioning import (
    ACTIVATIONS,
    WEIGHTS,
    block_jacobian,
    by_name,
    condition,
    digest,
    measure,
    tap,
    weights,
    with_spectrum,
)


BATCH, DEPTH, TOKENS, WIDTH, HEADS, HEAD_DIM, VALUE_DIM = 3, 2, 17, 23, 3, 5, 7


class Vit:
    """Small ViT as a function of its parameters, with inputs."""

    def __init__(self, **changes):
        sizes = {"image_size": 8, "patch_size": 2, "channels": 1, "num_classes": 3, "width": WIDTH, "depth": DEPTH}
        sizes |= {"num_heads": HEADS, "head_dim": HEAD_DIM, "value_dim": VALUE_DIM, "mlp_dim": 29, "drop_path": 0.3}
        model = fill_weights(lambda: models.build("vit", **sizes | changes, rngs=nnx.Rngs(0)))
        self.graphdef, params = nnx.split(model, nnx.Param)
        # Uniform attention is singular: doubling the queries avoids that.
        self.params = nnx.as_pure(params)
        self.blocks["attention"]["query"]["kernel"] *= 2
        self.images = jnp.asarray(np.random.default_rng(1).standard_normal((BATCH, 8, 8, 1)), jnp.float32)

    def __call__(self, params, images, **arguments):
        return nnx.merge(self.graphdef, params)(images, **arguments)

    @property
    def blocks(self):
        return self.params["blocks"]["layers"]


@pytest.fixture(scope="module")
def vit():
    return Vit()


@pytest.fixture(scope="module")
def outputs(vit):
    """Return logits and taps for three kinds of tap: none, all arrays, all measures."""
    functions = {"none": None, "arrays": dict, "measures": tap(ACTIVATIONS)}
    return {
        name: jax.jit(lambda p, x, t=function: vit(p, x, tap=t))(vit.params, vit.images)
        for name, function in functions.items()
    }


@pytest.fixture(scope="module")
def arrays(outputs):
    """Return all arrays that a tap receives, in float64, with leading axes L B."""
    return {name: np.asarray(x, np.float64) for name, x in outputs["arrays"][1]["blocks"].items()}


def softmax(x):
    x = np.exp(x - x.max(axis=-1, keepdims=True))
    return x / x.sum(axis=-1, keepdims=True)


def compute_logits(a):
    return np.einsum("lbtnh,lbsnh->lbnts", a["q"], a["k"]) / np.sqrt(a["q"].shape[-1])


def compute_energy(a):
    """Return σ² / Σσ² of the logits, each query's centred over keys, which softmax does not see."""
    logits = compute_logits(a)
    s = np.linalg.svd(logits - logits.mean(-1, keepdims=True), compute_uv=False) ** 2
    return s / s.sum(-1, keepdims=True)


def compute_linear_cka(x, y):
    x, y = x - x.mean(0), y - y.mean(0)
    return np.linalg.norm(y.T @ x) ** 2 / np.linalg.norm(x.T @ x) / np.linalg.norm(y.T @ y)


def compute_mean_cka(heads):  # T N H
    n = heads.shape[1]
    return np.mean([compute_linear_cka(heads[:, i], heads[:, j]) for i in range(n) for j in range(i)])


MATRICES = {
    "attention_output": lambda a: a["out"].reshape(DEPTH, BATCH, TOKENS, HEADS * VALUE_DIM),
    "head_output": lambda a: np.moveaxis(a["out"], 3, 2),
    "attention_probabilities": lambda a: softmax(compute_logits(a)),
    "tokens": lambda a: a["tokens"],
    "attention_branch": lambda a: a["attention"],
    "attention_branch_with_skip": lambda a: a["tokens"] + a["attention"],
    "block_output": lambda a: a["block"],
    "block_output_without_skip": lambda a: a["block"] - a["tokens"],
    "mlp_hidden": lambda a: a["hidden"],
}
READINGS = {
    "head_correlation": lambda a: np.array([[compute_mean_cka(out) for out in layer] for layer in a["out"]]),
    "attention_entropy": lambda a: entr(softmax(compute_logits(a))).sum(-1).mean(-1),
    "relative_attention_entropy": lambda a: entr(softmax(compute_logits(a))).sum(-1).mean(-1) / np.log(TOKENS),
    "largest_logit": lambda a: compute_logits(a).max((-2, -1)),
    "self_weight": lambda a: np.diagonal(softmax(compute_logits(a)), axis1=-2, axis2=-1).mean(-1),
    "attention_distance": lambda a: (
        (softmax(compute_logits(a)) * abs(np.subtract.outer(*[np.arange(TOKENS)] * 2))).sum(-1).mean(-1)
    ),
    "logit_spectral_entropy": lambda a: entr(compute_energy(a)).sum(-1),
    "logit_components": lambda a: 1 + (compute_energy(a).cumsum(-1) < 0.9).sum(-1),
}


NYSTROM_MEASURES = {"landmark_probabilities", "pseudo_inverse_residual"}  # their references are in test_nystrom.py


@pytest.fixture(scope="module")
def taps(outputs):
    return outputs["measures"][1]["blocks"]


def test_every_measure_has_a_reference_and_applicable_ones_are_returned(taps):
    assert set(MATRICES) | set(READINGS) | NYSTROM_MEASURES == set(ACTIVATIONS)
    assert set(taps) == set(MATRICES) | set(READINGS)


def test_tap_does_not_change_outputs(outputs):
    """Equal up to some 10 epsilons per layer, as the two are compiled separately; a test below compares bitwise."""
    expected = outputs["none"][0]
    for name in ("arrays", "measures"):
        np.testing.assert_allclose(outputs[name][0], expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("name", MATRICES)
def test_activation_summaries_equal_numpy(taps, arrays, name):
    matrices = MATRICES[name](arrays)
    result = taps[name]
    assert result.shape == matrices.shape[-2:]
    assert result.condition_number.shape == matrices.shape[:-2]
    compare_summary(result, np.linalg.svd(matrices, compute_uv=False))


def compare_summary(summary, s):
    """Compare a summary with singular values in float64."""
    assert summary.valid.all()
    np.testing.assert_allclose(summary.condition_number, s[..., 0] / s[..., -1], rtol=1e-3)
    np.testing.assert_allclose(summary.log10_condition, np.log10(s[..., 0] / s[..., -1]), atol=1e-3)
    share = s / s.sum(-1, keepdims=True)
    np.testing.assert_allclose(summary.effective_rank, np.exp(entr(share).sum(-1)), rtol=1e-4)
    np.testing.assert_allclose(summary.stable_rank, (s**2).sum(-1) / s[..., 0] ** 2, rtol=1e-4)


@pytest.mark.parametrize("name", READINGS)
def test_readings_equal_numpy(taps, arrays, name):
    expected = READINGS[name](arrays)
    assert taps[name].valid.all()
    assert taps[name].value.shape == expected.shape
    np.testing.assert_allclose(taps[name].value, expected, rtol=1e-4)


def move_heads_first(kernel):
    return np.moveaxis(kernel, 2, 1)


KERNELS = {
    "output_weights": lambda a: a["out"].reshape(DEPTH, HEADS * VALUE_DIM, WIDTH),
    "output_weights_per_head": lambda a: a["out"],
    "query_key_product": lambda a: move_heads_first(a["query"]) @ move_heads_first(a["key"]).swapaxes(-1, -2),
    "value_output_product": lambda a: move_heads_first(a["value"]) @ a["out"],
    "mlp_up_weights": lambda a: a["up"],
    "mlp_down_weights": lambda a: a["down"],
}
for part in ("query", "key", "value"):
    KERNELS[f"{part}_weights"] = lambda a, part=part: a[part].reshape(DEPTH, WIDTH, -1)
    KERNELS[f"{part}_weights_per_head"] = lambda a, part=part: move_heads_first(a[part])


def test_weight_measures_equal_numpy(vit):
    assert set(KERNELS) == set(WEIGHTS)
    kernels = {**vit.blocks["attention"], **vit.blocks["mlp"]}
    kernels = {name: np.asarray(part["kernel"], np.float64) for name, part in kernels.items()}
    stacks = nnx.merge(vit.graphdef, vit.params).measured()
    result = jax.jit(lambda stacks: weights(stacks, WEIGHTS))(stacks)["blocks"]
    for name, take in KERNELS.items():
        matrices = take(kernels)
        s = np.linalg.svd(matrices, compute_uv=False)
        if "product" in name:
            rank = min(result[name].shape)
            assert rank == (HEAD_DIM if name == "query_key_product" else VALUE_DIM)
            assert s[..., rank].max() < 1e-10 * s.max()
            s = s[..., :rank]
        else:
            assert result[name].shape == matrices.shape[-2:]
        compare_summary(result[name], s)


def test_weight_measures_of_shared_heads_match_copied_heads(rng):
    shapes = {"query": (WIDTH, 6, HEAD_DIM), "key": (WIDTH, 2, HEAD_DIM), "value": (WIDTH, 2, VALUE_DIM)}
    shapes["out"] = (6, VALUE_DIM, WIDTH)
    shared = {name: np.float32(rng.standard_normal((1, *shape))) for name, shape in shapes.items()}
    copied = shared | {name: np.repeat(shared[name], 3, axis=2) for name in ("key", "value")}
    names = ["query_key_product", "value_output_product"]
    result, expected = (
        weights({"s": {"attention": {name: {"kernel": x} for name, x in kernels.items()}}}, names)["s"]
        for kernels in (shared, copied)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), result, expected)
    assert result["query_key_product"].condition_number.shape == (1, 6)


def find_maxima(arrays):
    return {name: jnp.abs(x).max() for name, x in arrays.items()}


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"remat": "block", "dtype": jnp.bfloat16}], ids=["float32", "bfloat16-remat"])
def test_tap_leaves_outputs_and_gradients_bitwise_unchanged(changes):
    """Use a tap that reads every array."""
    vit = Vit(**changes)
    keys = jax.random.split(jax.random.key(2), BATCH)

    def loss(params, images, tap_function):
        outputs, taps = vit(params, images, key=keys, tap=tap_function)
        return jnp.sum(outputs**2), (outputs, taps)

    # Compile as users do: conftest.py switches off the optimisations that could make the two differ.
    options = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
    run = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=2, compiler_options=options)
    (_, (outputs, none)), grads = run(vit.params, vit.images, None)
    (_, (tapped, taps)), tapped_grads = run(vit.params, vit.images, find_maxima)
    assert none == {"blocks": None} and len(taps["blocks"]) == 10
    np.testing.assert_array_equal(outputs, tapped)
    jax.tree.map(np.testing.assert_array_equal, grads, tapped_grads)


def test_no_tap_compiles_the_same_program(vit):
    def lower(**arguments):
        def loss(params, images):
            outputs, taps = vit(params, images, **arguments)
            return outputs.sum(), taps

        return jax.jit(jax.grad(loss, has_aux=True)).lower(vit.params, vit.images).as_text()

    assert lower(tap=None) == lower()
    assert lower(tap=tap(["tokens"])) != lower()


def test_unknown_and_inapplicable_measures_are_refused(vit):
    with refuses("kappa", "attention_output"):
        tap(["kappa"])
    with refuses("tokens", "query_weights"):
        weights({"blocks": vit.blocks}, ["tokens"])
    parts = {"stage": {"attention": vit.blocks["attention"]}}
    with refuses("mlp_up_weights", "mlp.up.kernel"):
        by_name(weights(parts, ["mlp_up_weights"]), ["mlp_up_weights"])


def test_names_in_a_model_with_several_stacks(vit):
    names = ["query_weights", "mlp_up_weights"]
    parts = {"one.inner": vit.blocks, "two": {"attention": vit.blocks["attention"]}}
    result = by_name(weights(parts, names), names)
    assert list(result) == ["one.inner.query_weights", "one.inner.mlp_up_weights", "two.query_weights"]
    assert measure("one.inner.query_weights") is WEIGHTS["query_weights"] is measure("query_weights")


def test_loss_jacobian_equals_gradients_per_example(vit):
    def loss(blocks, image):
        outputs, _ = vit({**vit.params, "blocks": {"layers": blocks}}, image[None])
        return jnp.log(jnp.sum(outputs[0] ** 2))

    result = jax.jit(lambda blocks, images: block_jacobian(loss, blocks, images))(vit.blocks, vit.images)
    gradient = jax.jit(jax.grad(loss))
    grads = [gradient(vit.blocks, image) for image in vit.images]
    rows = [np.concatenate([np.reshape(leaf, (DEPTH, -1)) for leaf in jax.tree.leaves(g)], axis=1) for g in grads]
    jacobian = np.stack(rows, axis=1).astype(np.float64)  # L B P
    assert result.shape == jacobian.shape[1:]
    compare_summary(result, np.linalg.svd(jacobian, compute_uv=False))


def test_output_jacobian_is_not_squared(rng):
    """Use a Jacobian of given spectrum whose Gram matrix would be singular in float32."""
    examples, outputs, columns = 3, 2, (11, 5, 2)
    u = np.linalg.qr(rng.standard_normal((6, 6)))[0]
    v = np.linalg.qr(rng.standard_normal((18, 6)))[0]
    spectra = np.stack([np.geomspace(1, 1e-6, 6), np.geomspace(1, 1e-2, 6)])
    jacobian = jnp.asarray((u * spectra[:, None]) @ v.T, jnp.float32).reshape(DEPTH, examples, outputs, 18)
    blocks = [jnp.ones((DEPTH, n)) for n in columns]

    def function(blocks, rows):  # rows: L V P
        return jnp.einsum("lvp,lp->v", rows, jnp.concatenate(blocks, axis=1), precision="highest")

    result = block_jacobian(function, blocks, jacobian.swapaxes(0, 1))
    assert result.shape == (6, 18)
    np.testing.assert_allclose(result.condition_number, [1e6, 1e2], rtol=2e-2)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("reduce", [condition, pytest.param(with_spectrum, marks=pytest.mark.slow)])
def test_padding_adds_no_singular_values(reduce, packed):
    """Rows shorter than the width, padded, have the condition numbers that they have alone."""
    sizes = {"vocabulary": 41, "max_length": 19, "num_classes": 2, "width": WIDTH, "depth": DEPTH}
    sizes |= {"num_heads": HEADS, "head_dim": HEAD_DIM, "mlp_dim": 29}
    model = fill_weights(lambda: models.build("bert", **sizes, packed=packed, rngs=nnx.Rngs(0)))
    lengths = jnp.array([5, 11, 19])
    tokens = jnp.asarray(np.random.default_rng(2).integers(1, 41, (3, 19)))
    matrices = ("attention_output", "head_output", "tokens", "block_output", "mlp_hidden")
    names = (*matrices, "head_correlation")
    measured = tap(names, reduce)

    @jax.jit
    def read(tokens, lengths):
        segments = (jnp.arange(tokens.shape[1])[None] < lengths[:, None]).astype(jnp.int32)  # 0 is padding
        given = {"segments": segments} if packed else {"lengths": lengths}
        values = by_name(model(tokens, **given, tap=measured)[1], names)
        return {name: x[1] if isinstance(x, tuple) else x for name, x in values.items()}

    padded = read(tokens, lengths)
    for i, length in enumerate(lengths.tolist()):
        single = read(tokens[i : i + 1, :length], lengths[i : i + 1])
        result, expected = padded["head_correlation"].value[:, i], single["head_correlation"].value[:, 0]
        np.testing.assert_allclose(result, expected, rtol=1e-4)
        for name in matrices:
            alone = single[name]
            for field in ("log10_condition", "effective_rank"):
                result, expected = getattr(padded[name], field)[:, i], getattr(alone, field)[:, 0]
                np.testing.assert_allclose(result, expected, rtol=2e-3, err_msg=f"{name} {field}")
            np.testing.assert_array_equal(padded[name].negligible[:, i], alone.negligible[:, 0])
    assert [layer["shape"] for layer in digest(padded["tokens"])] == [[11, WIDTH]] * DEPTH  # the median length
