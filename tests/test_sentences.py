"""Sentences with a label: GLUE's published files and any table, rows of tokens, metrics, and runs of both kinds."""

import collections
import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
import tokenizers
from commands import inside
from flax import nnx
from tokenizers import models, normalizers, pre_tokenizers

from leanformer import config, evaluate, predict, tasks, train
from leanformer.config.sentences import GLUE
from leanformer.data.sentences import KINDS, glue, open_table
from leanformer.data.sentences.encoded import joined, kept
from leanformer.data.text import corpus
from leanformer.data.text import tokenizer as readers
from leanformer.errors import ConfigError, DataError
from leanformer.tasks import metrics, sentences
from leanformer.training import checks, experiment, report, streams
from leanformer.training import step as steps


WORDS = "the bear saw a bird and sang of it all day long not no good bad".split()  # noqa: SIM905
HEADERS = {  # of the download, as published; None: without one
    "cola": None,
    "sst2": "sentence label",
    "mrpc": "Quality|#1 ID|#2 ID|#1 String|#2 String",
    "qqp": "id qid1 qid2 question1 question2 is_duplicate",
    "stsb": "index genre filename year old_index source1 source2 sentence1 sentence2 score",
    "mnli": "index promptID pairID genre sentence1_binary_parse sentence2_binary_parse sentence1_parse sentence2_parse "
    "sentence1 sentence2 label1 gold_label",
    "qnli": "index question sentence label",
    "rte": "index sentence1 sentence2 label",
}
FOLDERS = ("CoLA", "SST-2", "MRPC", "QQP", "STS-B", "MNLI", "QNLI", "RTE")


def words_of(header):
    return header.split("|" if "|" in header else None)


def write(file, header, rows):
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = [*([header] if header else []), *rows]
    file.write_bytes(b"\n".join("\t".join(map(str, line)).encode() for line in lines) + b"\n")


def row(task, first, second, label):
    """A line of the published file, other columns filled with what must not be read."""
    if task == "cola":
        return ["gj04", label, "*", first]
    names, known = words_of(HEADERS[task]), glue.TASKS[task].columns
    cells = {known.sentence: first, known.sentence2: second, known.label: label}
    return [cells.get(name, "xxx") for name in names]


def sentence(draw):
    return " ".join(draw.choice(WORDS, size=draw.integers(3, 9)))


def labels(task):
    known = glue.TASKS[task].classes
    return list(known) if known else ["0.0", "1.25", "3.600", "5"]


@pytest.fixture
def download(tmp_path):
    """GLUE's folder, every task of a few rows, in which `good` decides."""
    draw, folder = np.random.default_rng(7), tmp_path / "glue"
    for task, name in zip(HEADERS, FOLDERS, strict=True):
        splits = ("train", "dev_matched", "dev_mismatched") if task == "mnli" else ("train", "dev")
        for split in splits:
            rows = [row(task, sentence(draw), sentence(draw), draw.choice(labels(task))) for _ in range(37)]
            header = HEADERS[task] and words_of(HEADERS[task])
            write(folder / name / f"{split}.tsv", header, rows)
    return folder


