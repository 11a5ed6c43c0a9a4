"""Masks pair by pair, and every backend, gradient and measure against the same pairs."""

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
PARTS = {"lengths": LENGTHS, "keep": KEEP, "segments": SEGMENTS, "causal": True, "window": 3}


def made(*names, **more):
    given = {name: PARTS[name] for name in names} | more
    return Mask(**{name: jnp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in given.items()})


def pairs(names, queries=T, keys=T, first=0, window=3):
    """B T S by the definition, in loops."""
    result = np.zeros((B, queries, keys), bool)
    for b, t, s in np.ndindex(result.shape):
        ahead = s - (t + first)
        result[b, t, s] = all(
            {
                "lengths": s < LENGTHS[b],
                "keep": KEEP[b, s],
                "segments": SEGMENTS[b, s] == SEGMENTS[b, t + first],
                "causal": ahead <= 0,
                "window": abs(ahead) < window,
            }[name]
            for name in names
        )
    return result


ANY = [names for r in range(1, 6) for names in itertools.combinations(PARTS, r)]


@pytest.fixture(scope="module")
def late():
    """Which keys three queries see that stand behind two others, for all combinations in one program."""

    @jax.jit
    def kept(offset):
        return {"+".join(names): made(*names, offset=offset).attention_mask(3, T) for names in ANY}

    return kept(jnp.int32(2))


@pytest.mark.parametrize("names", ANY, ids="+".join)
def test_pairs(names, late):
    result = made(*names).attention_mask(T, T)
    np.testing.assert_array_equal(np.broadcast_to(result[:, 0], (B, T, T)), pairs(names))
    result = late["+".join(names)]
    np.testing.assert_array_equal(np.broadcast_to(result[:, 0], (B, 3, T)), pairs(names, 3, first=2))
    assert made(*names).parts == tuple(name for name in masks.PARTS if name in names)


def test_a_mask_of_nothing_and_a_window_of_nothing():
    assert Mask().attention_mask(T, T) is None and Mask().valid_tokens(T) is None and Mask().parts == ()
    with refuses("window", 0):
        Mask(window=0)


def reference(q, k, v, g, kept, scale):
    """Attention and its three gradients for a cotangent g in float64; head n reads the keys of head n // (N / K)."""
    q, k, v, g = (np.asarray(x, np.float64) for x in (q, k, v, g))
    groups = q.shape[2] // k.shape[2]
    k, v = (np.repeat(x, groups, axis=2) for x in (k, v))
    logits = np.where(kept[:, None], np.einsum("btnh,bsnh->bnts", q, k) * scale, -np.inf)
    weights = softmax(logits, axis=-1)
    by_weights = np.einsum("btnh,bsnh->bnts", g, v)
    by_logits = weights * (by_weights - (weights * by_weights).sum(-1, keepdims=True)) * scale
    by_k, by_v = np.einsum("bnts,btnh->bsnh", by_logits, q), np.einsum("bnts,btnh->bsnh", weights, g)
    by_k, by_v = (x.reshape(*x.shape[:2], -1, groups, x.shape[3]).sum(3) for x in (by_k, by_v))
    return np.einsum("bnts,bsnh->btnh", weights, v), np.einsum("bnts,bsnh->btnh", by_logits, k), by_k, by_v


def drawn(rng, heads=N, kv=N, width=V):
    shapes = (B, T, heads, H), (B, T, kv, H), (B, T, kv, width), (B, T, heads, width)
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]


def found(q, k, v, g, **arguments):
    @jax.jit
    def both(q, k, v, g):
        out, pull = jax.vjp(lambda *x: attention.attend(*x, **arguments), q, k, v)
        return out, *pull(g)

    return both(q, k, v, g)


def worst(q, k, v, g, kept, **arguments):
    """How far output and gradients are off; of queries that see nothing, nothing is asked."""
    sees = kept.any(-1)
    g = g * sees[..., None, None]
    ours = reference(q, k, v, g, kept | ~sees[..., None], 0.3)
    mine = found(q, k, v, g, **arguments)
    ours, mine = ((x[0] * sees[..., None, None], *x[1:]) for x in (ours, mine))
    return max(np.abs(a - b).max() for a, b in zip(ours, mine, strict=True))


SOME = [("causal",), ("causal", "window"), ("window",), ("segments", "causal"), ("lengths", "causal"), ("keep",)]


@pytest.mark.parametrize(
    ("names", "kv"), [((), 2), ((), 6), (("lengths", "causal"), 6), *((names, 2) for names in SOME)]
)
@pytest.mark.parametrize("backend", ["xla", "naive"])
def test_attention_and_gradients_of_masks_and_shared_heads(rng, backend, names, kv):
    """Sums of up to 3 heads x 7 queries x 11 channels of products of about 1: an error of some 10 epsilons, 1e-6."""
    q, k, v, g = drawn(rng, 6, kv)
    assert worst(q, k, v, g, pairs(names), mask=made(*names), scale=0.3, backend=backend) < 1e-5
    if names == ("causal",) and backend == "xla":  # the tolerance would see either
        for other in ({"mask": made("causal", "keep")}, {"scale": 0.31}):
            assert worst(q, k, v, g, pairs(names), **{"mask": made(*names), "scale": 0.3} | other) > 1e-3


