"""Watch of models of Flax NNX, Flax linen and Equinox, against NumPy in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from messages import refuses
from page_blocks import find_blocks

import leanformer
from leanformer import conditioning, models
from leanformer.conditioning import Summary


HEADS, HEAD_DIM, WIDTH, TOKENS, BATCH, DEPTH = 3, 8, 24, 11, 4, 2
MEASURES = ("attention_output", "head_output", "tokens", "attention_entropy", "largest_logit")
NO_TOKENS = tuple(name for name in MEASURES if name != "tokens")


def draw(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


KERNELS = [[draw(WIDTH, HEADS, HEAD_DIM, seed=3 * i + j) / 4 for j in range(3)] for i in range(DEPTH)]
OUT = [draw(HEADS, HEAD_DIM, WIDTH, seed=100 + i) / 4 for i in range(DEPTH)]
X = draw(BATCH, TOKENS, WIDTH, seed=7)
LENGTHS = np.array([11, 5, 9, 11])
MASK = (np.arange(TOKENS)[None] < LENGTHS[:, None])[:, None, None]


def by_hand(x, mask=None):
    """Return {measure: values} by layer of x + attention(x), in float64, of one example or a batch."""
    x, layers = np.asarray(x, np.float64), []
    for kernels, out_kernel in zip(KERNELS, OUT, strict=True):
        q, k, v = (np.einsum("btd,dnh->bnth", x, w) for w in kernels)
        logits = q @ k.mT / np.sqrt(HEAD_DIM)
        logits = logits if mask is None else np.where(mask, logits, -np.inf)
        p = np.exp(logits - logits.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        out = p @ v
        joined = out.swapaxes(1, 2).reshape(*x.shape[:2], -1)
        with np.errstate(divide="ignore", invalid="ignore"):
            entropy = -np.where(p > 0, p * np.log(p), 0).sum(-1).mean(-1)
        matrices = {"attention_output": joined, "head_output": out, "tokens": x}
        result = {
            name: np.divide(*np.linalg.svd(m, compute_uv=False)[..., [0, -1]].T).T for name, m in matrices.items()
        }
        layers.append(result | {"attention_entropy": entropy, "largest_logit": logits.max((-1, -2))})
        x = x + np.einsum("bnth,nhd->btd", out, out_kernel)
    return layers


class NnxBlock(nnx.Module):
    def __init__(self, index, rngs):
        self.attention = nnx.MultiHeadAttention(
            HEADS, WIDTH, HEADS * HEAD_DIM, use_bias=False, decode=False, deterministic=True, rngs=rngs
        )
        for name, kernel in zip(("query", "key", "value", "out"), (*KERNELS[index], OUT[index]), strict=True):
            getattr(self.attention, name).kernel[...] = jnp.asarray(kernel)

    def __call__(self, x, mask=None):
        return x + self.attention(x, mask=mask)


class NnxModel(nnx.Module):
    def __init__(self):
        self.blocks = nnx.List([NnxBlock(i, nnx.Rngs(0)) for i in range(DEPTH)])

    def __call__(self, x, mask=None):
        for block in self.blocks:
            x = block(x, mask)
        return x


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x, mask=None):
        attention = nn.MultiHeadDotProductAttention(
            HEADS, qkv_features=HEADS * HEAD_DIM, use_bias=False, name="attention"
        )
        return x + attention(x, mask=mask), None


class LinenModel(nn.Module):
    scanned: bool = False
    block: type = LinenBlock

    @nn.compact
    def __call__(self, x, mask=None):
        if self.scanned:
            axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "in_axes": nn.broadcast}
            return nn.scan(self.block, length=DEPTH, **axes)(name="blocks")(x, mask)[0]
        for i in range(DEPTH):
            x, _ = LinenBlock(name=f"block{i}")(x, mask)
        return x


def linen_params(scanned=False):
    names = ("query", "key", "value", "out")
    blocks = [
        {"attention": {n: {"kernel": jnp.asarray(w)} for n, w in zip(names, (*KERNELS[i], OUT[i]), strict=True)}}
        for i in range(DEPTH)
    ]
    if scanned:
        return {"params": {"blocks": jax.tree.map(lambda *x: jnp.stack(x), *blocks)}}
    return {"params": {f"block{i}": block for i, block in enumerate(blocks)}}


def check(w, expected, names=MEASURES, order=None):
    """Compare values by layer, example and head."""
    assert len(w.layers) == len(expected)
    for layer, numbers in zip(w.layers.values(), expected, strict=True):
        assert set(layer.total) == set(names), layer.status()
        for name in names:
            values = layer.total[name].values[:, :, 0]
            theirs = np.asarray(numbers[name]).reshape(len(values), -1)
            values = values if order is None else np.sort(values, axis=0)
            theirs = theirs if order is None else np.sort(theirs, axis=0)
            np.testing.assert_allclose(values, theirs, rtol=1e-3, err_msg=name)


def check_padded(w):
    """Compare the values of X, of which each example has its LENGTHS, with the values of its own tokens alone."""
    for i, length in enumerate(LENGTHS):
        for layer, numbers in zip(w.layers.values(), by_hand(X[i : i + 1, :length]), strict=True):
            for measure in MEASURES:
                values = layer.total[measure].values[i, :, 0]
                np.testing.assert_allclose(values, np.ravel(numbers[measure]), rtol=2e-3, err_msg=measure)


def nnx_case(jit):
    model = NnxModel()
    return model, (nnx.jit(lambda m, x, mask=None: m(x, mask)) if jit else lambda m, x, mask=None: m(x, mask))


def linen_case(jit, scanned=False):
    model, params = LinenModel(scanned), linen_params(scanned)

    def call(m, x, mask=None):
        return m.apply(params, x, mask)

    return model, (jax.jit(call, static_argnums=0) if jit else call)


CASES = {
    "nnx": (nnx_case, {}),
    "linen": (linen_case, {}),
    "linen, scanned": (linen_case, {"scanned": True}),
}


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("name", CASES)
def test_equals_numpy(name, jit):
    make, options = CASES[name]
    model, call = make(jit, **options)
    expected = call(model, X)
    with leanformer.watch(model, measures=MEASURES) as w:
        watched = make(jit, **options)[1](model, X) if jit else call(model, X)
    np.testing.assert_array_equal(watched, expected)
    check(w, by_hand(X))
    assert {row["status"] for row in w.rows} == {"ok"} and all(row["examples"] == BATCH for row in w.rows)
    assert w.rows[0]["heads"] == HEADS and w.rows[0]["head_dim"] == HEAD_DIM
    if "scanned" in options:
        assert list(w.layers) == ["blocks.attention[0]", "blocks.attention[1]"]
    before = [layer.calls for layer in w.layers.values()]
    call(model, X)
    assert [layer.calls for layer in w.layers.values()] == before


AXIS_TYPES = {"auto": jax.sharding.AxisType.Auto, "explicit": jax.sharding.AxisType.Explicit}


def make_sharding(kind):
    """Return the sharding of a batch over four devices."""
    mesh = jax.make_mesh((4,), ("data",), (AXIS_TYPES[kind],), devices=jax.devices()[:4])
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))


@pytest.mark.parametrize("kind", ["explicit", pytest.param("auto", marks=pytest.mark.slow)])
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("name", CASES)
def test_sharded_batches(name, jit, kind):
    """Explicit axes, where most reshapes of a sharded axis are errors, are the default of `jax.make_mesh`."""
    sharding, (make, options) = make_sharding(kind), CASES[name]
    model, call = make(jit, **options)
    x, mask = (jax.device_put(array, sharding) for array in (X, MASK))
    with jax.set_mesh(sharding.mesh):
        expected = call(model, x, mask)
        call = make(jit, **options)[1]  # compiled within the block
        with leanformer.watch(model) as w:
            watched = call(model, x, mask)
    np.testing.assert_array_equal(watched, expected)
    assert jax.typeof(watched) == jax.typeof(expected)
    check_padded(w)


class Repeated(nnx.Module):
    """One block, twice."""

    def __init__(self):
        self.block = NnxBlock(0, nnx.Rngs(0))

    def __call__(self, x):
        return self.block(self.block(x))


@pytest.mark.parametrize("name", ["repeated", pytest.param("vit", marks=pytest.mark.slow)])
def test_every_counts_calls_of_the_model(name):
    """Not of a layer, which may arrive several times in a call, nor of a group of equal layers."""
    model, calls = (Repeated(), [6]) if name == "repeated" else (make_vit(num_heads=(2, 4)), [3, 3])
    inputs = jnp.asarray(draw(5, *((BATCH, TOKENS, WIDTH) if name == "repeated" else (2, 8, 8, 3))))
    with leanformer.watch(model) as w:
        for x in inputs[::2]:
            model(x)
    with leanformer.watch(model, every=2) as every:
        for x in inputs:
            model(x)
    assert ([layer.calls for layer in every.layers.values()], every.record()) == (calls, w.record())
    for a, b in zip(w.layers.values(), every.layers.values(), strict=True):
        for measure in a.total:
            np.testing.assert_array_equal(a.total[measure].values, b.total[measure].values)


def make_vit(name="vit", **sizes):
    sizes = {"width": 12, "depth": 2, "num_heads": 2, "head_dim": 4, "mlp_dim": 8, "image_size": 8, **sizes}
    extra = {"patch_size": 4} if name == "vit" else {"window_size": 2}
    return models.build(name, **sizes, **extra, channels=3, num_classes=5, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("limit", [pytest.param(None, marks=pytest.mark.slow), 1])
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_windows_count_as_examples(jit, limit):
    sizes = {"width": (8,), "depth": (1,), "num_heads": (2,), "head_dim": (4,), "mlp_dim": (8,), "image_size": 32}
    model = make_vit("davit", **sizes)
    images = jnp.asarray(np.random.default_rng(0).standard_normal((3, 32, 32, 3)), jnp.float32)
    with leanformer.watch(model, examples=limit) as w:
        (nnx.jit(lambda m, x: m(x)) if jit else lambda m, x: m(x))(model, images)
    number, windows = limit or 3, 16  # 8 x 8 tokens
    rows = {(row["layer"], row["measure"]): row for row in w.rows if row["head"] is None}
    spatial, channel = "stage1.spatial.0", "stage1.channel.0"
    assert rows[spatial, "attention_output"]["examples"] == rows[channel, "attention_output"]["examples"] == number
    entropy = rows[spatial, "attention_entropy"]
    assert entropy["count"] == 2 * number * windows and "windows or patches count" in entropy["status"]
    assert entropy["examples"] == number * windows and 0 < entropy["median"] < np.log(4)  # windows of 2 x 2
    assert {row["calls"] for row in w.rows} == {1}


def test_patches_of_a_limited_number_of_images_are_measured():
    """Of all patches of the first image; the same tokens of other images change nothing."""
    sizes = {"width": 8, "depth": 1, "num_heads": 2, "head_dim": 4, "mlp_dim": 8, "image_size": 16, "patch_size": 8}
    sizes |= {"pixel_stride": 4, "inner_width": 4, "inner_heads": 1, "inner_head_dim": 4, "inner_mlp_dim": 8}
    model = models.build("tnt", **sizes, channels=3, num_classes=5, rngs=nnx.Rngs(0))
    images = jnp.asarray(np.random.default_rng(0).standard_normal((3, 16, 16, 3)), jnp.float32)
    found = []
    for x, limit in ((images, 1), (images[:1], None)):
        with leanformer.watch(model, examples=limit, measures=("tokens",)) as w:
            model(x)
        found.append({row["layer"]: row for row in w.rows})
    inner, outer = found[0]["blocks.inner.0"], found[0]["blocks.outer.0"]
    assert [r["median"] for r in found[0].values()] == [r["median"] for r in found[1].values()]
    assert (inner["examples"], outer["examples"]) == (4, 1) and "windows" in inner["status"] != outer["status"]
    assert [(r["heads"], r["head_dim"]) for r in (inner, outer)] == [(1, 4), (2, 4)]


def test_options_of_a_watch_of_our_models():
    tokens = jnp.arange(12).reshape(3, 4)
    sizes = {"width": 12, "depth": 1, "num_heads": 2, "head_dim": 4, "mlp_dim": 8, "vocabulary": 12, "max_length": 4}
    model = models.build("gpt", **sizes, soft_cap=30.0, rngs=nnx.Rngs(0))
    with leanformer.watch(model, examples=2) as w:
        model(tokens)
    assert {row["examples"] for row in w.rows} == {2}
    with refuses("mask", "lengths"), leanformer.watch(model, mask=np.ones(4, bool)):
        pass


class CrossNnx(nnx.Module):
    def __init__(self):
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=nnx.Rngs(0))

    def __call__(self, x, memory, mask):
        return self.attention(x, memory, mask=mask)


class CrossLinen(nn.Module):
    @nn.compact
    def __call__(self, x, memory, mask):
        return nn.MultiHeadDotProductAttention(HEADS)(x, memory, mask=mask)


@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_padding_of_the_memory_leaves_the_queries(kind):
    """A mask of cross-attention says nothing of the queries, also where both have the same number of tokens."""
    memory, outputs = jnp.asarray(draw(BATCH, TOKENS, WIDTH, seed=8)), []
    if kind == "nnx":
        model = CrossNnx()
        call = model
    else:
        model = CrossLinen()
        call = functools.partial(model.apply, model.init(jax.random.key(0), X, memory, MASK))
    for part in (slice(None), slice(TOKENS - 1)):  # as many queries as keys, and fewer
        with leanformer.watch(model, measures=("attention_output",)) as w:
            call(X[:, part], memory, jnp.asarray(MASK))
        (row,) = w.rows
        assert row["shape"][0] == len(range(TOKENS)[part]) and "mask=" in row["status"]
        outputs.append(row["tokens"])
    assert outputs == [[TOKENS, TOKENS], [TOKENS - 1, TOKENS - 1]]
    with leanformer.watch(model, measures=("attention_output",), mask=MASK[:, 0, 0]) as w:
        call(X, memory, jnp.asarray(MASK))
    assert w.rows[0]["tokens"] == [min(LENGTHS), max(LENGTHS)] and "mask=" not in w.rows[0]["status"]


def test_linen_measures_calls_of_the_watched_model_only():
    class Teacher(LinenModel):
        pass

    model, params = LinenModel(), linen_params()
    with leanformer.watch(model) as w:
        Teacher().apply(params, draw(BATCH, TOKENS, WIDTH, seed=9))
        bound = model.bind(params)(X)
        Teacher().bind(params)(draw(BATCH, TOKENS, WIDTH, seed=9))
    np.testing.assert_array_equal(bound, model.apply(params, X))
    check(w, by_hand(X))
    assert {row["status"] for row in w.rows} == {"ok"} and {row["calls"] for row in w.rows} == {1}
    with leanformer.watch(model) as w:
        Teacher().apply(params, X)
    assert not w.layers and list(w.unmatched) == ["LinenModel"]


def test_linen_layer_that_calls_its_base_class_counts_once():
    class Attention(nn.MultiHeadDotProductAttention):
        def __call__(self, x):
            return super().__call__(x)

    model = Attention(HEADS)
    with leanformer.watch(model) as w:
        model.apply(model.init(jax.random.key(0), X), X)
    assert {(row["calls"], row["examples"]) for row in w.rows} == {(1, BATCH)}


@pytest.mark.parametrize("axes", [(2, 1), (1, 1), (2, 2)])
def test_masks_broadcast_over_several_batch_axes(axes):
    """A mask of linen may broadcast over one of two batch axes; the watched call returns what the model returns."""
    model, x = nn.MultiHeadDotProductAttention(HEADS), X.reshape(2, 2, TOKENS, WIDTH)
    params = model.init(jax.random.key(0), x)
    mask = np.broadcast_to(MASK.reshape(2, 2, 1, 1, TOKENS)[: axes[0], : axes[1]], (*axes, 1, TOKENS, TOKENS))
    with leanformer.watch(model, measures=("attention_output", "attention_entropy")) as w:
        result = model.apply(params, x, mask=jnp.asarray(mask))
    np.testing.assert_array_equal(result, model.apply(params, x, mask=jnp.asarray(mask)))
    assert {row["examples"] for row in w.rows} == {BATCH}
    whole = np.broadcast_to(mask, (2, 2, *mask.shape[2:])).reshape(BATCH, *mask.shape[2:])
    with leanformer.watch(model, measures=("attention_output", "attention_entropy")) as flat:
        model.apply(params, X, mask=jnp.asarray(whole))
    assert [row["median"] for row in w.rows] == pytest.approx([row["median"] for row in flat.rows], rel=1e-5)


def test_calls_of_one_program_are_told_apart():
    """A layer is one layer, however often the model is called in a program, or the program is run."""
    model, params, batches = LinenModel(), linen_params(), jnp.stack([X, 2 * X, 3 * X])
    stacked, stacked_params = LinenModel(scanned=True), linen_params(scanned=True)
    expected, cached, inherited = by_hand(X), NnxModel(), Inherited()
    for block in cached.blocks:
        block.__class__ = CompiledBlock
    programs = {
        "one program, run again": (model, lambda: _repeat(jax.jit(lambda p: model.apply(p, X)), params), 3),
        "scan over batches": (model, lambda: jax.lax.scan(lambda c, x: (c, model.apply(params, x)), 0, batches), 3),
        "twice in a program": (
            model,
            lambda: jax.jit(lambda x: model.apply(params, x) + model.apply(params, 2 * x))(X),
            2,
        ),
        "eager, then jit": (cached, lambda: (cached(X), _repeat(nnx.jit(lambda m: m(X)), cached)), 4),
        "call of the base class": (inherited, lambda: _repeat(jax.jit(lambda p: inherited.apply(p, X)), params), 3),
        "keyword, scanned": (stacked, lambda: _repeat(jax.jit(lambda p: stacked.apply(p, x=X)), stacked_params), 3),
    }
    for name, (watched, call, calls) in programs.items():
        with leanformer.watch(watched, measures=("attention_output",)) as w:
            call()
        assert [layer.calls for layer in w.layers.values()] == [calls] * DEPTH, name
        for layer, numbers in zip(w.layers.values(), expected, strict=True):
            values = layer.total["attention_output"].values[:BATCH, 0, 0]
            np.testing.assert_allclose(np.sort(values), np.sort(numbers["attention_output"]), rtol=1e-3, err_msg=name)


class CompiledBlock(NnxBlock):
    __call__ = nnx.jit(NnxBlock.__call__)


class Inherited(LinenModel):
    def __call__(self, x, mask=None):
        return super().__call__(x, mask)


def _repeat(call, *args):
    for _ in range(3):
        call(*args)


def test_first_argument_that_is_no_tokens():
    """Numbers of tokens, or a mask: the layer is measured, and nothing is said of its tokens."""

    class Embedded(nnx.Module):
        def __init__(self):
            self.attention = NnxBlock(0, nnx.Rngs(0)).attention

        def __call__(self, numbers, mask=None):
            return self.attention(jnp.asarray(X) * numbers[..., None], mask=mask)

    model, numbers = Embedded(), jnp.ones((BATCH, TOKENS), int)
    for call in (lambda: model(numbers), lambda: nnx.jit(lambda m, n: m(n))(model, numbers)):
        with leanformer.watch(model) as w:
            call()
        (layer,) = w.layers.values()
        assert layer.calls == 1 and "tokens" not in layer.total and "tokens not measured" in layer.status()


def test_calls_that_cannot_be_told_apart_are_refused():
    model, params, nnx_model = LinenModel(), linen_params(), NnxModel()
    mesh = jax.make_mesh((4,), ("data",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    spec = jax.sharding.PartitionSpec("data")
    shards = jax.shard_map(lambda x: model.apply(params, x), mesh=mesh, in_specs=spec, out_specs=spec)
    vmapped = jax.vmap(lambda x: model.apply(params, x))
    for watched, call in ((model, jax.jit(shards)), (model, jax.jit(vmapped)), (nnx_model, jax.vmap(nnx_model))):
        with refuses("jax.vmap", "jax.shard_map", "outside"), leanformer.watch(watched):
            call(X)


def test_layers_of_a_scan_are_told_apart_by_their_weights():
    """Also in the backward pass of rematerialised layers, which runs from the last to the first."""
    model, params = LinenModel(scanned=True, block=nn.remat(LinenBlock)), linen_params(True)
    with leanformer.watch(model, measures=("attention_output",)) as w:
        jax.jit(jax.grad(lambda p: model.apply(p, X).sum()))(params)
    for layer, numbers in zip(w.layers.values(), by_hand(X), strict=True):
        values = layer.total["attention_output"].values[:, 0, 0]
        np.testing.assert_allclose(values[:BATCH], numbers["attention_output"], rtol=1e-3)
        np.testing.assert_array_equal(values[-BATCH:], values[:BATCH])


@pytest.mark.parametrize("remat", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_gradients_are_unchanged(remat):
    class Rematerialised(NnxBlock):
        __call__ = nnx.remat(NnxBlock.__call__)

    model = NnxModel()
    for block in model.blocks if remat else ():
        block.__class__ = Rematerialised  # to JAX a function of its own
    expected = nnx.grad(lambda m: (m(X) ** 2).sum())(model)
    with leanformer.watch(model) as w:
        found = nnx.grad(lambda m: (m(X) ** 2).sum())(model)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert any("nnx.remat" in row["status"] for row in w.rows) == remat and all(row["calls"] for row in w.rows)


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("name", CASES)
def test_examples_of_padding_alone_are_left_out(name, jit):
    make, options = CASES[name]
    model, call = make(jit, **options)
    mask = MASK & (np.arange(BATCH) > 0)[:, None, None, None]
    with leanformer.watch(model) as w:
        call(model, X, mask)
    for layer, numbers in zip(w.layers.values(), by_hand(X, MASK), strict=True):
        assert "left out" in layer.status() and layer.total["attention_entropy"].examples == BATCH - 1
        entropy = layer.total["attention_entropy"].values[:, :, 0]
        assert entropy.min() > 0.5 and not layer.total["attention_output"].singular.any() and len(numbers)
    model, call = make(jit, **options)
    with leanformer.watch(model) as w:
        call(model, X, np.zeros_like(mask))
    assert [layer.calls for layer in w.layers.values()] == [0] * DEPTH and "left out" in w.rows[0]["status"]


def test_tokens_of_another_type_are_judged_by_it():
    """Under mixed precision the residual stream is float32, which resolves what bfloat16 would only bound."""
    x = X.copy()
    x[:, 1] = x[:, 0] + 1e-3 * x[:, 2]  # two rows nearly equal
    x[:, 2] = x[:, 3] + draw(WIDTH) / 100

    class Mixed(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x + nn.MultiHeadDotProductAttention(HEADS, dtype=jnp.bfloat16, name="attention")(x)

    model = Mixed()
    with leanformer.watch(model) as w:
        model.apply(model.init(jax.random.key(0), x), x)
    rows = {row["measure"]: row for row in w.rows if row["head"] is None}
    assert rows["tokens"]["bounds"] == [] and rows["attention_output"]["bounds"]
    expected = np.median(np.linalg.cond(x.astype(np.float64)))
    np.testing.assert_allclose(rows["tokens"]["median"], expected, rtol=1e-3)


def test_options_are_checked():
    """`every` when a call is traced."""
    model, call = nnx_case(jit=False)
    with refuses("every=3"), leanformer.watch(model, every=3):
        nnx_case(True)[1](model, X)
    with leanformer.watch(model, mask=MASK[:, 0, 0], examples=2) as w:
        call(model, X)
    expected = [np.linalg.cond(x[:n].astype(np.float64)) for x, n in zip(X[:2], LENGTHS, strict=False)]
    values = next(iter(w.layers.values())).total["tokens"].values[:, 0, 0]
    np.testing.assert_allclose(values, expected, rtol=1e-3)


def test_everything_is_restored_after_an_exception():
    model = NnxModel()
    before = nnx.graphdef(model)
    with pytest.raises(TypeError), leanformer.watch(model):
        model(X, mask=None, unknown=1)
    assert nnx.graphdef(model) == before and type(model) is NnxModel
    linen, call = linen_case(False)
    with pytest.raises(Exception, match="shape"), leanformer.watch(linen):
        call(linen, X[..., :5])
    with leanformer.watch(linen) as w:
        pass
    call(linen, X)
    assert w.layers == {}


def test_function_compiled_before_the_block():
    model = NnxModel()
    compiled = jax.jit(lambda x: model(x))
    compiled(X)
    with leanformer.watch(model) as w:
        compiled(X)
    assert {row["status"] for row in w.rows} == {"never called"}


def test_function_compiled_inside_the_block_and_called_after_it():
    model = NnxModel()
    with leanformer.watch(model, measures=("attention_output",)) as w:
        compiled = jax.jit(lambda x: model(x))
        compiled(X)
    compiled(X)
    jax.effects_barrier()
    assert [layer.calls for layer in w.layers.values()] == [1, 1]


def test_models_of_this_library(make_tiny, meshes):
    """The watch of a model of leanformer equals its tap."""
    from leanformer.training import model_setup

    setup = model_setup.set_up_model(make_tiny(), mesh=meshes(1, 1))
    model = setup.merge(setup.initial_weights())
    images = jnp.asarray(draw(BATCH, 14, 14, 1))
    outputs, taps = jax.jit(lambda x: model(x, tap=conditioning.tap(MEASURES)))(images)
    with leanformer.watch(model, measures=MEASURES) as w:
        watched, others = model(images)
        assert others == {}
    np.testing.assert_allclose(watched, outputs, rtol=1e-5, atol=1e-6)
    ((stack, measured),) = taps.items()
    for i, (name, layer) in enumerate(w.layers.items()):
        assert name == f"{stack}.{i}" and layer.status() == "ok"
        for measure, values in measured.items():
            x = values.condition_number if isinstance(values, Summary) else values.value
            ours = layer.total[measure].values[:, :, 0]
            np.testing.assert_allclose(ours, np.asarray(x[i]).reshape(BATCH, -1), rtol=1e-3)


def test_wrong_uses():
    for model, options, words in (
        (nnx.Linear(2, 3, rngs=nnx.Rngs(0)), {}, ["attention_fn", "Linear"]),
        (LinenModel(), {"heads": 2}, ["heads="]),
        (jax.jit(jnp.sin), {}, ["leanformer.conditioning.condition"]),
    ):
        with refuses(*words), leanformer.watch(model, **options):
            pass


def test_another_function_of_the_same_name_is_not_taken_for_flax():
    """`jax.nn.dot_product_attention` has a scale and lengths, which change the logits."""
    model = NnxModel()
    for block in model.blocks:
        block.attention.attention_fn = dot_product_attention
    with leanformer.watch(model, measures=MEASURES) as w:
        model(X)
    assert all(set(layer.total) == {"attention_output", "head_output", "tokens"} for layer in w.layers.values())


def dot_product_attention(q, k, v, **_):
    return jax.nn.dot_product_attention(q, k, v, scale=1.0)


def test_equinox():
    eqx = pytest.importorskip("equinox")

    class Model(eqx.Module):
        layers: list

        def __call__(self, x, mask=None):
            for layer in self.layers:
                x = x + layer(x, x, x, mask)
            return x

    def make(i):
        layer = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=jax.random.key(0))
        names = ("query_proj", "key_proj", "value_proj")
        kernels = [w.reshape(WIDTH, -1).T for w in KERNELS[i]] + [OUT[i].reshape(-1, WIDTH).T]
        where = [lambda m, n=n: getattr(m, n).weight for n in (*names, "output_proj")]
        for get, kernel in zip(where, kernels, strict=True):
            layer = eqx.tree_at(get, layer, jnp.asarray(kernel))
        return layer

    model = Model([make(i) for i in range(DEPTH)])
    expected = jax.vmap(model)(X)
    for compiled in (False, True):
        with leanformer.watch(model, measures=NO_TOKENS) as w:
            call = jax.vmap(w.model)
            watched = eqx.filter_jit(lambda m, x: jax.vmap(m)(x))(w.model, X) if compiled else call(X)
        np.testing.assert_allclose(watched, expected, rtol=1e-5, atol=1e-6)
        assert w.model is model and list(w.layers) == ["layers[0]", "layers[1]"]
        check(w, by_hand(X), NO_TOKENS, order="any")
        assert {row["status"] for row in w.rows} == {"ok"}
    with leanformer.watch(model) as w:
        jax.vmap(model)(X)
    assert all("w.model" in row["status"] for row in w.rows)
    twice = Model([model.layers[0]] * 2)  # one layer at two places
    with leanformer.watch(twice, measures=NO_TOKENS) as w:
        jax.vmap(w.model)(X)
    first, second = ([layer.total[m].values for m in NO_TOKENS] for layer in w.layers.values())
    assert [layer.calls for layer in w.layers.values()] == [BATCH, BATCH] and not np.array_equal(first[0], second[0])


def test_blocks_of_the_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = find_blocks("your_model.md")
    start, flax = (blocks[title] for title in ("Measure a model of your own", "Flax and Equinox"))
    names = {"model": NnxModel(), "batch": X}
    exec(start[0], names)
    assert (tmp_path / "conditioning.png").exists() and {row["status"] for row in names["rows"]} == {"ok"}
    records = []

    class Logger:
        log = staticmethod(lambda values, step: records.append((step, values)))

    names |= {"model": LinenModel(), "params": linen_params(), "opt_state": None, "logger": Logger}
    exec(flax[0], names)
    assert names["w"].rows[0]["examples"] == BATCH
    names |= {"train_step": lambda params, state, batch: (params, state), "loader": [{"inputs": X}] * 2}
    exec(flax[1], names)
    assert [step for step, _ in records] == [0] and "block0.attention/attention_output" in records[0][1]


def test_block_for_equinox(tmp_path):
    eqx = pytest.importorskip("equinox")
    *_, block = find_blocks("your_model.md")["Flax and Equinox"]

    class Model(eqx.Module):
        layer: eqx.nn.MultiheadAttention

        def __call__(self, x):
            return self.layer(x, x, x)

    model = Model(eqx.nn.MultiheadAttention(HEADS, WIDTH, key=jax.random.key(0)))
    names = {"model": model, "batch": X, "jax": jax, "leanformer": leanformer}
    exec(block, names)
    assert names["w"].rows[0]["examples"] == BATCH


class LinenEncoder(nn.Module):
    def setup(self):
        self.attention = nn.MultiHeadDotProductAttention(HEADS)

    def __call__(self, x):
        return self.encode(x)

    def encode(self, x):
        return self.attention(x)


def test_linen_counts_other_methods_and_bound_copies():
    model = LinenEncoder()
    params = model.init(jax.random.key(0), X)
    with leanformer.watch(model, measures=("attention_output",)) as w:
        model.apply(params, X, method="encode")
        model.bind(params).encode(X)
        model.apply(params, X)
    assert [(row["calls"], row["status"]) for row in w.rows] == [(3, "ok")] * len(w.rows) != []