@pytest.fixture
def wordpiece(tmp_path):
    """A tokenizer.json as BERT's, whose words are few."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    known = {token: i for i, token in enumerate([*special, *WORDS, "##s", "##ing"])}
    made = tokenizers.Tokenizer(models.WordPiece(known, unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    made.add_special_tokens(special)
    file = tmp_path / "words" / "tokenizer.json"
    file.parent.mkdir()
    file.write_text(made.to_str())
    return file


def small(c, download, wordpiece):
    c.update(batch_size=8, total_steps=4, total_epochs=0.0, dtype="float32", log_every=1, loggers=())
    c.data.update(dir=str(download), tokenizer=wordpiece and str(wordpiece), max_length=13)
    c.model.update(vocabulary=23, max_length=16, width=12, depth=1, num_heads=3, head_dim=4, mlp_dim=10, pooler_dim=7)
    c.optim.update(lr=1e-2, warmup_epochs=0.0, warmup_steps=1)
    c.eval.update(batch_size=8, every=2)
    c.checkpoint.update(every=1, keep=3)
    return c


def records(workdir, kind=None):
    found = report.read_records(workdir / "metrics.jsonl")
    kept = [{key: value for key, value in record.items() if key not in report.TIMING} for record in found]
    return [record for record in kept if kind in (None, record["kind"])]


def test_torn_lines_of_qqp_are_left_out_and_told(download):
    """As published some are; a thousandth of them at most, and of no other task any."""
    file, good = download / "QQP" / "train.tsv", row("qqp", "who sang?", "what bear?", 1)
    lines = [words_of(HEADERS["qqp"])] + [good] * 1999
    lines[7], lines[900] = good[:4], [*good, "bear"]
    write(file, None, lines)
    with pytest.warns(UserWarning, match=r"train.tsv: 2 of 2,000 lines have too few .* left out: 8, 901$"):
        rows, _ = open_table("qqp", "train", dir=str(download))
    assert len(rows) == 1997 and {7, 8, 901, 902} & {found.line for found in rows} == {7, 902}
    lines[3] = good[:4]
    write(file, None, lines)
    with pytest.raises(DataError, match="line 4 has 4 columns instead of 6, 2 other lines are wrong too: 8, 901"):
        open_table("qqp", "train", dir=str(download))
    lines[3], lines[900] = row("qqp", "who sang?", "what bear?", 7), good  # another fault is none that may be
    write(file, None, lines)
    with pytest.raises(DataError, match="line 4 has the label '7'"):
        open_table("qqp", "train", dir=str(download))
    file = download / "RTE" / "train.tsv"
    write(file, None, [words_of(HEADERS["rte"]), *([row("rte", "a bear", "a bird", "entailment")] * 1999), ["1"]])
    with pytest.raises(DataError, match="line 2001 has 1 columns instead of 4"):
        open_table("rte", "train", dir=str(download))


@pytest.mark.parametrize("task", GLUE)
def test_published_files(task, download):
    known, wanted = glue.TASKS[task], GLUE[task]
    assert task in KINDS and wanted.dev in known.splits
    assert (len(known.classes) if known.classes else 1) == wanted.outputs
    file = download / known.folder / f"{wanted.dev}.tsv"
    written = [line.split("\t") for line in file.read_text().splitlines()][HEADERS[task] is not None :]
    rows, classes = open_table(task, wanted.dev, dir=str(download), numbers=wanted.outputs == 1)
    assert len(rows) == 37 and rows[0].line == (1 if task == "cola" else 2)
    for found, cells in zip(rows, written, strict=True):
        assert cells == row(task, *found.texts, *[None] * (2 - len(found.texts)), cells[cells_label(task)])
        label = cells[cells_label(task)]
        assert found.label == (labels(task).index(label) if classes else float(label))
    assert len(rows[0].texts) == (1 if task in ("cola", "sst2") else 2)
    same, _ = open_table(task, wanted.dev, dir=str(download / known.folder), numbers=wanted.outputs == 1)
    assert [found.texts for found in same] == [found.texts for found in rows]


def cells_label(task):
    return 1 if task == "cola" else words_of(HEADERS[task]).index(glue.TASKS[task].columns.label)


def test_files_as_their_authors_publish_them(tmp_path):
    """Without headers; quotes are letters, and so are what other readers take for ends of lines."""
    write(
        tmp_path / "cola_in_domain_train.tsv", None, [["gj04", 1, "", 'A "quote'], ["gj04", 0, "*", "Two\u2028lines."]]
    )
    for name, text in (("in_domain_dev", "In."), ("out_of_domain_dev", "Out.")):
        write(tmp_path / f"cola_{name}.tsv", None, [["x", 1, "", text]])
    write(tmp_path / "sst2_train.tsv", None, [["it 's good", 1], ["it 's bad", 0]])
    rows, classes = open_table("cola", "train", dir=str(tmp_path))
    assert [(found.texts, found.label) for found in rows] == [(('A "quote',), 1), (("Two\u2028lines.",), 0)]
    assert classes == ("unacceptable", "acceptable")
    both = open_table("cola", "dev", dir=str(tmp_path))[0]
    assert [found.texts[0] for found in both] == ["In.", "Out."] and both[1].path.name == "cola_out_of_domain_dev.tsv"
    assert [found.texts[0] for found in open_table("cola", "out_of_domain_dev", dir=str(tmp_path))[0]] == ["Out."]
    assert [found.label for found in open_table("sst2", "train", dir=str(tmp_path))[0]] == [1, 0]


GOOD = b"sentence\tlabel\nit is good\t1\nit is bad\t0\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            GOOD + b"short\n",
            r"dev.tsv, line 4 has 1 columns instead of 2. Mend or remove what is wrong: no row is left",
        ),
        (GOOD + b"a\t1\t2\n", "line 4 has 3 columns instead of 2"),
        (GOOD + b"a\t2\n", "line 4 has the label '2', which is none of 0, 1, those of SST-2"),
        (GOOD + b"a\tpositive\n", "line 4 has the label 'positive'"),
        (GOOD + b"  \t1\n", "line 4 has an empty text"),
        (GOOD + b"caf\xe9\t1\n", "line 4 is not UTF-8: a byte 0xe9"),
        (GOOD + b"a\t-1\n", "line 4 has the label -1, which stands for one that is kept secret"),
        (GOOD + b"\na\t1\n\n", r"line 4 has 1 columns instead of 2, and so is wrong line 6\."),
        (GOOD + b"x\n" * 12, r"line 4 .*, 11 other lines are wrong too: 5, 6, 7, 8, 9, 10, 11, 12 \.\.\.\. Mend"),
        (b"sentence\tlabel\n", "holds no row at all"),
        (b"", "line 1 should be a header with sentence, label, and lacks sentence"),
        (
            b"text\tlabel\na\t1\n",
            "line 1 should be a header with sentence, label, and lacks sentence. Found: text, label",
        ),
        (b"index\tsentence\n0\ta\n", "has no labels: those of GLUE's test sets are kept secret"),
    ],
)
def test_a_file_that_is_not_whole_is_not_used(content, message, tmp_path):
    (tmp_path / "dev.tsv").write_bytes(content)
    with pytest.raises(DataError, match=message):
        open_table("sst2", "dev", dir=str(tmp_path))


def test_what_else_is_refused(tmp_path, download):
    (tmp_path / "test.tsv").write_bytes(b"index\tsentence\n0\ta\n")
    with pytest.raises(
        DataError, match="test.tsv has no labels: those of GLUE's test sets are kept secret, so nothing"
    ):
        open_table("cola", "test", dir=str(tmp_path))
    for word in ("5.5", "-0.5", "nan", "good", "inf"):
        write(tmp_path / "dev.tsv", words_of(HEADERS["stsb"]), [row("stsb", "a", "b", word)])
        with pytest.raises(DataError, match=f"line 2 has the score '{word}', which is no number from 0 to 5"):
            open_table("stsb", "dev", dir=str(tmp_path), numbers=True)
    with pytest.raises(DataError, match='data.name="stsb" has numbers for labels: set model.num_classes=1'):
        open_table("stsb", "dev", dir=str(download))
    with pytest.raises(DataError, match='data.name="rte" has classes for labels'):
        open_table("rte", "dev", dir=str(download), numbers=True)
    with pytest.raises(
        DataError, match=r'The split "test" of RTE is not there: looked for .*RTE/test.tsv.*train, dev\.'
    ):
        open_table("rte", "test", dir=str(download))
    with pytest.raises(DataError, match="say where GLUE's files are, --config.data.dir"):
        open_table("rte", "dev")
    with pytest.raises(ConfigError, match="is not known: choose one of\n  cola, GLUE's CoLA"):
        open_table("glue", "dev")
    with pytest.raises(DataError, match=r"There is no .*/x.tsv: a split is a file. Found there: dev.tsv, test.tsv"):
        open_table(f"tsv:{tmp_path}", "x")


def test_any_table(tmp_path):
    write(tmp_path / "train.tsv", ["label", "id", "sentence"], [["no", 1, "a"], ["yes", 2, "b"], ["maybe", 3, "c"]])
    write(tmp_path / "dev.tsv", ["sentence", "sentence2", "label"], [["a", "b", "yes"]])
    rows, classes = open_table(f"tsv:{tmp_path}", "train")
    assert classes == ("maybe", "no", "yes") and [found.label for found in rows] == [1, 2, 0]
    (pair,), _ = open_table(f"tsv:{tmp_path}", "dev", classes=classes)
    assert pair.texts == ("a", "b") and pair.label == 2
    with pytest.raises(DataError, match="dev.tsv has the classes 1 .yes.: there is nothing to choose"):
        open_table(f"tsv:{tmp_path}", "dev")
    with pytest.raises(DataError, match="line 2 has the label 'yes', which is none of no, never, those of training"):
        open_table(f"tsv:{tmp_path}", "dev", classes=("no", "never"))
    write(tmp_path / "dev.tsv", ["sentence", "label"], [["a", "-7.5"], ["b", "2e3"]])
    assert [found.label for found in open_table(f"tsv:{tmp_path}", "dev", numbers=True)[0]] == [-7.5, 2000]
    (tmp_path / "classes.txt").write_text("yes\nno\nmaybe\n")
    assert open_table(f"tsv:{tmp_path}", "train")[1] == ("yes", "no", "maybe")


@pytest.mark.parametrize("room", range(8))
def test_the_longer_one_is_cut(room):
    for first, second in itertools.product(range(7), range(7)):
        a, b = first, second
        while a + b > room:  # one token at a time
            a, b = (a - 1, b) if a > b else (a, b - 1)
        assert kept(first, second, room) == (a, b)


def test_rows_are_what_the_library_makes(wordpiece):
    """The tokenizers library's own template, types, longest-first truncation and padding."""
    text, reader = wordpiece.read_text(), readers.read(wordpiece)
    library = tokenizers.Tokenizer.from_str(text)
    marks = tuple(library.token_to_id(token) for token in ("[CLS]", "[SEP]", "[PAD]"))
    assert marks[0] != marks[1] != marks[2] == 0
    library.post_processor = tokenizers.processors.BertProcessing(("[SEP]", marks[1]), ("[CLS]", marks[0]))
    draw = np.random.default_rng(3)
    library.enable_padding(length=17, pad_id=marks[2])
    library.enable_truncation(17, strategy="longest_first")
    for pair in (False, True):
        for _ in range(60):
            texts = [" ".join(draw.choice(WORDS, size=draw.integers(1, 25))) for _ in range(1 + pair)]
            example = dict(zip(("tokens", "tokens2"), reader.encode(texts), strict=False))
            found, encoded = joined(example, marks, 17), library.encode(*texts)
            if pair and len(example["tokens"]) == len(example["tokens2"]):
                continue  # of equals the library cuts the first
            assert found["lengths"] == sum(encoded.attention_mask)
            np.testing.assert_array_equal(found["types"], encoded.type_ids)
            if not pair or sum(encoded.attention_mask) < 17:
                np.testing.assert_array_equal(found["tokens"], encoded.ids)


