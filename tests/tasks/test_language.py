"""Language modelling: loss and metrics by definition, generation, and the tokenizer saved with a run."""

import contextlib
import io
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from messages import mentions, refuses
from random_weights import fill_weights

from leanformer import config, generate, models, tasks, train
from leanformer.data.text.tokenizer import byte_tokenizer
from leanformer.errors import ConfigError, DataError
from leanformer.runtime import mesh
from leanformer.runtime.mesh import make_mesh
from leanformer.tasks import generation
from leanformer.tasks.generation import NOTHING, Sampling
from leanformer.training import inference, run_files, train_setup


WORDS = "the bear saw a bird and the bird saw a bear so they sang of it all day long Élan".split()  # noqa: SIM905
TWO_PROMPTS = ["the bear", "a bird and the bird sang"]  # data


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder of sentences of few words, in which tokenizers are trained once."""
    draw = np.random.default_rng(5)
    folder = tmp_path_factory.mktemp("texts")
    for split, number in (("train", 60), ("test", 11)):
        lines = [" ".join(draw.choice(WORDS, size=draw.integers(3, 30))) + "." for _ in range(number)]
        (folder / f"{split}.txt").write_text("|".join(lines))
    return folder


def make_config(folder):
    c = config.language()
    c.update(batch_size=8, total_steps=2, dtype="float32", log_every=2, logits_at_once=8 * 269, loggers=())
    c.model.update(vocabulary=270, max_length=24, width=12, depth=2, num_heads=3, head_dim=4, mlp_dim=20, dropout=0.1)
    cache = str(folder.with_name(f"{folder.name}-cache"))
    c.data.update(name=f"text:{folder}", tokenizer="bpe:269", separator="|", dir=cache, workers=0)
    c.model.attention_dropout = 0.2
    c.optim.update(lr=1e-2, schedule="cosine")
    c.eval.update(every=2, batch_size=8)
    c.checkpoint.every = 2
    c.probe.update(every=2, examples=8)
    return c


@pytest.fixture
def texts(folder):
    return make_config(folder)


@pytest.fixture(scope="module")
def finished_run(folder, tmp_path_factory):
    """Train for two steps on one device; return the folder of the run and what was printed."""
    workdir, out = tmp_path_factory.mktemp("run"), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.setattr(mesh, "make_mesh", lambda **_: make_mesh(devices=jax.devices()[:1]))
        assert train.train(make_config(folder), workdir) == 0
    return workdir, out.getvalue()


@pytest.fixture(scope="module")
def loaded_model(finished_run):
    return inference.load(finished_run[0])


def test_run_records_its_metrics(finished_run):
    workdir, out = finished_run
    assert mentions(out, "max_length 24", 270)
    records = {record["kind"]: record for record in run_files.read_records(workdir)}
    assert 0 < records["eval"]["bits_per_byte"] < records["eval"]["loss"] / math.log(2) < 1.1 * math.log2(270)
    assert "attention_entropy" in records["probe"]
    assert records["train"]["tokens_seen"] == 24 * records["train"]["examples_seen"]
    assert json.loads((workdir / "summary.json").read_text())["score"]["of"] == "loss"


def test_output_of_the_generate_command(finished_run, loaded_model, tmp_path, monkeypatch, capsys):
    """The output is determined by the flags: seed, number of tokens, sampling and prompts."""
    workdir, _ = finished_run

    def run_generate(*flags):
        assert generate.main([f"--workdir={workdir}", *flags]) == 0
        return capsys.readouterr().out

    first = run_generate("--prompt=the bear", "--tokens=9", "--seed=3")
    assert first.startswith("the bear")
    monkeypatch.setattr(inference, "load", lambda *_, **__: loaded_model)  # skips loading the model again
    assert first == run_generate("--prompt=the bear", "--tokens=9", "--seed=3")
    assert first != run_generate("--prompt=the bear", "--tokens=9")
    greedy = run_generate("--prompt=the bear", "--tokens=9", "--temperature=0")
    assert greedy == run_generate("--prompt=the bear", "--tokens=9", "--temperature=0", "--seed=3") != first
    assert f"the bear{loaded_model.generate('the bear', 9, temperature=0.0)}\n" == greedy
    assert f"the bear{loaded_model.generate('the bear', 9, seed=3)}\n" == first
    with refuses("model.max_length=24"):
        loaded_model.generate("bear " * 30)
    with refuses("task", "language"):
        loaded_model.predict(b"the bear")
    (tmp_path / "prompts.txt").write_text("\n\n".join([*TWO_PROMPTS, ""]))
    flags = [f"--prompts={tmp_path / 'prompts.txt'}", "--tokens=9", "--temperature=0"]
    printed = run_generate(*flags)
    lines = [json.loads(line) for line in printed.splitlines()]
    assert [line["prompt"] for line in lines] == TWO_PROMPTS and "the bear" + lines[0]["text"] + "\n" == greedy
    assert mentions(run_generate(*flags, f"--out={tmp_path / 'out.jsonl'}"), tmp_path / "out.jsonl", 2)
    assert (tmp_path / "out.jsonl").read_text() == printed


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ([], ("--prompt", "--prompts")),
        (["--prompts=/dev/null"], ("--prompts=/dev/null", "prompt")),
        (["--prompt=a", "--temperature=-1"], ("--temperature=-1.0",)),
        (["--prompt=a", "--seed=9999999999999999999999"], ("--seed=9999999999999999999999", 2147483647)),
        (["--prompt=a", "--top_p=0"], ("--top_p=0.0",)),
        (["--prompt=a", "--out=x"], ("--out", "--prompts")),
    ],
    ids=ascii,
)
def test_flags_of_generate_are_checked(flags, parts, tmp_path, capsys):
    assert generate.main([f"--workdir={tmp_path}", *flags]) == 2
    assert mentions(capsys.readouterr().err, *parts)


def test_language_model_is_probed_on_texts(loaded_model, tmp_path):
    """A text fills a row, which begins with the token before a document."""
    text = "the bear saw a bird and sang of it " * 9
    (tmp_path / "a.txt").write_text(text)
    (tokens,) = loaded_model.preprocess(text.encode())
    tokenizer = loaded_model.tokenizer
    np.testing.assert_array_equal(tokens[0], [tokenizer.end, *tokenizer.encode([text])[0][:23]])
    result = loaded_model.probe([text.encode(), tmp_path / "a.txt"], "tokens")
    assert [layer["count"] for layer in result["tokens"]] == [2, 2]
    for example, parts in ((b"bear", ("model.max_length=24",)), ("bear", ("bear", ".encode()")), (b"\xff", ("0xff",))):
        with refuses(*parts, error=DataError) as error:
            loaded_model.probe(example)
        assert "PIL" not in str(error.value)


def test_available_tokens_of_each_prompt():
    prompts = {f"a.txt, line {line}": np.zeros(length, np.int32) for line, length in ((1, 3), (4, 20))}
    assert [generation.tokens_available(prompts, 24, tokens) for tokens in (None, 4, 1)] == [[21, 4], [4, 4], [1, 1]]
    with refuses("a.txt, line 4", 20, "model.max_length=24", "--tokens=4"):
        generation.tokens_available(prompts, 24, 5)


def test_run_saves_and_enforces_its_tokenizer(finished_run, texts, tmp_path):
    workdir, _ = finished_run
    texts.data.tokenizer, texts.total_steps = "bpe:268", 6
    with refuses(workdir / "tokenizer.json", 269, 268, "--config.data.tokenizer", error=DataError):
        train.train(texts, workdir)
    texts.data.tokenizer = str(workdir / "tokenizer.json")
    source = tasks.build_task(texts).data.open("train")
    run_files.check_tokenizer(workdir, source.tokenizer)
    assert run_files.load_tokenizer(workdir).json() == source.tokenizer.json()
    with refuses(tmp_path, "tokenizer.json", error=DataError):
        run_files.load_tokenizer(tmp_path)


def test_weights_of_a_run_with_another_tokenizer_are_refused(finished_run, texts, tmp_path):
    """One with as many tokens too: every token would mean something else."""
    workdir, _ = finished_run
    folder = tmp_path / "other"
    folder.mkdir()
    for split in ("train", "test"):
        (folder / f"{split}.txt").write_text("|".join(["zebras quarrel with jackdaws"] * 40))
    texts.data.update(name=f"text:{folder}", dir=str(tmp_path / "cache"), tokenizer="bpe:269")
    texts.init_from.path = str(workdir)
    with refuses("data.tokenizer", f"--config.data.tokenizer={workdir}", error=DataError):
        train.train(texts, tmp_path / "new")
    texts.data.tokenizer = str(workdir)
    tokenizer = tasks.build_task(texts).data.open("train").tokenizer
    train_setup.set_up_training(texts, examples=None).model.check_source(tokenizer, None)  # accepts it


GREEDY = pytest.param(Sampling(0.0), marks=pytest.mark.slow)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(0.7, top_k=7, top_p=0.9)], ids=["greedy", "sampled"])
def test_cached_generation_equals_uncached(sampling, rng):
    """Prompts of different lengths are continued in one batch; every row stops independently."""
    sizes = {"vocabulary": 13, "max_length": 16, "width": 12, "depth": 2, "num_heads": 3, "head_dim": 4, "mlp_dim": 20}
    # A seed whose tokens do not repeat.
    model = fill_weights(lambda: models.build("gpt", **sizes, rngs=nnx.Rngs(0)), seed=4)
    key, prompts = jax.random.key(8), [rng.integers(13, size=n) for n in (2, 5, 3)]

    @jax.jit
    def choose_next(tokens, place, row):
        """Return the token at `place` given all earlier ones, without a cache; the model cannot see later ones."""
        row_key = jax.random.fold_in(jax.random.fold_in(key, row), place)
        return generation.choose(model(tokens)[0][:, place - 1], row_key[None], sampling)[0]

    def generate_uncached(row):
        tokens = np.zeros((1, 16), np.int32)
        start = len(prompts[row])
        tokens[0, :start] = prompts[row]
        for place in range(start, start + 9):
            tokens[0, place] = choose_next(tokens, place, row)
        return tokens[0, start : start + 9].tolist()

    unstopped = [generate_uncached(row) for row in range(3)]
    assert len({*map(tuple, unstopped)}) == 3
    end = unstopped[1][1]
    expected = [tokens[: tokens.index(end) + 1] if end in tokens else tokens for tokens in unstopped]
    rows = np.stack([*generation.generate(model, prompts, 9, end=end, key=key, how=sampling)], axis=1)
    assert [row[row != NOTHING].tolist() for row in rows] == expected and len(expected[1]) < 9


def test_rows_of_a_batch_have_limits_of_their_own(rng):
    """Each row has the tokens that it has alone, also beside a longer prompt."""
    sizes = {"vocabulary": 13, "max_length": 16, "width": 12, "depth": 2, "num_heads": 3, "head_dim": 4, "mlp_dim": 20}
    model = fill_weights(lambda: models.build("gpt", **sizes, rngs=nnx.Rngs(0)), seed=4)
    prompts = [rng.integers(13, size=length).astype(np.int32) for length in (2, 11)]
    options = {"end": None, "key": jax.random.key(1), "how": Sampling(0.0)}
    rows = np.stack([*generation.generate(model, prompts, [14, 5], **options)], axis=1)
    for row, prompt, number in zip(rows, prompts, (14, 5), strict=True):
        alone = np.concatenate([*generation.generate(model, [prompt], number, **options)])
        assert len(alone) == number
        np.testing.assert_array_equal(row[row != NOTHING], alone)


LATENT = pytest.param({"attention": "latent", "kv_rank": 4, "num_kv_heads": None}, marks=pytest.mark.slow)


@pytest.mark.parametrize("attention", [{}, LATENT], ids=["softmax", "latent"])
def test_generation_with_the_fused_kernel_of_training(attention):
    """cuDNN takes no cache, so a model that is trained with it generates with XLA's attention."""
    sizes = {"vocabulary": 13, "max_length": 16, "width": 16, "depth": 2, "num_heads": 2, "head_dim": 8, "mlp_dim": 20}
    columns = []
    for backend in ("xla", "cudnn"):
        options = sizes | attention | {"backend": backend, "dtype": jnp.bfloat16}
        model = fill_weights(lambda options=options: models.build("gpt", **options, rngs=nnx.Rngs(0)), seed=4)
        prompts = [np.arange(n) for n in (2, 5, 3)]
        how = Sampling(0.0)
        columns.append(np.stack([*generation.generate(model, prompts, 9, end=None, key=jax.random.key(8), how=how)]))
    np.testing.assert_array_equal(*columns)


