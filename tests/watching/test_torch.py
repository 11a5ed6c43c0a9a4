"""Watch of PyTorch models. Runs in the environment of its own that `make test-all` makes."""

import gc
import weakref

import numpy as np
import pytest


torch = pytest.importorskip("torch")

from page_blocks import find_blocks  # noqa: E402

import leanformer  # noqa: E402
import leanformer.watching  # noqa: E402
from leanformer.errors import ConfigError  # noqa: E402


nn, functional = torch.nn, torch.nn.functional
ALL = ("attention_output", "head_output", "tokens", "attention_probabilities", "attention_entropy", "largest_logit")
HEADS, HEAD_DIM, WIDTH, TOKENS, BATCH = 3, 8, 20, 11, 4


class Attention(nn.Module):
    """Attention with names of its own, and more heads than the width has room for."""

    def __init__(self, kv=HEADS, fused=True, gate=False):
        super().__init__()
        self.num_heads, self.kv, self.fused = HEADS, kv, fused
        self.gate = nn.Linear(WIDTH, HEADS * HEAD_DIM) if gate else None
        self.alpha = nn.Linear(WIDTH, (HEADS + 2 * kv) * HEAD_DIM)  # packed q, k, v
        self.omega = nn.Linear(HEADS * HEAD_DIM, WIDTH)

    def split(self, x):
        b, t, _ = x.shape
        packed = self.alpha(x).reshape(b, t, -1, HEAD_DIM).transpose(1, 2)
        q, k, v = packed.split([HEADS, self.kv, self.kv], dim=1)
        return q, *(y.repeat_interleave(HEADS // self.kv, dim=1) for y in (k, v))

    def heads(self, x, mask=None):
        q, k, v = self.split(x)
        if self.fused:
            return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        logits = q @ k.transpose(-2, -1) * HEAD_DIM**-0.5
        return (logits if mask is None else logits.masked_fill(~mask, -torch.inf)).softmax(dim=-1) @ v

    def forward(self, x, mask=None):
        out = self.heads(x, mask).transpose(1, 2).flatten(2)
        return self.omega(out if self.gate is None else out * torch.sigmoid(self.gate(x)))


class Block(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention(**options)
        self.intermediate = nn.Linear(WIDTH, WIDTH)  # not an output projection, in spite of its width

    def forward(self, x, mask=None):
        x = x + self.attention(self.norm(x), mask)
        return x + functional.gelu(self.intermediate(x))


class Model(nn.Module):
    def __init__(self, depth=2, **options):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(**options) for _ in range(depth))

    def forward(self, x, attention_mask=None):
        mask = None if attention_mask is None else attention_mask[:, None, None].bool()
        for block in self.blocks:
            x = block(x, mask)
        return x


def batch(seed=0, tokens=TOKENS):
    return torch.randn(BATCH, tokens, WIDTH, generator=torch.Generator().manual_seed(seed))


def watch_once(model, *inputs, measures=ALL, **options):
    with torch.no_grad(), leanformer.watch(model, measures=measures, **options) as w:
        model(*inputs)
    return w


def kappa(x):
    s = np.linalg.svd(np.asarray(x, np.float64), compute_uv=False)
    return s[..., 0] / s[..., -1]


def values(w, layer, measure):
    return w.layers[layer].total[measure].values[:, :, 0].squeeze()


def by_hand(model, x):
    """Return κ of heads joined, of one head and of the tokens, and κ and entropy of the probabilities, by layer."""
    layers = []
    with torch.no_grad():
        for block in model.blocks:
            q, k, _ = block.attention.split(block.norm(x))
            out = block.attention.heads(block.norm(x))
            p = (q.double() @ k.double().mT * HEAD_DIM**-0.5).softmax(-1).numpy()
            entropy = -(p * np.log(p)).sum(-1).mean(-1)
            layers.append((kappa(out.transpose(1, 2).flatten(2)), kappa(out), kappa(x), kappa(p), entropy))
            x = block(x)
    return layers


@pytest.mark.parametrize("options", [{}, {"kv": 1}, {"fused": False}, {"gate": True}], ids=str)
def test_equals_numpy_on_activations_taken_by_hand(options):
    model, x = Model(**options), batch()
    w = watch_once(model, x)
    assert list(w.layers) == ["blocks.0.attention", "blocks.1.attention"] and w.unmatched == {}
    names = ("attention_output", "head_output", "tokens", "attention_probabilities", "attention_entropy")
    for layer, expected in zip(w.layers, by_hand(model, x), strict=True):
        for name, numbers in zip(names, expected, strict=True):
            np.testing.assert_allclose(values(w, layer, name), numbers, rtol=2e-3)
        np.testing.assert_allclose(values(w, layer, "attention_output"), expected[0], rtol=1e-4)
    gate = "gate" in options
    assert all(("gate" in layer.status()) == gate for layer in w.layers.values())


def test_rows_and_table():
    w = watch_once(Model(), batch(), measures=("attention_output", "head_output"))
    rows = w.rows
    assert [(r["measure"], r["head"]) for r in rows[:5]] == [
        ("attention_output", None),
        ("head_output", None),
        *(("head_output", head) for head in range(HEADS)),
    ]
    first = rows[0]
    assert first["shape"] == [TOKENS, HEADS * HEAD_DIM] and first["examples"] == first["count"] == BATCH
    assert first["heads"] == HEADS and first["head_dim"] == HEAD_DIM and first["status"] == "ok"
    assert first["q10"] < first["median"] < first["q90"] and 1 < first["gaussian"]["median"] < 100
    assert first["stable_rank"] <= first["effective_rank"] <= TOKENS and rows[1]["count"] == BATCH * HEADS
    assert all(word in w.table() for word in ("blocks.1.attention", "11 x 24", "3 x 8", f"{first['median']:.3g}"))


def test_outputs_gradients_and_hooks_are_unchanged():
    model, x = Model(), batch()
    expected = model(x)
    gradients = torch.autograd.grad(expected.sum(), list(model.parameters()))
    with leanformer.watch(model):
        watched = model(x)
    assert torch.equal(watched, expected)
    assert all(map(torch.equal, torch.autograd.grad(watched.sum(), list(model.parameters())), gradients))
    assert not has_hooks(model)


def has_hooks(model):
    names = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_always_called")
    return any(getattr(module, name) for module in model.modules() for name in names)


def test_hooks_and_modes_are_gone_after_an_exception():
    model = Model()
    model.blocks[1].attention.omega = nn.Linear(5, WIDTH)  # raises inside the attention layer
    with pytest.raises(RuntimeError), leanformer.watch(model):
        model(batch())
    assert not has_hooks(model) and not torch.overrides._get_current_function_mode_stack()


@pytest.mark.parametrize("fused", [True, False])
def test_activations_are_freed_when_the_call_ends(fused):
    model = Model(fused=fused)
    gc.disable()  # a cycle of references would be found by the garbage collector only
    try:
        with leanformer.watch(model) as w:
            x = batch()
            reference = weakref.ref(x)
            model(x)
        del x
        assert reference() is None
    finally:
        gc.enable()
    sizes = [tally.values.nbytes for layer in w.layers.values() for tally in layer.total.values()]
    assert sum(sizes) < 10_000


def test_every_and_record():
    model = Model()
    with torch.no_grad(), leanformer.watch(model, every=3) as w:
        for seed in range(7):  # calls 0, 3 and 6
            model(batch(seed))
        first = w.record()
        assert w.record() == {}
        model(batch(7))
        model(batch(8))
        model(batch(9))
        second = w.record()
    assert w.rows[0]["examples"] == 4 * BATCH and w.rows[0]["calls"] == 4
    assert w.verdict()["calls"] == 4 and "All 4 measured calls" in str(w)
    assert first.keys() == second.keys() and first != second
    expected = np.median(by_hand(model, batch(9))[0][0])
    assert second["blocks.0.attention/attention_output"] == pytest.approx(expected, rel=1e-3)


class AddedMask(Model):
    def forward(self, x, attention_mask=None):
        return super().forward(x, None if attention_mask is None else attention_mask == 0)


@pytest.mark.parametrize("given", ["argument", "option", "added to logits"])
def test_padding_does_not_count(given):
    """Each example equals itself alone, without its padding."""
    model, lengths = AddedMask() if "added" in given else Model(), (11, 5, 9, 11)
    x = batch()
    mask = torch.arange(TOKENS)[None] < torch.tensor(lengths)[:, None]
    with torch.no_grad(), leanformer.watch(model, mask=mask if given == "option" else None) as w:
        model(x, attention_mask=-1e4 * ~mask if "added" in given else mask.long())
    for i, length in enumerate(lengths):
        alone = watch_once(model, x[i : i + 1, :length], measures=w.options.measures)
        for layer in w.layers:
            for measure in w.layers[layer].total:
                np.testing.assert_allclose(values(w, layer, measure)[i], values(alone, layer, measure), rtol=2e-3)
    assert w.rows[0]["tokens"] == [5, 11]


class OwnMask(nn.Module):
    """Model that makes the padding mask itself, for a part of it: token 0 is padding."""

    def __init__(self, encoder):
        super().__init__()
        self.embed = nn.Embedding(50, 24)
        layer = nn.TransformerEncoderLayer(24, 3, 32, batch_first=True)
        self.part = nn.TransformerEncoder(layer, 2) if encoder else nn.MultiheadAttention(24, 3, batch_first=True)

    def forward(self, tokens):
        x, padding = self.embed(tokens), tokens == 0
        if isinstance(self.part, nn.TransformerEncoder):
            return self.part(x, src_key_padding_mask=padding)
        return self.part(x, x, x, key_padding_mask=padding)[0]


@pytest.mark.parametrize("encoder", [True, False])
def test_mask_made_inside_the_model_is_read(encoder):
    """As if it were passed with mask=; without it, rows of padding would count."""
    model, tokens = OwnMask(encoder).eval(), torch.arange(1, 13).repeat(2, 1)
    tokens[0, 7:] = 0

    def measure(**options):
        with leanformer.watch(model, **options) as w:
            model(tokens)
        return [row["median"] for row in w.rows if row["median"] is not None]

    found = measure()
    assert found == measure(mask=(tokens != 0).numpy()) != measure(mask=np.ones((2, 12), bool))


def test_mask_of_cross_attention_covers_the_other_tokens():
    attention = nn.MultiheadAttention(24, 3, batch_first=True)
    with leanformer.watch(attention, measures=("attention_output",)) as w:
        attention(
            *(torch.randn(2, n, 24) for n in (5, 5, 5)), key_padding_mask=torch.tensor([[False] * 3 + [True] * 2] * 2)
        )
    assert next(row["shape"] for row in w.rows) == [5, 24]


LENGTHS = {"encoder": 6, "decoder": 15}  # of 20 tokens on both sides


def pytorch_encoder_decoder():
    model = nn.Transformer(24, 3, 1, 1, 32, batch_first=True).eval()
    padding = [torch.arange(20).expand(BATCH, 20) >= length for length in LENGTHS.values()]
    masks = dict(zip(("src_key_padding_mask", "tgt_key_padding_mask"), padding, strict=True))
    sides = torch.randn(2, BATCH, 20, 24)
    return lambda: model(*sides, **masks, memory_key_padding_mask=padding[0]), model


def transformers_encoder_decoder(name, wrapped):
    transformers = pytest.importorskip("transformers")
    sizes = {"d_model": 24, "num_layers": 1, "num_heads": 3, "d_kv": 8, "d_ff": 32, "encoder_layers": 1}
    sizes |= {"decoder_layers": 1, "encoder_attention_heads": 3, "decoder_attention_heads": 3, "vocab_size": 50}
    sizes |= {"decoder_start_token_id": 0}
    model = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**sizes)).eval()
    source, target = (torch.arange(20).expand(BATCH, 20) < length for length in LENGTHS.values())
    tokens = {"input_ids": torch.randint(3, 50, (BATCH, 20)), "decoder_input_ids": torch.randint(3, 50, (BATCH, 20))}
    masks = {"attention_mask": source.long(), "decoder_attention_mask": target.long()}
    model = Wrapped(model) if wrapped else model
    return lambda: model(**tokens, **masks), model