def drawn(draw, classes, size):
    """Labels and what is told of them, as a matrix of counts too."""
    labels, told = draw.integers(0, classes, size), draw.integers(0, classes, size)
    told = np.where(draw.random(size) < 0.5, labels, told)
    counts = np.zeros((classes, classes), np.int64)
    np.add.at(counts, (labels, told), 1)
    return labels, told, counts


@pytest.mark.parametrize("classes", [2, 3, 5])
def test_metrics_of_counts(classes, rng):
    """Against their definitions over examples: Matthews is the correlation of indicator vectors."""
    for size in (11, 101):
        labels, told, counts = drawn(rng, classes, size)
        assert metrics.accuracy(counts) == pytest.approx(np.mean(labels == told), rel=1e-12)
        x, y = (np.eye(classes)[values] - np.eye(classes)[values].mean(axis=0) for values in (labels, told))
        expected = (x * y).sum() / np.sqrt((x * x).sum() * (y * y).sum())
        assert metrics.matthews(counts) == pytest.approx(expected, rel=1e-12)
        if classes == 2:
            precision, recall = np.mean(labels[told == 1]), np.mean(told[labels == 1])
            assert metrics.f1(counts) == pytest.approx(2 * precision * recall / (precision + recall), rel=1e-12)
            assert metrics.matthews(counts) == pytest.approx(np.corrcoef(labels, told)[0, 1], rel=1e-12)