def test_as_many_heads_of_keys_as_of_queries_is_plain_attention_bitwise(rng):
    q, k, v, g = drawn(rng, 6, 6)
    one, other = found(q, k, v, g, mask=made("causal")), found(q, k, v, g, mask=made("causal"), scale=H**-0.5)
    jax.tree.map(np.testing.assert_array_equal, one, other)
    repeated = [jnp.repeat(x[:, :, ::3], 3, axis=2) for x in (k, v)]  # equal keys for three heads, shared or copied
    shared = attention.attend(q, k[:, :, ::3], v[:, :, ::3], mask=made("causal"))
    np.testing.assert_allclose(shared, attention.attend(q, *repeated, mask=made("causal")), rtol=0, atol=1e-6)


def test_shared_keys_are_never_copied():
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((2, 64, 12, 8), (2, 96, 2, 8), (2, 96, 2, 16))]
    copies = [(2, 96, 12, 8), (2, 12, 96, 8), (2, 96, 12, 16), (2, 12, 96, 16)]

    def copied(backend):
        text = jax.jit(lambda *x: attention.attend(*x, backend=backend)).lower(*shapes).as_text()
        return [shape for shape in copies if f"tensor<{'x'.join(map(str, shape))}xf32>" in text]

    assert copied("xla") == [] and copied("naive") != []


def test_heads_that_cannot_share():
    q, k = jnp.zeros((1, 1, 5, 2)), jnp.zeros((1, 1, 3, 2))
    with refuses(5, 3, error=ValueError):
        attention.attend(q, k, k)


CUDNN = [(), ("lengths",), ("causal",), ("lengths", "causal"), ("causal", "window"), ("lengths", "causal", "window")]


@pytest.mark.parametrize(("names", "kv", "tokens"), [*((names, 2, 7) for names in CUDNN), (CUDNN[-1], 6, 6)])
def test_arguments_of_the_fused_kernel(rng, monkeypatch, names, kv, tokens):
    """JAX's own attention of the same arguments in the kernel's place."""
    real, asked = jax.nn.dot_product_attention, []

    def call(*x, implementation, **arguments):
        asked.append((implementation, arguments))
        return real(*x, **arguments)

    monkeypatch.setattr(jax.nn, "dot_product_attention", call)
    q, k, v, g = (x[:, :tokens] for x in drawn(rng, 6, kv, H))
    assert worst(q, k, v, g, pairs(names, tokens, tokens), mask=made(*names), scale=0.3, backend="cudnn") < 1e-5
    ((implementation, arguments),) = asked
    assert implementation == "cudnn" and arguments["is_causal"] == ("causal" in names)
    assert arguments.get("local_window_size") == ((2, 0) if "window" in names else None)


@pytest.mark.parametrize("names", [n for n in ANY if n not in CUDNN], ids="+".join)
def test_masks_that_the_fused_kernel_refuses(names):
    backend, reason = backends.resolve("auto", device=None, dtype="bfloat16", head_dim=64, mask=names)
    assert (backend, reason) == ("xla", f"no cuDNN: {backends.mask_obstacle(names)}")
    x = jnp.zeros((B, T, N, 8), jnp.bfloat16)
    for refused in (
        lambda: backends.resolve("cudnn", device=None, dtype="bfloat16", head_dim=64, mask=names),
        lambda: attention.attend(x, x, x, mask=made(*names), backend="cudnn"),
    ):
        with refuses('model.backend="cudnn"', 'model.backend="xla"'):
            refused()


MEASURES = ("attention_entropy", "relative_attention_entropy", "largest_logit")


@pytest.mark.parametrize("names", [(), *SOME], ids="+".join)
def test_measures_are_of_the_keys_that_are_seen(rng, names):
    """Query by query over the keys that it sees, padding not among the queries."""
    q, k, *_ = drawn(rng)
    arrays = {"q": q, "k": k} | ({"mask": made(*names)} if names else {})
    measured = tap(MEASURES)(arrays)
    kept = pairs(names)
    kept &= (pairs([n for n in names if n in ("lengths", "keep")]).any(1))[:, :, None]
    logits = np.einsum("btnh,bsnh->bnts", np.float64(q), np.float64(k)) / np.sqrt(H)
    for b, n in np.ndindex(B, N):
        rows = [logits[b, n, t][kept[b, t]] for t in range(T) if kept[b, t].any()]
        entropies = [entr(softmax(row)).sum() for row in rows]
        shares = [e / np.log(len(row)) for e, row in zip(entropies, rows, strict=True) if len(row) > 1]
        expected = (np.mean(entropies), np.mean(shares), max(row.max() for row in rows))
        values = [float(measured[name].value[b, n]) for name in MEASURES]
        np.testing.assert_allclose(values, expected, rtol=1e-5)
    if names:
        everywhere = tap(MEASURES)({"q": q, "k": k})
        assert not np.allclose(everywhere["attention_entropy"].value, measured["attention_entropy"].value, rtol=1e-2)


def test_matrices_of_padded_sequences_have_no_condition_number(rng):
    q, k, *_ = drawn(rng)
    look = tap(["attention_probabilities", "attention_entropy"])
    assert set(look({"q": q, "k": k, "mask": made("lengths")})) == {"attention_entropy"}
    causal = look({"q": q, "k": k, "mask": made("causal")})["attention_probabilities"]
    matrix = softmax(np.where(pairs(("causal",))[:, None], np.asarray(masks.logits(q, k)), -np.inf), axis=-1)
    np.testing.assert_allclose(causal.condition_number, np.linalg.cond(matrix), rtol=1e-3)
