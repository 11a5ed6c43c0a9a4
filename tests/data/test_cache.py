"""Image caches: which images are shrunk, order of examples, damaged caches, and resuming after an interruption."""

import contextlib
import io
import json
import pickle

import numpy as np
import pytest
from messages import mentions, refuses
from PIL import Image

from leanformer import config, prepare, tasks
from leanformer.data import open_images
from leanformer.data.images import cache
from leanformer.data.images.decoding import CorruptImage, decode_whole
from leanformer.errors import DataError


SIDE = 24
SIZES = [(40, 60), (60, 40), (24, 50), (20, 90), (25, 25), (48, 48), (31, 77)]  # width, height
CACHE_OPTIONS = {"short_side": SIDE, "channels": 3, "processes": 0, "report": lambda _: None}
OPEN_OPTIONS = {"image_size": 16, "channels": 3, "num_classes": 2}


@pytest.fixture
def root(tmp_path, rng, monkeypatch):
    """Return a folder of images, smooth enough for JPEG, one of them broken; set cache shards of three images."""
    monkeypatch.setattr(cache, "SHARD", 3)
    for split in ("train", "val"):
        for label in ("cat", "dog"):
            (tmp_path / split / label).mkdir(parents=True)
        for i, (width, height) in enumerate(SIZES):
            coarse = Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8))
            coarse.resize((width, height), Image.Resampling.BICUBIC).save(
                tmp_path / split / ("cat", "dog")[i % 2] / f"{i}.{'png' if i == 4 else 'jpg'}", quality=95
            )
    broken = tmp_path / "train" / "dog" / "5.jpg"
    broken.write_bytes(broken.read_bytes()[:400])
    return tmp_path


def open_source(root, split="train"):
    return open_images(f"folder:{root}", split, **OPEN_OPTIONS)


def write_cache(root, folder, split="train", **changes):
    options = CACHE_OPTIONS | {"name": f"folder:{root}", "split": split} | changes
    return cache.write(open_source(root, split), folder, **options)


def test_large_images_are_shrunk_and_others_keep_their_bytes(root, tmp_path):
    folder, source = tmp_path / "small", open_source(root)
    record = write_cache(root, folder)
    result = open_images(f"cache:{folder}", "train", **OPEN_OPTIONS)
    assert len(result) == len(source) == 7 and result.classes == ["cat", "dog"] and result.num_classes == 2
    assert (record["shrunk"], record["kept"], record["unreadable"]) == (4, 2, 1)
    for i in range(7):
        old, new = source[i], result[i]
        assert new["label"] == old["label"]
        try:
            before = decode_whole(old["image"], 3)
        except CorruptImage:
            assert new["image"] == old["image"]
            continue
        after, (height, width) = decode_whole(new["image"], 3), before.shape[:2]
        if min(height, width) <= SIDE:
            assert new["image"] == old["image"]
            continue
        long = SIDE * max(height, width) / min(height, width)
        assert min(after.shape[:2]) == SIDE and abs(max(after.shape[:2]) - long) <= 0.5
        resized = Image.fromarray(before).resize(after.shape[1::-1], Image.Resampling.BICUBIC)
        resized.save(out := io.BytesIO(), "JPEG", quality=90)
        assert new["image"] == out.getvalue()
    assert result.name(3) == f"{folder / 'train'}, example 3"
    again = pickle.loads(pickle.dumps(result))
    assert again[6] == result[6]


def test_interrupted_write_is_resumed(root, tmp_path, monkeypatch):
    folder, shrink, seen = tmp_path / "small", cache._shrink, []

    def interrupt_at_fifth_image(raw, *rest):
        seen.append(raw)
        if len(seen) == 5:  # inside the second shard
            raise KeyboardInterrupt
        return shrink(raw, *rest)

    monkeypatch.setattr(cache, "_shrink", interrupt_at_fifth_image)
    with pytest.raises(KeyboardInterrupt):
        write_cache(root, folder)
    names = sorted(path.name for path in (folder / "train").iterdir())
    assert names == ["00000-of-00003.array_record", "00000-of-00003.json", "plan.json"]
    with refuses(f"cache:{folder}", 1, "leanformer.prepare cache", error=DataError):  # one of three shards
        open_images(f"cache:{folder}", "train", **OPEN_OPTIONS)
    seen[:] = [b""] * 10
    reports = []
    record = write_cache(root, folder, report=reports.append)
    assert len(seen) == 10 + 4 and mentions(reports[0], folder / "train", 1, 3)
    expected = write_cache(root, tmp_path / "other")
    assert record == expected
    seen.clear()
    assert write_cache(root, folder) == record and not seen