def test_metrics_of_constants():
    always, never, one = np.array([[0, 3], [0, 5]]), np.array([[3, 0], [5, 0]]), np.array([[0, 0], [2, 5]])
    assert [metrics.matthews(counts) for counts in (always, never, one)] == [0, 0, 0]
    assert metrics.f1(always) == pytest.approx(10 / 13) and metrics.f1(never) == 0
    assert metrics.f1(np.array([[4, 0], [0, 0]])) == 0
    assert metrics.matthews(np.diag([4, 5])) == 1 and metrics.matthews(np.array([[0, 4], [5, 0]])) == -1
    huge = np.array([[3, 1], [1, 2]]) * 10**12
    assert metrics.matthews(huge) == pytest.approx(metrics.matthews(huge // 10**12), rel=1e-15)
    constant, other = np.ones(7, np.float32), np.arange(7.0)
    assert metrics.pearson(constant, other) is metrics.spearman(other, constant) is None
    assert np.isnan(metrics.pearson(np.array([np.nan, 1, 2]), other[:3]))
    assert np.isnan(metrics.spearman(np.array([np.inf, 1, 2]), other[:3]))


def test_correlations(rng):
    for ties in (False, True):
        a = rng.normal(size=53).astype(np.float32)
        b = (a + rng.normal(size=53)).astype(np.float32)
        a, b = (a.round(0), b.round(0)) if ties else (a, b)
        assert metrics.pearson(a, b) == pytest.approx(scipy.stats.pearsonr(a.astype(float), b).statistic, rel=1e-9)
        assert metrics.spearman(a, b) == pytest.approx(scipy.stats.spearmanr(a, b).statistic, rel=1e-12)
        assert metrics.spearman(a, b) != pytest.approx(metrics.pearson(a, b), rel=1e-3)
    assert metrics.pearson(1e6 + a, b) == pytest.approx(metrics.pearson(a, b), rel=1e-3)


def test_a_run_of_numbers_is_killed_and_goes_on(download, wordpiece, tmp_path, monkeypatch, capsys, keeping):
    c = small(config.glue("stsb"), download, wordpiece)
    checks.check(c)
    assert train.train(c, tmp_path / "whole") == 0
    assert "13 tokens each at most, of a vocabulary of 23; pearson" in capsys.readouterr().out
    put, left = streams.put, iter(range(3))

    def cut(run, host):
        if next(left, None) is None:
            raise RuntimeError("power cut")
        return put(run, host)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="power cut"):
        patch.setattr(streams, "put", cut)
        train.train(c, tmp_path / "killed")
    assert train.train(c, tmp_path / "killed") == 0
    assert records(tmp_path / "whole") == records(tmp_path / "killed")
    summary = json.loads((tmp_path / "whole" / "summary.json").read_text())
    last = records(tmp_path / "whole", "eval")[-1]
    assert summary["score"] == {"score": last["pearson"], "of": "pearson", "higher": True} and last["examples"] == 37
    (tmp_path / "a.txt").write_text("the bear sang\tno bird sang")
    assert predict.main([f"--workdir={tmp_path / 'whole'}", str(tmp_path / "a.txt")]) == 2
    assert "tells a number of each pair and has no classes" in capsys.readouterr().err


@pytest.mark.parametrize("task", ["mnli", "stsb"])
def test_one_device_and_eight(task, download, wordpiece, meshes):
    """Training and all metrics, whatever the mesh, the batch of evaluation and its padding."""
    c, found = small(config.glue(task), download, wordpiece), []
    for mesh, size in ((meshes(1, 1), 37), (meshes(4, 2), 16)):
        c.eval.batch_size = size
        run = experiment.build(c, examples=37, mesh=mesh)
        source, held_out = run.task.open("train"), run.task.open(c.data.eval_split)
        step, state, key = jax.jit(run.train_step), run.initial_state(), run.run_key()
        state = dataclasses.replace(state, params=jax.tree.map(lambda x: 6 * x, state.params))  # or all are told alike
        batches = streams.train_batches(run, source)
        state, told = step(state, streams.put(run, batches[0]), key)
        split = streams.evaluation(run, held_out)
        values = steps.evaluate(jax.jit(run.eval_step), run.task.metrics, {"": state.weights}, split)
        found.append([float(told["last_loss"]), float(told["grad_norm"]), *map(float, values.values())])
    np.testing.assert_allclose(found[1], found[0], rtol=2e-5)
    assert values["examples"] == 37 and values.get("spread", 1) > 1e-3


def test_metrics_are_those_of_all_examples(download, wordpiece, meshes):
    """By definition, from the logits of rows that are padded further."""
    c = small(config.glue("rte"), download, wordpiece)
    run = experiment.build(c, examples=37, mesh=meshes(1, 1))
    source, weights = run.task.open("dev"), run.initial_state().weights
    rows = [run.task.prepare(source[i]) for i in range(len(source))]
    tokens, lengths = (np.stack([row[name] for row in rows]) for name in ("tokens", "lengths"))
    assert len({*lengths.tolist()}) > 3
    longer = jnp.asarray(np.pad(tokens, ((0, 0), (0, 3)), constant_values=9))
    logits = np.asarray(nnx.merge(run.graphdef, *weights)(longer, jnp.asarray(lengths))[0], np.float64)
    labels, told = np.array([source[i]["label"] for i in range(len(source))]), logits.argmax(axis=1)
    loss = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(37), labels]
    values = steps.evaluate(jax.jit(run.eval_step), run.task.metrics, {"": weights}, streams.evaluation(run, source))
    assert values["loss"] == pytest.approx(loss.mean(), rel=1e-5) and values["examples"] == 37
    assert values["accuracy"] == pytest.approx(np.mean(told == labels))
    assert values["matthews"] == pytest.approx(np.corrcoef(told, labels)[0, 1] if np.ptp(told) else 0, abs=1e-9)