class Wrapped(nn.Module):
    """As DistributedDataParallel wraps a model."""

    def __init__(self, model):
        super().__init__()
        self.inner = model

    def forward(self, attention_mask=None, **kwargs):
        return self.inner(attention_mask=attention_mask, **kwargs)


@pytest.mark.parametrize("name", ["pytorch", "T5", "Bart", "T5, wrapped"])
def test_encoder_and_decoder_have_masks_of_their_own(name):
    """Queries of cross-attention are target tokens. Both sides are padded to one length, so that either mask fits."""
    name, wrapped = name.partition(",")[0], "wrapped" in name
    call, model = pytorch_encoder_decoder() if name == "pytorch" else transformers_encoder_decoder(name, wrapped)
    with torch.no_grad(), leanformer.watch(model, measures=("attention_output",)) as w:
        call()
    rows = [row for row in w.rows if row["head"] is None]
    assert len(rows) == 3 and not any("padding counts" in row["status"] for row in rows)
    for row in rows:
        assert row["tokens"] == [LENGTHS[row["layer"].removeprefix("inner.").partition(".")[0]]] * 2, row["layer"]


def test_images_have_no_padding_of_texts():
    """CLIP with as many patches as tokens."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 32}
    texts = sizes | {"vocab_size": 50, "max_position_embeddings": 17, "eos_token_id": 49}
    images = sizes | {"image_size": 32, "patch_size": 8}
    model = transformers.CLIPModel(transformers.CLIPConfig(text_config=texts, vision_config=images)).eval()
    mask = (torch.arange(17).expand(BATCH, 17) < 6).long()
    with torch.no_grad(), leanformer.watch(model, measures=("attention_output",)) as w:
        model(torch.randint(50, (BATCH, 17)), torch.randn(BATCH, 3, 32, 32), attention_mask=mask)
    found = {row["layer"].partition("_")[0]: (row["tokens"], row["status"]) for row in w.rows}
    assert (found["text"][0], found["vision"][0]) == ([6, 6], [17, 17]) and "padding" not in found["vision"][1]


def test_decoder_without_a_mask_says_that_padding_counts():
    _, model = pytorch_encoder_decoder()
    padding = torch.arange(20).expand(BATCH, 20) >= 6
    with torch.no_grad(), leanformer.watch(model, measures=("attention_output",)) as w:
        model(*torch.randn(2, BATCH, 20, 24), src_key_padding_mask=padding)
    rows = {row["layer"].partition(".")[0]: row for row in w.rows}
    assert rows["encoder"]["tokens"] == [6, 6] and "padding counts" not in rows["encoder"]["status"]
    assert rows["decoder"]["tokens"] == [20, 20] and "padding counts" in rows["decoder"]["status"]


@pytest.mark.parametrize("name", ["linear", "matmul", "softmax", "addmm"])
def test_arguments_given_by_name(name):
    """As in BEiT; measured as those given by position."""

    class Named(Attention):
        def heads(self, x, mask=None):
            q, k, v = self.split(x)
            product = torch.matmul(input=q, other=k.mT) if name == "matmul" else q @ k.mT
            logits = product * HEAD_DIM**-0.5
            weights = torch.softmax(input=logits, dim=-1) if name == "softmax" else logits.softmax(dim=-1)
            return torch.matmul(input=weights, other=v) if name == "matmul" else weights @ v

        def forward(self, x, mask=None):
            out, weight, bias = self.heads(x).transpose(1, 2).flatten(2), self.omega.weight, self.omega.bias
            if name == "addmm":
                return torch.addmm(input=bias, mat1=out.flatten(0, 1), mat2=weight.T).unflatten(0, out.shape[:2])
            return functional.linear(input=out, weight=weight, bias=bias)

    model = Model(fused=False)
    expected = watch_once(model, batch())
    for block in model.blocks:
        block.attention.__class__ = Named
    found = watch_once(model, batch())
    for layer in expected.layers:
        for measure in ALL if name != "addmm" else ALL[:2]:
            np.testing.assert_allclose(values(found, layer, measure), values(expected, layer, measure), rtol=1e-3)


def test_float32_tokens_under_autocast_are_values():
    model, x = Model(), batch()
    x[:, 1] = x[:, 0] + 1e-2 * batch(seed=1)[:, 1]
    with torch.autocast("cpu", torch.bfloat16):
        w = watch_once(model, x)
    rows = {row["measure"]: row for row in w.rows if row["layer"] == "blocks.0.attention" and row["head"] is None}
    assert rows["tokens"]["bounds"] == [] and rows["tokens"]["median"] == pytest.approx(np.median(kappa(x)), rel=1e-2)
    assert rows["attention_output"]["bounds"]


def test_mask_of_all_examples_beside_a_number_of_examples():
    model, lengths = Model(), np.array([11, 5, 9, 11])
    mask = np.arange(TOKENS)[None] < lengths[:, None]
    w = watch_once(model, batch(), mask=torch.tensor(mask), examples=2)
    assert (w.rows[0]["examples"], w.rows[0]["tokens"]) == (2, [5, 11])


def test_mask_of_the_wrong_shape_is_refused():
    with pytest.raises(ConfigError, match=r"\(4, 9\)"):
        watch_once(Model(), batch(), mask=np.ones((4, 9)))


@pytest.mark.parametrize("shape", [(BATCH, 1, TOKENS, TOKENS), (TOKENS, TOKENS), (BATCH, BATCH)], ids=str)
def test_mask_of_pairs_of_tokens_is_not_padding(shape):
    class Wrapped(Model):
        def forward(self, x, attention_mask=None):
            return super().forward(x)

    x = batch(tokens=shape[-1])
    w = watch_once(Wrapped(), x, torch.ones(shape).tril(), examples=None)
    assert "mask" in w.rows[0]["status"] and w.rows[0]["tokens"] == [shape[-1]] * 2


class Turned(Attention):
    """Attention to T B D, or with one query, that pools B D of B T D."""

    def __init__(self, pools=False):
        super().__init__()
        self.pools = pools

    def forward(self, x, mask=None):
        if self.pools:
            q, k, v = self.split(x)
            return self.omega(functional.scaled_dot_product_attention(q[:, :, :1], k, v)[:, :, 0].flatten(1))
        return self.omega(self.heads(x.transpose(0, 1)).permute(2, 0, 1, 3).flatten(2))


def test_tokens_before_examples():
    class TokensFirst(Model):
        def forward(self, x):
            return super().forward(x.transpose(0, 1))

    model, turned = Model(), TokensFirst()
    for block, other in zip(model.blocks, turned.blocks, strict=True):
        other.attention = Turned()
        other.attention.load_state_dict(block.attention.state_dict())
    usual, found = (watch_once(m, batch(), measures=("attention_output", "tokens")) for m in (model, turned))
    assert found.rows == usual.rows


def test_images_of_a_pooling_query_are_not_tokens():
    w = watch_once(Turned(pools=True), batch(), measures=("head_output",))
    assert "single token" in w.rows[0]["status"]


def test_adapter_behind_an_unseen_kernel_is_not_the_output_projection():
    class Unseen(Attention):
        def __init__(self):
            super().__init__()
            self.lora_A, self.lora_B = nn.Linear(HEADS * HEAD_DIM, 2 * HEADS), nn.Linear(2 * HEADS, WIDTH)

        def forward(self, x, mask=None):
            q, k, v = self.split(x)
            weights = torch.exp(torch.einsum("bnth,bnsh->bnts", q, k))
            out = torch.einsum("bnts,bnsh->btnh", weights / weights.sum(-1, keepdim=True), v).flatten(2)
            return self.omega(out) + self.lora_B(self.lora_A(out))

    assert watch_once(Unseen(), batch(), measures=("attention_output",)).rows[0]["shape"] == [TOKENS, HEADS * HEAD_DIM]


def test_singular_is_a_bound_and_nan_is_counted():
    model, x = Model(), batch()
    x[0] = torch.nan
    x[1] = x[1, :1]  # equal tokens: rank 1
    w = watch_once(model, x, measures=("tokens", "attention_entropy"))
    row = w.rows[0]
    assert row["not_finite"] == 1 and row["singular"] == 1 and row["bounds"] == ["q90"]
    assert row["examples"] == BATCH and row["negligible"] == TOKENS - 1
    assert "NaN" in row["status"] and "≥" in w.table()


def test_repeated_and_partial_calls():
    """A layer that runs twice in a call, and a part of the model that is called by itself."""
    shared = Model(depth=1)
    shared.blocks.append(shared.blocks[0])
    w = watch_once(shared, batch())
    assert w.rows[0]["examples"] == 2 * BATCH and "several times" in w.rows[0]["status"]
    model = Model()
    with torch.no_grad(), leanformer.watch(model, every=2) as w:
        for _ in range(3):
            model.blocks[1](batch())
    assert w.layers["blocks.0.attention"].status() == "never called"
    assert w.layers["blocks.1.attention"].calls == 2


def test_too_few_tokens_and_single_tokens():
    w = watch_once(Model(), batch(tokens=5))
    row = next(r for r in w.rows if r["measure"] == "head_output")
    assert row["shape"] == [5, HEAD_DIM] and "rank at most 5" in row["status"]
    single = watch_once(Model(), batch(tokens=1))
    assert single.rows[0]["median"] is None and "single token" in single.rows[0]["status"]


def test_selection_by_name():
    model = Model()
    w = watch_once(model, batch(), at="blocks.*.attention.omega", measures=("attention_output", "head_output"))
    assert list(w.layers) == ["blocks.0.attention.omega", "blocks.1.attention.omega"]
    expected = watch_once(model, batch(), measures=("attention_output", "head_output"))
    assert [r["median"] for r in w.rows] == [r["median"] for r in expected.rows]
    other = watch_once(model, batch(), at="blocks.1.intermediate", heads=4, measures=("attention_output", "tokens"))
    assert other.rows[0]["shape"] == [TOKENS, WIDTH] and other.rows[0]["head_dim"] == 5
    tokens = values(watch_once(model, batch()), "blocks.1.attention", "tokens")
    np.testing.assert_array_equal(values(other, "blocks.1.intermediate", "tokens"), tokens)


@pytest.mark.parametrize("layer", [True, False], ids=["TransformerEncoder", "MultiheadAttention"])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_layers_of_pytorch(layer, batch_first, training):
    """The fast path of evaluation mode has no hooks; with and without it, either order of axes gives the same."""
    torch.manual_seed(0)
    options = {"batch_first": batch_first, "dropout": 0.0}
    made = (
        nn.TransformerEncoderLayer(24, HEADS, 32, **options) if layer else nn.MultiheadAttention(24, HEADS, **options)
    )
    attention = made.self_attn if layer else made
    model = (nn.TransformerEncoder(made, 2) if layer else made).train(training)
    x = torch.randn(BATCH, TOKENS, 24)
    given = x if batch_first else x.transpose(0, 1)
    measures = ("attention_output", "attention_entropy")
    w = watch_once(model, *([given] if layer else [given] * 3), measures=measures)
    packed = functional.linear(x, attention.in_proj_weight, attention.in_proj_bias)
    q, k, v = packed.reshape(BATCH, TOKENS, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
    out = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2).detach()
    name = "layers.0.self_attn" if layer else "MultiheadAttention"
    np.testing.assert_allclose(values(w, name, "attention_output"), kappa(out), rtol=1e-3)
    assert w.rows[0]["shape"] == [TOKENS, 24] and "attention_entropy" in w.layers[name].total


def test_checkpointed_layers_count_once():
    class Checkpointed(Model):
        def forward(self, x):
            for block in self.blocks:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            return x

    model = Checkpointed()
    with leanformer.watch(model) as w:
        model(batch().requires_grad_()).sum().backward()
    assert w.rows[0]["examples"] == BATCH and w.rows[0]["status"] == "ok"


def no_attention():
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU())


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (no_attention, {}, ["Sequential", "at="]),
        (Model, {"at": "blocks.*.attn.proj"}, ["at=blocks.*.attn.proj", "blocks.0.attention.omega"]),
        (Model, {"measures": ("kappa",)}, ["kappa", "attention_output"]),
        (lambda: torch.compile(Model()), {}, ["compile"]),
        (lambda: nn.DataParallel(Model()), {}, ["model.module"]),
    ],
    ids=["no attention", "at", "measure", "compiled", "threads"],
)
def test_wrong_uses(make, options, words):
    with pytest.raises(ConfigError) as error, leanformer.watch(make(), **options):
        pass
    assert all(word in str(error.value) for word in words)


def test_never_called():
    with leanformer.watch(Model()) as w:
        pass
    assert [row["status"] for row in w.rows] == ["never called"] * 2 and "never called" in w.table()
    with pytest.raises(ConfigError, match="nothing|no condition"):
        w.plot("/dev/null")


def test_wrong_number_of_heads():
    w = watch_once(Model(), batch(), heads=5)
    assert "heads=" in w.rows[0]["status"]


def test_picture(tmp_path):
    figure = watch_once(Model(), batch()).plot(tmp_path / "conditioning.png")
    titles = [axes.get_title() for axes in figure.axes]
    assert (tmp_path / "conditioning.png").stat().st_size > 10_000
    assert any("effective rank" in title for title in titles) and len(figure.axes) == 4 + 2 * 2  # maps have a scale


class Logger:
    def __init__(self):
        self.records = []

    def log(self, values, step):
        self.records.append((step, values))


def test_blocks_of_the_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = find_blocks("your_model.md")
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(24, 2, 32, batch_first=True), 2, enable_nested_tensor=False
    )
    names = {"model": model, "batch": torch.randn(BATCH, TOKENS, 24), "logger": Logger()}
    exec(blocks["Measure a model of your own"][0], names)
    assert (tmp_path / "conditioning.png").exists() and len({row["layer"] for row in names["rows"]}) == 2
    loop, _ = blocks["Cost"]
    (by_name,) = blocks["PyTorch"]
    exec(by_name.replace("attn.proj", "attention.omega"), names | {"model": Model(), "batch": batch()})
    x, y = torch.randn(10, TOKENS, 24), torch.randn(10, TOKENS, 24)
    names |= {"loader": [(x, y)] * 3, "criterion": nn.MSELoss()}
    exec(loop, names | {"optimizer": torch.optim.SGD(model.parameters())})
    ((step, values),) = names["logger"].records
    assert step == 0 and "layers.0.self_attn/attention_output" in values


def test_trainer_of_the_page_hands_values_to_history_and_loggers(tmp_path):
    transformers = pytest.importorskip("transformers")
    options = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 32}
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**options, vocab_size=50))
    options = {"max_steps": 4, "logging_steps": 2, "save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    options |= {"eval_strategy": "steps", "eval_steps": 2}
    names = {"transformers": transformers, "leanformer": leanformer, "model": model}
    names["arguments"] = transformers.TrainingArguments(str(tmp_path), use_cpu=True, **options)
    names["dataset"] = [{"input_ids": torch.randint(50, (TOKENS,)), "labels": i % 2} for i in range(8)]
    _, code = find_blocks("your_model.md")["Cost"]
    logged = []

    class Logged(transformers.TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            if "eval_loss" not in logs:
                logged.append(dict(logs))

    names["logged"] = Logged()
    code = code.replace("every=100", "every=2")
    exec(code.replace("dataset)", "dataset, eval_dataset=dataset, callbacks=[logged])"), names)
    assert not has_hooks(model) and len(logged) == 3
    assert names["callback"].watch.rows[0]["calls"] == 2  # of 4 steps; those of evaluation do not count
    assert all(entry[f"bert.encoder.layer.{i}.attention/tokens"] > 1 for entry in logged[:2] for i in range(2))


def test_callback_of_lightning(tmp_path):
    lightning = pytest.importorskip("lightning.pytorch")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Model(depth=1)

        def training_step(self, x, index):
            return (self.model(x) ** 2).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    records = []

    class Logged(lightning.loggers.CSVLogger):
        def log_metrics(self, metrics, step=None):
            records.append((step, metrics))

    module, callback = Module(), leanformer.watching.LightningCallback(every=2, measures=("attention_output",))
    options = {"max_steps": 4, "logger": Logged(tmp_path), "enable_progress_bar": False, "enable_checkpointing": False}
    trainer = lightning.Trainer(callbacks=[callback], accelerator="cpu", enable_model_summary=False, **options)
    trainer.fit(module, torch.utils.data.DataLoader(torch.randn(8, TOKENS, WIDTH), 2))
    steps = [step for step, values in records if "model.blocks.0.attention/attention_output" in values]
    assert steps == [1, 3] and callback.watch.rows[0]["calls"] == 2 and not has_hooks(module)


def transforms(model, x):
    """Return calls of a model under tracers, compilers and functional transforms."""
    parameters = dict(model.named_parameters())
    loss = lambda p: torch.func.functional_call(model, p, (x,)).sum()  # noqa: E731
    return {
        "compile": lambda: torch.compile(model, backend="eager")(x),
        "compile without breaks": lambda: torch.compile(model, backend="eager", fullgraph=True)(x),
        "grad": lambda: torch.func.grad(loss)(parameters)["blocks.0.attention.omega.weight"],
        "vmap": lambda: torch.vmap(model)(x[None]),
        "export": lambda: torch.export.export(model, (x,)).module()(x),
        "trace": lambda: torch.jit.trace(model, (x,), check_trace=False)(x),
    }


@pytest.mark.parametrize("name", transforms(Model(), batch()))
def test_calls_that_are_traced_are_left_unmeasured_with_a_note(name):
    model, x = Model(), batch()
    expected = transforms(model, x)[name]()
    torch.compiler.reset()
    with leanformer.watch(model, measures=("attention_output",)) as w:
        found = transforms(model, x)[name]()
    torch.testing.assert_close(found, expected)
    assert [layer.calls for layer in w.layers.values()] == [0, 0]
    assert all("torch.compile" in row["status"] and "not measured" in row["status"] for row in w.rows)
    with torch.no_grad(), w:
        model(x)
    assert w.rows[0]["calls"] == 1


def test_forward_that_is_called_directly_has_a_status():
    class Direct(Model):
        def forward(self, x):
            return self.blocks[0].attention.forward(x)

    w = watch_once(Direct(), batch())
    assert "forward" in w.rows[0]["status"] and "directly" in w.rows[0]["status"]


def test_reference_model_and_rows():
    """Called with the same arguments; random numbers of the model stay as they were."""

    class Dropping(Model):
        def forward(self, x):
            return functional.dropout(super().forward(x))

    model, initial = Dropping(), Dropping()
    for block in model.blocks:
        block.attention.alpha.weight.data *= 3
    torch.manual_seed(1)
    expected = model(batch())
    torch.manual_seed(1)
    with leanformer.watch(model, reference=initial) as w:
        found = model(batch())
    assert torch.equal(found, expected) and not has_hooks(initial)
    before = watch_once(initial, batch(), measures=w.options.measures)
    rows = [row["reference"]["median"] for row in w.rows if row["median"] is not None]
    assert rows == [row["median"] for row in before.rows if row["median"] is not None]
    again = watch_once(model, batch(), reference=before.rows, measures=w.options.measures)
    assert again.rows == w.rows and "reference" in w.table() and "Against the reference" in str(w)


def test_reference_model_leaves_the_cache(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=24, n_layer=2, n_head=3, vocab_size=50, n_positions=64)
    model, initial = (transformers.GPT2LMHeadModel(config).eval() for _ in range(2))
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(torch.arange(1, 9)[None], **options)
    with leanformer.watch(model, reference=initial) as w:
        found = model.generate(torch.arange(1, 9)[None], **options)
    assert torch.equal(found, expected) and w.rows[0]["tokens"] == [8, 8]


def test_queries_and_keys_of_fused_attention():
    """Measures of logits before the mask, against NumPy, also with shared keys."""
    names = ("logit_components", "logit_spectral_entropy", "attention_distance")
    model, x = Model(depth=1, kv=1), batch()
    w = watch_once(model, x, measures=names)
    q, k, _ = (y.detach().double().numpy() for y in model.blocks[0].attention.split(model.blocks[0].norm(x)))
    logits = q @ k.swapaxes(-1, -2)
    s = np.linalg.svd(logits - logits.mean(-1, keepdims=True), compute_uv=False) ** 2
    p = (s / s.sum(-1, keepdims=True))[..., :HEAD_DIM]
    layer = "blocks.0.attention"
    np.testing.assert_allclose(values(w, layer, names[0]), 1 + (p.cumsum(-1) < 0.9).sum(-1))
    np.testing.assert_allclose(values(w, layer, names[1]), -(p * np.log(np.maximum(p, 1e-300))).sum(-1), rtol=1e-4)
    exp = np.exp(logits * HEAD_DIM**-0.5)
    away = (exp / exp.sum(-1, keepdims=True) * abs(np.subtract.outer(*[np.arange(TOKENS)] * 2))).sum(-1).mean(-1)
    np.testing.assert_allclose(values(w, layer, names[2]), away, rtol=1e-4)
