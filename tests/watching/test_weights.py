"""Conditioning of the matrices of a file, without the model's code."""

import json
import weakref

import ml_dtypes
import numpy as np
import pytest
from commands import check_refused, command, run_in_process
from messages import mentions, refuses
from safetensors.numpy import save_file

import leanformer
from leanformer import stored
from leanformer.errors import WeightsError
from leanformer.watching.weights import find_role


HEADS, HEAD_DIM, WIDTH, HIDDEN = 4, 6, 20, 32  # heads x head dimension > width
TOTAL = HEADS * HEAD_DIM


def draw(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def matrices(kv=HEADS, seed=0):
    """Return W_Q, W_K, W_V, W_O, up and down, as outputs x inputs."""
    shapes = [(TOTAL, WIDTH), *2 * [(kv * HEAD_DIM, WIDTH)], (WIDTH, TOTAL), (HIDDEN, WIDTH), (WIDTH, HIDDEN)]
    return [draw(*shape, seed=seed + i) for i, shape in enumerate(shapes)]


def llama(kv=2):
    names = [f"self_attn.{part}_proj" for part in "qkvo"] + ["mlp.up_proj", "mlp.down_proj"]
    return {f"model.layers.0.{n}.weight": x for n, x in zip(names, matrices(kv), strict=True)}


def timm():
    q, k, v, o, up, down = matrices()
    names = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
    packed = (np.concatenate([q, k, v]), o, up, down)
    return {f"blocks.0.{n}.weight": x for n, x in zip(names, packed, strict=True)}


def gpt2():
    q, k, v, o, up, down = (x.T.copy() for x in square(matrices()))
    packed = np.concatenate([q, k, v], axis=1)
    parts = {"attn.c_attn": packed, "attn.c_proj": o, "mlp.c_fc": up, "mlp.c_proj": down}
    return {f"h.0.{n}.weight": x for n, x in parts.items()}


def square(weights):
    """Return matrices of a model with heads x head dimension equal to its width, here both 24."""
    return [draw(TOTAL, TOTAL, seed=i) for i in range(4)] + [draw(HIDDEN, TOTAL, seed=4), draw(TOTAL, HIDDEN, seed=5)]


def bert():
    names = ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense")
    names += ("intermediate.dense", "output.dense")
    return {f"bert.encoder.layer.0.{n}.weight": x for n, x in zip(names, matrices(), strict=True)}


def neox():
    q, k, v, o, up, down = matrices()
    packed = np.stack([x.reshape(HEADS, HEAD_DIM, WIDTH) for x in (q, k, v)], axis=1).reshape(-1, WIDTH)
    names = ("attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
    return {f"layers.0.{n}.weight": x for n, x in zip(names, (packed, o, up, down), strict=True)}


def deberta():
    q, k, v, o, up, down = matrices()
    packed = np.stack([x.reshape(HEADS, HEAD_DIM, WIDTH) for x in (q, k, v)], axis=1).reshape(-1, WIDTH)
    names = ("attention.self.in_proj", "attention.output.dense", "intermediate.dense", "output.dense")
    return {f"encoder.layer.0.{n}.weight": x for n, x in zip(names, (packed, o, up, down), strict=True)}


FILES = {"llama": (llama, matrices(2)), "timm": (timm, matrices()), "bert": (bert, matrices())}
FILES |= {"gpt2": (gpt2, square(None)), "gpt_neox": (neox, matrices()), "deberta": (deberta, matrices())}


def kappa(x):
    s = np.linalg.svd(np.asarray(x, np.float64), compute_uv=False)
    return s[..., 0] / s[..., s.shape[-1] - 1]


def expected(weights):
    """Return medians by measure, from NumPy in float64; outputs x inputs."""
    q, k, v, o, up, down = (x.astype(np.float64) for x in weights)
    split = [x.reshape(-1, HEAD_DIM, x.shape[1]) for x in (q, k, v)]
    split = [np.repeat(x, HEADS // len(x), axis=0) for x in split]
    out = o.T.reshape(HEADS, HEAD_DIM, -1)
    rank = min(HEAD_DIM, len(out[0, 0]))

    def product(a, b):
        s = np.linalg.svd(a.mT @ b, compute_uv=False)
        return s[:, 0] / s[:, rank - 1]

    return {
        "query_weights": kappa(q),
        "key_weights": kappa(k),
        "value_weights": kappa(v),
        "output_weights": kappa(o),
        "query_weights_per_head": kappa(split[0]),
        "output_weights_per_head": kappa(out),
        "query_key_product": product(split[0], split[1]),
        "value_output_product": product(split[2], out),
        "mlp_up_weights": kappa(up),
        "mlp_down_weights": kappa(down),
    }


@pytest.mark.parametrize("name", FILES)
def test_equals_numpy(tmp_path, name):
    make, weights = FILES[name]
    save_file(make(), tmp_path / "model.safetensors")
    config = {"model_type": name, "num_attention_heads": HEADS, "head_dim": HEAD_DIM}
    (tmp_path / "config.json").write_text(json.dumps(config))
    w = leanformer.watch_weights(tmp_path)
    rows = {row["measure"]: row for row in w.rows if row["head"] is None}
    for measure, values in expected(weights).items():
        np.testing.assert_allclose(rows[measure]["median"], np.median(values), rtol=1e-4, err_msg=measure)
    assert rows["query_weights"]["shape"] == [weights[0].shape[1], TOTAL] and w.unmatched == {}
    assert len([row for row in w.rows if row["measure"] == "query_key_product"]) == 1 + HEADS
    assert {row["status"] for row in w.rows} == {"ok"} and "4 x 6" in w.table()


def test_cross_attention_of_gpt2_has_queries_of_its_own(tmp_path):
    q, k, v, o, *_ = (x.T.copy() for x in square(None))
    parts = {"q_attn": q, "c_attn": np.concatenate([k, v], axis=1), "c_proj": o}
    own = {f"h.0.crossattention.{n}.weight": x for n, x in parts.items()}
    save_file(gpt2() | own | bert(), tmp_path / "model.safetensors")
    w = leanformer.watch_weights(tmp_path, heads=HEADS)
    encoder = w.layers["bert.encoder.layer.0.attention"].total["query_weights_per_head"]  # inputs last, unlike GPT-2's
    np.testing.assert_allclose(encoder.values[0, :, 0], expected(matrices())["query_weights_per_head"], rtol=1e-4)
    layer = w.layers["h.0.crossattention"]
    assert set(layer.names).isdisjoint({"key_weights", "value_weights"}) and "c_attn" in layer.status()
    values = layer.total["query_weights_per_head"].values[0, :, 0]
    np.testing.assert_allclose(values, kappa(q.T.reshape(HEADS, HEAD_DIM, -1)), rtol=1e-4)


def test_unknown_heads_and_everything_else(tmp_path):
    others = {"head.weight": draw(11, WIDTH), "pos_embed": draw(1, 5, WIDTH), "conv.weight": draw(4, 3, 2, 2)}
    save_file(
        timm() | others | {"index": np.zeros((2, 3), np.int64), "norm.weight": draw(4)}, tmp_path / "a.safetensors"
    )
    w = leanformer.watch_weights(tmp_path / "a.safetensors")
    assert not any("per_head" in row["measure"] for row in w.rows) and "heads=" in w.rows[0]["status"]
    assert list(w.unmatched) == ["conv.weight", "index", "pos_embed"] and "I64" in w.unmatched["index"]
    matrix = next(row for row in w.rows if row["measure"] == "matrix")
    assert matrix["layer"] == "head.weight" and matrix["median"] == pytest.approx(
        kappa(others["head.weight"]), rel=1e-5
    )
    given = leanformer.watch_weights(tmp_path / "a.safetensors", heads=HEADS)
    assert given.rows[0]["head_dim"] == HEAD_DIM and any(row["head"] == 3 for row in given.rows)


def test_queries_of_another_dimension_than_values(tmp_path):
    """As in multi-head latent attention, where config.json gives both. Otherwise nothing is cut into wrong heads."""
    q, o = draw(HEADS * 5, WIDTH), draw(WIDTH, HEADS * 10, seed=1)
    save_file({f"layers.0.self_attn.{n}_proj.weight": x for n, x in (("q", q), ("o", o))}, tmp_path / "a.safetensors")
    sizes = {"num_attention_heads": HEADS, "qk_nope_head_dim": 3, "qk_rope_head_dim": 2, "head_dim": 2}
    (tmp_path / "config.json").write_text(json.dumps(sizes | {"v_head_dim": 10}))
    rows = leanformer.watch_weights(tmp_path, measures=("query_weights_per_head", "output_weights_per_head")).rows
    for name, heads in (("query", q.reshape(HEADS, 5, WIDTH)), ("output", o.T.reshape(HEADS, 10, WIDTH))):
        found = [r["median"] for r in rows if r["measure"] == f"{name}_weights_per_head" and r["head"] is not None]
        np.testing.assert_allclose(found, kappa(heads), rtol=1e-4)
    (tmp_path / "config.json").unlink()
    with refuses("heads=4", "layers.0.self_attn.q_proj.weight", 10):
        leanformer.watch_weights(tmp_path / "a.safetensors", heads=HEADS)


def test_sizes_that_do_not_fit(tmp_path):
    save_file(llama(), tmp_path / "a.safetensors")
    with refuses("heads=5", "model.layers.0.self_attn"):
        leanformer.watch_weights(tmp_path / "a.safetensors", heads=5)
    with refuses("kappa"):
        leanformer.watch_weights(tmp_path / "a.safetensors", measures=("kappa",))
    (tmp_path / "config.json").write_text('{"num_attention_heads": 5}')
    assert "config.json" in leanformer.watch_weights(tmp_path / "a.safetensors").rows[-1]["status"]
    (tmp_path / "config.json").unlink()
    save_file({"blocks.layers.attention.query.kernel": draw(2, WIDTH, HEADS, HEAD_DIM)}, tmp_path / "c.safetensors")
    with refuses("--config"):
        leanformer.watch_weights(tmp_path / "c.safetensors")
    save_file(neox(), tmp_path / "b.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "falcon", "num_attention_heads": HEADS}))
    assert "falcon" in leanformer.watch_weights(tmp_path / "b.safetensors").table()


def test_checkpoints(tmp_path):
    """Rows of the last file, with the first as reference; a picture over the files."""
    for step, scale in ((1, 0), (2, 1), (3, 10)):
        weights = llama()
        weights["model.layers.0.self_attn.q_proj.weight"] += scale
        save_file(weights, tmp_path / f"{step}.safetensors")
    w = leanformer.watch_weights([tmp_path / f"{step}.safetensors" for step in (1, 2, 3)], heads=HEADS, kv_heads=2)
    rows = {row["measure"]: row for row in w.rows if row["head"] is None}
    first, *_, last = ({r["measure"]: r["median"] for r in each.rows} for each in w.files.values())
    assert rows["query_weights"]["reference"]["median"] == first["query_weights"] < 0.5 * last["query_weights"]
    assert rows["key_weights"]["reference"]["median"] == rows["key_weights"]["median"]
    assert w.verdict()["change"]["most"]["layer"].startswith("model.layers.0.self_attn, query")
    labels = [text.get_text() for text in w.plot(tmp_path / "a.png").axes[0].get_xticklabels()]
    assert labels == ["1", "2", "3"] and "reference" in w.table()


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_half_precision(tmp_path, dtype):
    """Condition numbers that the type cannot resolve are bounds."""
    u, v = (np.linalg.qr(draw(n, WIDTH))[0] for n in (TOTAL, WIDTH))
    x = {
        f"layers.0.attn.{n}.weight": (u * np.geomspace(1, s, WIDTH) @ v.T)
        for n, s in (("q_proj", 0.25), ("k_proj", 1e-6))
    }
    save_file({name: y.astype(dtype) for name, y in x.items()}, tmp_path / "a.safetensors")
    w = leanformer.watch_weights(tmp_path / "a.safetensors")
    query, key = w.rows
    assert query["median"] == pytest.approx(4, rel=0.1) and query["bounds"] == []
    assert 10 < key["median"] < 1e6 and "median" in key["bounds"] and "≥" in w.table()


def test_shards(tmp_path):
    whole, names = llama(), sorted(llama())
    save_file(whole, tmp_path / "whole.safetensors")
    folder = tmp_path / "sharded"
    folder.mkdir()
    places = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(places.values()):
        save_file({name: whole[name] for name in names if places[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    one, two = leanformer.watch_weights(tmp_path / "whole.safetensors"), leanformer.watch_weights(folder)
    assert {str(row) for row in one.rows} == {str(row) for row in two.rows}
    (folder / file).unlink()
    with refuses(file, error=WeightsError):
        leanformer.watch_weights(folder)


def test_towers_have_heads_of_their_own(tmp_path):
    """As in CLIP, whose text and images differ in heads, and both numbers divide the width."""
    q, k, v, o, *_ = matrices()
    parts = zip(("q_proj", "k_proj", "v_proj", "out_proj"), (q, k, v, o), strict=True)
    weights = {
        f"{tower}_model.encoder.layers.0.self_attn.{n}.weight": x for n, x in parts for tower in ("text", "vision")
    }
    save_file(weights, tmp_path / "model.safetensors")
    towers = {"text_config": {"num_attention_heads": 4}, "vision_config": {"num_attention_heads": 8}}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "clip"} | towers))
    layers = leanformer.watch_weights(tmp_path / "model.safetensors").layers
    assert {name.partition("_")[0]: layer.heads for name, layer in layers.items()} == {"text": 4, "vision": 8}


@pytest.mark.parametrize(("kind", "name"), [("internlm2", "attention.wqkv"), ("codegen", "attn.qkv_proj")])
def test_packed_by_groups_of_heads_is_not_taken_apart(tmp_path, kind, name):
    q, k, v, *_ = matrices()
    save_file({f"layers.0.{name}.weight": np.concatenate([q, k, v])}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "num_attention_heads": HEADS}))
    with refuses("none of its 1 tensors"):
        leanformer.watch_weights(tmp_path / "model.safetensors")


def test_one_matrix_in_memory(tmp_path, monkeypatch):
    """Only names and shapes are read at first; a matrix is read when it is measured, and not kept."""
    live, most, original = [], [], stored.StoredTensor.__call__

    def call(self):
        x = original(self)
        live.append(weakref.ref(x))
        most.append(sum(reference() is not None for reference in live))
        return x

    monkeypatch.setattr(stored.StoredTensor, "__call__", call)
    save_file(llama(), tmp_path / "a.safetensors")
    leanformer.watch_weights(tmp_path / "a.safetensors", heads=HEADS)
    assert most and max(most) <= 2


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("model.layers.3.self_attn.q_proj.weight", ("model.layers.3.self_attn", "query")),
        ("bert.encoder.layer.1.output.dense.weight", ("bert.encoder.layer.1", "down")),
        ("bert.encoder.layer.1.intermediate.dense.weight", ("bert.encoder.layer.1", "up")),
        ("decoder.layers.0.encoder_attn.out_proj.weight", ("decoder.layers.0.encoder_attn", "out")),
        ("layers.0.blocks.1.attn.proj.weight", ("layers.0.blocks.1.attn", "out")),
        ("blocks.2.attn1.to_out.0.weight", ("blocks.2.attn1", "out")),
        ("layers.0.self_attn.in_proj_weight", ("layers.0.self_attn", "packed")),
        ("h.0.mlp.c_proj.weight", ("h.0", "down")),
        ("encoder.block.0.layer.1.DenseReluDense.wo.weight", ("encoder.block.0.layer.1", "down")),
        ("layers.0.mlp.Wo.weight", ("layers.0", "down")),
        ("layers.0.attention.wo.weight", ("layers.0.attention", "out")),
        ("blocks.0.mha.wo.weight", ("blocks.0", "out")),
        ("patch_embed.proj.weight", ("patch_embed.proj.weight", None)),
    ],
)
def test_roles(name, place):
    layer, role = find_role(name)
    assert role == place[1] and (role is None or layer == place[0])


def test_command(tmp_path):
    save_file(llama(), tmp_path / "a.safetensors")
    words = [*command("probe", config=None), f"--weights={tmp_path / 'a.safetensors'}", f"--out={tmp_path / 'out'}"]
    status, out, err = run_in_process([*words, "--num_heads=4", "--kv_heads=2"])
    assert (status, err) == (0, "") and mentions(out, "query_key_product", "model.layers.0.self_attn", "by_layer.png")
    content = json.loads((tmp_path / "out" / "probe.json").read_text())
    assert content["rows"] and (tmp_path / "out" / "by_layer.png").stat().st_size > 10_000
    check_refused([*words, "--num_heads=7"], "heads=7")
    check_refused(command("probe") + ["--num_heads=7"], "--num_heads", "--config")