def test_tokens_are_sampled_by_probability():
    number, shares = 4000, np.array([0.5, 0.05, 0.25, 0.2])
    keys, logits = jax.random.split(jax.random.key(1), number), jnp.tile(jnp.log(shares), (number, 1))
    for sampling, expected in [
        (Sampling(), shares),
        (Sampling(top_k=2), [2 / 3, 0, 1 / 3, 0]),
        (Sampling(top_p=0.8), [0.5 / 0.95, 0, 0.25 / 0.95, 0.2 / 0.95]),
        (Sampling(top_p=0.75 - 1e-6), [2 / 3, 0, 1 / 3, 0]),
        (Sampling(top_p=0.75), [2 / 3, 0, 1 / 3, 0]),
        (Sampling(0.5), np.square(shares) / np.square(shares).sum()),
        (Sampling(0.0), [1, 0, 0, 0]),
        (Sampling(generation.MIN_TEMPERATURE), [1, 0, 0, 0]),
        (Sampling(top_k=1), [1, 0, 0, 0]),
        (Sampling(top_p=1e-9), [1, 0, 0, 0]),
    ]:
        frequencies = np.bincount(generation.choose(logits, keys, sampling), minlength=4) / number
        np.testing.assert_allclose(frequencies, expected, atol=0.03)  # four standard errors
        np.testing.assert_array_equal(frequencies[np.equal(expected, 0)], 0)


def test_streamed_text_has_whole_characters():
    tokenizer = byte_tokenizer()
    (tokens,) = tokenizer.encode(["äß漢!"])
    assert [*generate.stream_text(tokenizer, tokens.tolist())] == ["ä", "ß", "漢", "!", ""]
    assert "".join(generate.stream_text(tokenizer, tokens[:6].tolist())).startswith("äß")


@pytest.mark.parametrize(
    ("changes", "error", "parts"),
    [
        ({"model.vocabulary": 200}, DataError, (269, "model.vocabulary=200", "--config.model.vocabulary=269")),
        ({"data.name": "folder:texts"}, ConfigError, ("folder:texts", "text:<folder>", "bundled:austen")),
    ],
    ids=str,
)
def test_invalid_configs_are_refused(texts, changes, error, parts):
    texts.update_from_flattened_dict(changes)
    with refuses(*parts, error=error):
        train_setup.check(texts)
        tasks.build_task(texts).data.open("train")
