"""Masks of query-key pairs, and every backend, gradient and measure against the same pairs."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from messages import refuses
from scipy.special import entr, softmax

from leanformer.conditioning import tap
from leanformer.layers import attention, backends, masks
from leanformer.layers.masks import Mask


B, T, N, H, V = 2, 7, 3, 5, 11
LENGTHS = np.array([4, 7])
KEEP = np.array([[1, 0, 1, 1, 0, 0, 1], [0, 1, 1, 1, 1, 1, 0]], bool)
SEGMENTS = np.array([[0, 0, 0, 1, 1, 2, 2], [5, 5, 3, 3, 3, 3, 3]])
PARTS = {"lengths": LENGTHS, "keep": KEEP, "segments": SEGMENTS, "causal": True}


def make_mask(*names, **options):
    arguments = {name: PARTS[name] for name in names} | options
    return Mask(**{name: jnp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in arguments.items()})


def visible_pairs(names, queries=T, keys=T, first=0):
    """Return the visible pairs (B T S) by the definition, in loops."""
    result = np.zeros((B, queries, keys), bool)
    for b, t, s in np.ndindex(result.shape):
        ahead = s - (t + first)
        result[b, t, s] = all(
            {
                "lengths": s < LENGTHS[b],
                "keep": KEEP[b, s],
                "segments": SEGMENTS[b, s] == SEGMENTS[b, t + first],
                "causal": ahead <= 0,
            }[name]
            for name in names
        )
    return result


COMBINATIONS = [names for r in range(1, 5) for names in itertools.combinations(PARTS, r)]


@pytest.fixture(scope="module")
def offset_masks():
    """Return the masks of three queries at offset 2 for all combinations, computed by one program."""

    @jax.jit
    def compute_masks(offset):
        return {"+".join(names): make_mask(*names, offset=offset).attention_mask(3, T) for names in COMBINATIONS}

    return compute_masks(jnp.int32(2))


@pytest.mark.parametrize("names", COMBINATIONS, ids="+".join)
def test_masks_match_the_definition(names, offset_masks):
    result = make_mask(*names).attention_mask(T, T)
    np.testing.assert_array_equal(np.broadcast_to(result[:, 0], (B, T, T)), visible_pairs(names))
    result = offset_masks["+".join(names)]
    np.testing.assert_array_equal(np.broadcast_to(result[:, 0], (B, 3, T)), visible_pairs(names, 3, first=2))
    assert make_mask(*names).parts == tuple(name for name in masks.PARTS if name in names)


def test_empty_mask_is_none():
    assert Mask().attention_mask(T, T) is None and Mask().valid_tokens(T) is None and Mask().parts == ()


def reference(q, k, v, g, visible, scale):
    """Attention and its three gradients for a cotangent g in float64; head n reads the keys of head n // (N / K)."""
    q, k, v, g = (np.asarray(x, np.float64) for x in (q, k, v, g))
    groups = q.shape[2] // k.shape[2]
    k, v = (np.repeat(x, groups, axis=2) for x in (k, v))
    logits = np.where(visible[:, None], np.einsum("btnh,bsnh->bnts", q, k) * scale, -np.inf)
    weights = softmax(logits, axis=-1)
    grad_weights = np.einsum("btnh,bsnh->bnts", g, v)
    grad_logits = weights * (grad_weights - (weights * grad_weights).sum(-1, keepdims=True)) * scale
    grad_k, grad_v = np.einsum("bnts,btnh->bsnh", grad_logits, q), np.einsum("bnts,btnh->bsnh", weights, g)
    grad_k, grad_v = (x.reshape(*x.shape[:2], -1, groups, x.shape[3]).sum(3) for x in (grad_k, grad_v))
    return np.einsum("bnts,bsnh->btnh", weights, v), np.einsum("bnts,bsnh->btnh", grad_logits, k), grad_k, grad_v


def draw_arrays(rng, heads=N, kv=N, width=V):
    shapes = (B, T, heads, H), (B, T, kv, H), (B, T, kv, width), (B, T, heads, width)
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]


def run_attention(q, k, v, g, **arguments):
    @jax.jit
    def output_and_gradients(q, k, v, g):
        out, pull = jax.vjp(lambda *x: attention.attend(*x, **arguments), q, k, v)
        return out, *pull(g)

    return output_and_gradients(q, k, v, g)


def largest_error(q, k, v, g, visible, **arguments):
    """Return the largest error of output and gradients; queries that see no key are ignored."""
    has_keys = visible.any(-1)
    g = g * has_keys[..., None, None]
    expected = reference(q, k, v, g, visible | ~has_keys[..., None], 0.3)
    result = run_attention(q, k, v, g, **arguments)
    expected, result = ((x[0] * has_keys[..., None, None], *x[1:]) for x in (expected, result))
    return max(np.abs(a - b).max() for a, b in zip(expected, result, strict=True))


SELECTED = [("causal",), ("segments", "causal"), ("lengths", "causal"), ("keep",)]


GROUPED = [((), 2), ((), 6), (("lengths", "causal"), 6), *((names, 2) for names in SELECTED)]