def test_a_constant_is_told(download, wordpiece):
    task = tasks.of(small(config.glue("stsb"), download, wordpiece))
    totals = {"loss": 8.0, "examples": 4, "each": {"found": np.full(4, 2.5, np.float32), "wanted": np.arange(4.0)}}
    with pytest.warns(UserWarning, match="The model tells the same of all rows: there is no correlation"):
        found = task.metrics(totals)
    assert found == {"loss": 2.0, "pearson": 0.0, "spearman": 0.0, "spread": 0.0}
    totals["each"]["found"] = np.array([1, np.nan, 2, 3], np.float32)
    assert np.isnan(task.metrics(totals)["pearson"])


def test_a_run_and_one_from_its_weights(download, wordpiece, tmp_path, capsys, keeping):
    """Evaluated and asked by the ordinary commands; its tokenizer without being named, a new head, nothing that differs
    in silence."""
    first = small(config.glue("mrpc"), download, wordpiece)
    first.model.types, first.total_steps = 2, 2
    assert train.train(first, tmp_path / "first") == 0
    last = records(tmp_path / "first", "eval")[-1]
    assert evaluate.main([f"--workdir={tmp_path / 'first'}"]) == 0
    again = json.loads((tmp_path / "first" / "evaluation.json").read_text())
    assert again["f1"] == pytest.approx(last["f1"], rel=1e-6)
    assert set(again["accuracy"]) == {"equivalent", "not_equivalent"}
    (tmp_path / "a.txt").write_text("the bear sang\tno bird sang")
    (tmp_path / "bad.txt").write_text("a\tb\tc")
    capsys.readouterr()
    assert predict.main([f"--workdir={tmp_path / 'first'}", str(tmp_path / "a.txt"), str(tmp_path / "bad.txt")]) == 2
    out, err = capsys.readouterr()
    answer = json.loads(out.splitlines()[0])["classes"]
    assert sum(found["probability"] for found in answer) == pytest.approx(1, abs=1e-5)
    assert "or two with a tab between them" in err

    c = small(config.glue("mnli"), download, None)
    c.model.types, c.total_steps = 2, 2
    c.init_from.update(path=str(tmp_path / "first"), new_head=True)
    assert train.train(c, tmp_path / "second") == 0
    own = [(tmp_path / name / "tokenizer.json").read_text() for name in ("first", "second")]
    assert own[0] == own[1] == readers.read(wordpiece).json()
    assert {record["kind"] for record in records(tmp_path / "second")} == {"train", "eval", "eval mm"}
    (tmp_path / "first").rename(tmp_path / "moved")  # the run has a tokenizer of its own
    assert predict.main([f"--workdir={tmp_path / 'second'}", str(tmp_path / "a.txt")]) == 0
    (tmp_path / "moved").rename(tmp_path / "first")
    run = experiment.build(c, examples=37, mesh=experiment.meshes.make_mesh(devices=jax.devices()[:1]))
    before, begun = run.random_weights(0)[0], run.first_weights()[0]
    assert not np.array_equal(before["embed"], begun["embed"])
    np.testing.assert_array_equal(before["head"]["kernel"], begun["head"]["kernel"])

    c.model.update(num_heads=2, head_dim=6, activation="relu")
    with pytest.raises(
        ConfigError,
        match=r"another model than model.activation=relu, .* Set --config.model.activation=gelu --",
    ):
        checks.check(c)
    c = small(config.glue("mnli"), download, tmp_path / "other.json")
    c.model.types = 2
    c.init_from.update(path=str(tmp_path / "first"), new_head=True)
    (tmp_path / "other.json").write_text(wordpiece.read_text().replace('"##ing"', '"##ed"'))
    with pytest.raises(
        DataError, match="other.json., of 23 tokens, is not the tokenizer of init_from.path=.*/first, of"
    ):
        train.train(c, tmp_path / "third")