def test_unusable_folders_sources_and_caches_are_refused(root, tmp_path):
    with refuses(root / "train", error=DataError):
        write_cache(root, root)
    with refuses('data.name="synthetic"', error=DataError):
        synthetic = open_images("synthetic", "train", **OPEN_OPTIONS)
        cache.write(synthetic, tmp_path / "c", **(CACHE_OPTIONS | {"name": "synthetic", "split": "train"}))
    with refuses(tmp_path / "nothing", "leanformer.prepare cache", error=DataError):
        open_images(f"cache:{tmp_path / 'nothing'}", "train", **OPEN_OPTIONS)
    write_cache(root, tmp_path / "grey", channels=1)
    with refuses(tmp_path / "grey" / "train", "model.channels=3", error=DataError):
        open_images(f"cache:{tmp_path / 'grey'}", "train", **OPEN_OPTIONS)
    write_cache(root, tmp_path / "cut")
    for key, value, parts in (("short_side", 20, ("short_side=24", 20)), ("name", "x", ("source=", "x"))):
        with refuses(tmp_path / "cut", *parts, error=DataError):
            write_cache(root, tmp_path / "cut", **{key: value})
    plan = json.loads((tmp_path / "cut" / "train" / "plan.json").read_text())
    for sizes, refused in (("other", True), (None, False)):  # caches of earlier versions have no fingerprint
        old = plan | {"fingerprint": plan["fingerprint"] | {"sizes of files": sizes}} if sizes else plan
        (tmp_path / "cut" / "train" / "plan.json").write_text(json.dumps(old))
        with refuses(tmp_path / "cut", "sizes of files", error=DataError) if refused else contextlib.nullcontext():
            write_cache(root, tmp_path / "cut")
    shard = tmp_path / "cut" / "train" / "00001-of-00003.array_record"
    shard.write_bytes(shard.read_bytes()[:-1])
    with refuses(shard, error=DataError):
        open_images(f"cache:{tmp_path / 'cut'}", "train", **OPEN_OPTIONS)


def test_described_effect_equals_hand_calculation():
    """500 x 375 at short side 288 is 384 x 288: 224² of 187,500 pixels is 27 %, of 110,592 is 45 %."""
    record = {"shrunk": 2, "examples": 3, "unreadable": 1, "pixels": 2 * 500 * 375, "cached_pixels": 2 * 384 * 288}
    change = cache.describe_effect(record, (224, 224))
    assert mentions(change, "45%", "224 x 224", "27%")
    assert not mentions(cache.describe_effect(record | {"shrunk": 0}, (224, 224)), "224 x 224")


@pytest.fixture
def c(root, tiny):
    tiny.data.update(name=f"folder:{root}", eval_split="val", mean=(0.5,) * 3, std=(0.5,) * 3)
    tiny.model.update(channels=3, num_classes=2)
    return tiny


def test_cached_evaluation_examples_equal_the_originals(c, tmp_path, capsys):
    prepare.cache(c, tmp_path / "small", SIDE)
    out = capsys.readouterr().out
    assert mentions(out, "14 x 14", f"--config.data.name=cache:{tmp_path / 'small'}")
    original = tasks.open_data(tasks.build(c).data, c)[1][""]
    c.data.name = f"cache:{tmp_path / 'small'}"
    config.check(c)
    train, held_out = tasks.open_data(tasks.build(c).data, c)
    held_out = held_out[""]
    assert len(train) == len(held_out) == 7
    assert [held_out[i] for i in range(7)] == [original[i] for i in range(7)]
    with refuses("--short_side=10", "model.image_size=14"):
        prepare.cache(c, tmp_path / "other", 10)


def test_examples_per_core_are_measured(c):
    train, _ = tasks.open_data(tasks.build(c).data, c)
    assert 1 < prepare.examples_per_core(c, tasks.build(c).data, train) < 1e6


@pytest.mark.parametrize("where", ["image", "index"])
def test_damaged_records_are_one_message(root, tmp_path, where):
    """Some bytes of a shard are overwritten, and its size is unchanged."""
    write_cache(root, tmp_path / "small")
    shard = min((tmp_path / "small" / "train").glob("*.array_record"))
    content = bytearray(shard.read_bytes())
    start = content.find(b"\xff\xd8\xff") + 20 if where == "image" else len(content) // 2  # of the first JPEG
    content[start : start + 60] = bytes(x ^ 255 for x in content[start : start + 60])
    shard.write_bytes(content)
    with refuses(tmp_path / "small" / "train", error=DataError):
        source = open_images(f"cache:{tmp_path / 'small'}", "train", **OPEN_OPTIONS)
        for i in range(len(source)):
            source[i]