@pytest.mark.parametrize(
    ("backend", "names", "kv"),
    [*(("xla", *case) for case in GROUPED), ("naive", ("causal",), 2), ("naive", ("keep",), 2)],
)
def test_masked_grouped_attention_matches_reference(rng, backend, names, kv):
    """Sums of up to 3 heads x 7 queries x 11 channels of products of about 1: errors are about 10 epsilons, 1e-6."""
    q, k, v, g = draw_arrays(rng, 6, kv)
    assert largest_error(q, k, v, g, visible_pairs(names), mask=make_mask(*names), scale=0.3, backend=backend) < 1e-5
    if names == ("causal",) and backend == "xla":  # the tolerance detects either change
        for other in ({"mask": make_mask("causal", "keep")}, {"scale": 0.31}):
            assert (
                largest_error(q, k, v, g, visible_pairs(names), **{"mask": make_mask(*names), "scale": 0.3} | other)
                > 1e-3
            )


def test_shared_keys_are_never_copied():
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((2, 64, 12, 8), (2, 96, 2, 8), (2, 96, 2, 16))]
    copies = [(2, 96, 12, 8), (2, 12, 96, 8), (2, 96, 12, 16), (2, 12, 96, 16)]

    def find_copies(backend):
        text = jax.jit(lambda *x: attention.attend(*x, backend=backend)).lower(*shapes).as_text()
        return [shape for shape in copies if f"tensor<{'x'.join(map(str, shape))}xf32>" in text]

    assert find_copies("xla") == [] and find_copies("naive") != []


CUDNN_MASKS = [
    (),
    ("lengths",),
    ("causal",),
    ("lengths", "causal"),
]


@pytest.mark.parametrize(
    ("names", "kv", "tokens"), [*((names, 2, 7) for names in CUDNN_MASKS), (CUDNN_MASKS[-1], 6, 6)]
)
def test_arguments_of_the_fused_kernel(rng, monkeypatch, names, kv, tokens):
    """JAX's own attention with the same arguments replaces the kernel."""
    original, calls = jax.nn.dot_product_attention, []

    def call(*x, implementation, **arguments):
        calls.append((implementation, arguments))
        return original(*x, **arguments)

    monkeypatch.setattr(jax.nn, "dot_product_attention", call)
    q, k, v, g = (x[:, :tokens] for x in draw_arrays(rng, 6, kv, H))
    assert (
        largest_error(
            q, k, v, g, visible_pairs(names, tokens, tokens), mask=make_mask(*names), scale=0.3, backend="cudnn"
        )
        < 1e-5
    )
    ((implementation, arguments),) = calls
    assert implementation == "cudnn" and arguments["is_causal"] == ("causal" in names)


@pytest.mark.parametrize("names", [n for n in COMBINATIONS if n not in CUDNN_MASKS], ids="+".join)
def test_unsupported_masks_are_refused_by_the_fused_kernel(names):
    backend, reason = backends.resolve("auto", device=None, dtype="bfloat16", head_dim=64, mask=names)
    assert (backend, reason) == ("xla", f"no cuDNN: {backends.obstacle(names)}")
    x = jnp.zeros((B, T, N, 8), jnp.bfloat16)
    for run in (
        lambda: backends.resolve("cudnn", device=None, dtype="bfloat16", head_dim=64, mask=names),
        lambda: attention.attend(x, x, x, mask=make_mask(*names), backend="cudnn"),
    ):
        with refuses('model.backend="cudnn"', 'model.backend="xla"'):
            run()


MEASURES = ("attention_entropy", "relative_attention_entropy", "largest_logit", "self_weight")


@pytest.mark.parametrize("names", [(), *SELECTED], ids="+".join)
def test_measures_cover_only_visible_keys(rng, names):
    """Expected values are computed per query over its visible keys; padding is not among the queries."""
    q, k, *_ = draw_arrays(rng)
    arrays = {"q": q, "k": k} | ({"mask": make_mask(*names)} if names else {})
    measured = tap(MEASURES)(arrays)
    visible = visible_pairs(names)
    visible &= (visible_pairs([n for n in names if n in ("lengths", "keep")]).any(1))[:, :, None]
    logits = np.einsum("btnh,bsnh->bnts", np.float64(q), np.float64(k)) / np.sqrt(H)
    for b, n in np.ndindex(B, N):
        rows = [logits[b, n, t][visible[b, t]] for t in range(T) if visible[b, t].any()]
        entropies = [entr(softmax(row)).sum() for row in rows]
        relative_entropies = [e / np.log(len(row)) for e, row in zip(entropies, rows, strict=True) if len(row) > 1]
        # A query that is not padding sees itself under all of these masks.
        hidden = np.where(visible[b], logits[b, n], -np.inf)
        on_itself = [softmax(hidden[t])[t] for t in range(T) if visible[b, t, t]]
        expected = (np.mean(entropies), np.mean(relative_entropies), max(row.max() for row in rows), np.mean(on_itself))
        values = [float(measured[name].value[b, n]) for name in MEASURES]
        np.testing.assert_allclose(values, expected, rtol=1e-5)
    if names:
        unmasked = tap(MEASURES)({"q": q, "k": k})
        assert not np.allclose(unmasked["attention_entropy"].value, measured["attention_entropy"].value, rtol=1e-2)


def test_matrices_of_padded_sequences_have_no_condition_number(rng):
    q, k, *_ = draw_arrays(rng)
    measure = tap(["attention_probabilities", "attention_entropy"])
    assert set(measure({"q": q, "k": k, "mask": make_mask("lengths")})) == {"attention_entropy"}
    causal = measure({"q": q, "k": k, "mask": make_mask("causal")})["attention_probabilities"]
    matrix = softmax(np.where(visible_pairs(("causal",))[:, None], np.asarray(masks.logits(q, k)), -np.inf), axis=-1)
    np.testing.assert_allclose(causal.condition_number, np.linalg.cond(matrix), rtol=1e-3)