def test_what_a_config_cannot_ask(download, wordpiece, capsys):
    def fails(message, task="sst2", error=ConfigError, **changes):
        c = small(config.glue(task), download, wordpiece)
        for key, value in changes.items():
            section, _, name = key.rpartition("__")
            (c[section] if section else c)[name] = value
        with pytest.raises(error, match=message):
            checks.check(c)
            tasks.of(c).open("dev")

    fails('score="pearson" is none of model.num_classes=2: choose one of accuracy, f1, matthews', score="pearson")
    fails('score="f1" is none of model.num_classes=3', "mnli", score="f1")
    fails("data.max_length=17 tokens are a row, and the model has positions for model.max_", data__max_length=17)
    fails('data.name="sst2" wants model.num_classes=2, found 3', model__num_classes=3)
    fails(
        "has 23 tokens, and model.vocabulary=20. Set --config.model.vocabulary=23",
        error=DataError,
        model__vocabulary=20,
    )
    fails("data.tokenizer is unset, and init_from.path names no run", error=DataError, data__tokenizer=None)
    fails("There is no tokenizer", error=DataError, data__tokenizer="nowhere")
    with pytest.raises(ConfigError, match="task=wnli: GLUE's tasks are cola, sst2"):
        config.glue("wnli")
    status, _, err = inside(["", "", "leanformer.train", "--config=glue:task=x", f"--workdir={download.parent / 'x'}"])
    assert status == 2 and "GLUE's tasks are" in err


def test_a_tokenizer_without_marks(download, wordpiece, tmp_path):
    (tmp_path / "bytes.json").write_text(readers.of_bytes().json())
    c = small(config.glue("sst2"), download, tmp_path / "bytes.json")
    with pytest.raises(DataError, match=r"The tokenizer has no \[CLS\] and no \[SEP\], which stand before"):
        tasks.of(c).open("dev")


def test_a_tokenizer_trained_on_the_table(download, wordpiece, tmp_path, monkeypatch):
    """Of both texts of the training split, made once, and again where a text is another."""
    monkeypatch.setattr(corpus, "CACHE", str(tmp_path / "cache"))
    c = small(config.glue("rte"), download, None)
    c.data.tokenizer, c.model.vocabulary = "wordpiece:45", 45
    first = tasks.of(c).open("train")
    assert first.vocabulary == 45 and tasks.of(c).open("dev").tokenizer.json() == first.tokenizer.json()
    assert len([*(tmp_path / "cache").iterdir()]) == 1
    row = first[3]
    assert first.tokenizer.decode(row["tokens2"]) == open_table("rte", "train", dir=str(download))[0][3].texts[1]
    write(download / "RTE" / "train.tsv", HEADERS["rte"].split(), [row_of("a zebra sang all day")] * 9)
    c.data.tokenizer = "wordpiece:30"
    assert tasks.of(c).open("train").tokenizer.number("##r") is not None
    assert len([*(tmp_path / "cache").iterdir()]) == 2


def row_of(text):
    return row("rte", text, text, "entailment")


def test_labels_are_spread_over_examples(download, wordpiece):
    """Order and labels survive the way into batches."""
    task = tasks.of(small(config.glue("qnli"), download, wordpiece))
    source = task.open("dev")
    batches = task.eval_batches(source, batch_size=8)
    told = np.concatenate([batches[i]["label"][batches[i]["mask"]] for i in range(len(batches))])
    rows, _ = open_table("qnli", "dev", dir=str(download))
    assert told.tolist() == [found.label for found in rows] and len(collections.Counter(told.tolist())) == 2
    assert source.name(3) == f"{download}/QNLI/dev.tsv, line 5"
    assert isinstance(task, sentences.Classified) and isinstance(task, tasks.Task)
