"""Images made small once, to be read faster: ArrayRecord shards of encoded images, in the order of their source.

`<folder>/<split>/` holds the shards and, when all of them are there, `cache.json`, which says what they are. A shard
appears when it is whole, and its own record after it, so a run that was killed is gone on with at the first that has
none. A record is the label, eight bytes, and the image.
"""

import functools
import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from array_record.python.array_record_data_source import ArrayRecordDataSource
from array_record.python.array_record_module import ArrayRecordWriter
from PIL import Image

from leanformer.data.images.decoding import CorruptImage, whole
from leanformer.data.pool import ordered
from leanformer.errors import DataError
from leanformer.runtime import files


VERSION = 1
SHARD = 4096  # examples: some 100 MB, a minute's work of a core
QUALITY = 90  # of JPEGs
RECORD, PLAN = "cache.json", "plan.json"
COUNTS = ("shrunk", "kept", "unreadable", "pixels", "cached_pixels")


@runtime_checkable
class Examples(Protocol):
    """What is cached: a source of encoded images."""

    num_classes: int | None
    classes: Any

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]: ...


def write(
    source: Examples,
    folder: Path,
    *,
    name: str,
    split: str,
    short_side: int | None,
    channels: int,
    processes: int,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Writes a split, or what of it is not there yet, and returns its record.

    Images with a longer short side get one of `short_side` pixels, bicubic as Pillow does it, and are JPEGs of quality
    90 then; all others keep their bytes, and with `short_side` None all do, those that cannot be decoded too: they are
    met, counted and named in training as before.

    Args:
        name, split: of the source, as in a config.
        channels: of the model, 1 or 3; so many are kept.

    Raises:
        DataError: the folder holds something else or cannot be written, or the source's images are no encoded ones.
    """
    target = folder / split
    names = source.classes and list(source.classes)
    plan = {"version": VERSION, "source": name, "split": split, "examples": len(source), "short_side": short_side}
    plan |= {"channels": channels, "quality": QUALITY, "num_classes": source.num_classes, "classes": names}
    if not isinstance(source[0]["image"], bytes):
        raise DataError(f'data.name="{name}" holds pixels, not encoded images: reading them costs nothing to save.')
    parts = [range(start, min(start + SHARD, len(source))) for start in range(0, len(source), SHARD)]
    paths = [target / f"{i:05d}-of-{len(parts):05d}.array_record" for i in range(len(parts))]
    try:
        target.mkdir(parents=True, exist_ok=True)
        _claim(target, plan)
        missing = [(path, part) for path, part in zip(paths, parts, strict=True) if not _done(path).is_file()]
        if missing and len(missing) < len(paths):
            say(f"{target}: {len(paths) - len(missing)} of {len(paths)} shards are there, going on.")
        fill = functools.partial(_shard, source, short_side=short_side, channels=channels)
        for number, _ in enumerate(ordered(fill, missing, processes), start=len(paths) - len(missing) + 1):
            say(f"{target}: shard {number} of {len(paths)}")
        counts = [json.loads(_done(path).read_text()) for path in paths]
        record = plan | {key: sum(count[key] for count in counts) for key in COUNTS}
        record |= {"bytes": {path.name: path.stat().st_size for path in paths}}
        files.write_json(target / RECORD, record)
    except OSError as error:
        raise DataError(f"The cache cannot be written to {target}: {error}") from error
    return record


def _claim(target: Path, plan: Mapping[str, Any]) -> None:
    """Raises DataError where the folder was begun with another plan, or holds what is no cache."""
    path = target / PLAN
    if not path.is_file():
        if any(target.iterdir()):
            raise DataError(f"{target} holds something else. Name another folder.")
        files.write_json(path, plan)
        return
    found = _read(path)
    wrong = [f"{key}={found.get(key)!r}, asked for {value!r}" for key, value in plan.items() if found.get(key) != value]
    if wrong:
        raise DataError(
            f"{target} is a cache of something else: {'; '.join(wrong)}. Name another folder, or remove it."
        )


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def _done(path: Path) -> Path:
    return path.with_suffix(".json")


def _shard(source: Examples, piece: tuple[Path, range], *, short_side: int | None, channels: int) -> None:
    (path, part), counts = piece, dict.fromkeys(COUNTS, 0)
    with files.atomic_write(path) as draft:
        writer = ArrayRecordWriter(str(draft), "group_size:1,uncompressed")  # JPEGs do not get smaller
        for index in part:
            example = source[index]
            image, fate, before, after = _small(example["image"], short_side, channels)
            for key, value in {fate: 1, "pixels": before, "cached_pixels": after}.items():
                counts[key] += value
            writer.write(int(example["label"]).to_bytes(8, "little", signed=True) + image)
        writer.close()
    files.write_json(_done(path), counts)


def _small(raw: bytes, short_side: int | None, channels: int) -> tuple[bytes, str, int, int]:
    """The image as it is cached, what became of it, and the pixels that it had and has."""
    try:
        pixels = whole(raw, channels)
    except CorruptImage:
        return raw, "unreadable", 0, 0
    height, width = pixels.shape[:2]
    if short_side is None or min(height, width) <= short_side:
        return raw, "kept", height * width, height * width
    scale = short_side / min(height, width)
    size = round(width * scale), round(height * scale)
    out = io.BytesIO()
    Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC).save(out, "JPEG", quality=QUALITY)
    return out.getvalue(), "shrunk", height * width, size[0] * size[1]


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict) or found.get("version") != VERSION:
        raise DataError(f"{path} is of no cache of version {VERSION}. Make it again elsewhere.")
    return found


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_sizes(value: Any) -> bool:
    whole = isinstance(value, dict) and value and all(map(_is_count, value.values()))
    return bool(whole) and all(Path(name).name == name for name in value)


FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {  # of RECORD besides its version
    "source": (lambda value: isinstance(value, str), "text"),
    "split": (lambda value: isinstance(value, str), "text"),
    "examples": (_is_count, "a whole number"),
    "short_side": (lambda value: value is None or _is_count(value), "a whole number or null"),
    "channels": (lambda value: type(value) is int and value in (1, 3), "1 or 3"),
    "quality": (_is_count, "a whole number"),
    "num_classes": (lambda value: value is None or _is_count(value), "a whole number or null"),
    "classes": (lambda value: value is None or _is_names(value), "a list of names or null"),
    **dict.fromkeys(COUNTS, (_is_count, "a whole number")),
    "bytes": (_is_sizes, "the size of each shard by its name"),
}


def _record(path: Path) -> dict[str, Any]:
    """Return the content of a RECORD. Raise DataError for a field that is missing or of another type."""
    record = _read(path)
    for key, (fits, expected) in FIELDS.items():
        if key not in record or not fits(record[key]):
            value = f"{key}={json.dumps(record[key])[:60]}" if key in record else f"{key} is missing"
            raise DataError(
                f"{path}: {value}, expected {expected}. Put back a copy, or remove {path.parent} and make it again."
            )
    return record


class Cache:
    """A split of a cache.

    Raises:
        DataError: it is not there, not complete, or not what was written.
    """

    def __init__(self, folder: Path, split: str, channels: int):
        self.folder, self.split = folder / split, split
        again = "Run `python -m leanformer.prepare cache` with the config of the original set."
        if not (self.folder / RECORD).is_file():
            there = len(list(self.folder.glob("*.array_record")))
            state = f"is not complete ({there} shards are there)" if there else "is not there"
            raise DataError(f'data.name="cache:{folder}": {self.folder} {state}. {again}')
        record = _record(self.folder / RECORD)
        if wrong := [name for name, size in record["bytes"].items() if _size(self.folder / name) != size]:
            raise DataError(
                f"{self.folder / wrong[0]} is missing or not as it was written. Remove {self.folder}. {again}"
            )
        if record["channels"] < channels:
            raise DataError(
                f"{self.folder} was made grey, and model.channels={channels}. Make another in a new folder."
            )
        self.num_classes, self.classes = record["num_classes"], record["classes"]
        self._records = ArrayRecordDataSource([str(self.folder / name) for name in sorted(record["bytes"])])

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> dict[str, Any]:
        record = self._records[index]
        return {"image": record[8:], "label": int.from_bytes(record[:8], "little", signed=True)}

    def name(self, index: int) -> str:
        return f"{self.folder}, example {index}"


def change(record: Mapping[str, Any], size: tuple[int, int]) -> str:
    """In words, what a cache does to random crops that are resized to `size`, (height, width), by its mean picture."""
    if not record["shrunk"]:
        return "nothing: no picture was larger"
    pictures, wanted = record["examples"] - record["unreadable"], size[0] * size[1]
    before, after = (min(1.0, wanted * pictures / record[key]) for key in ("pixels", "cached_pixels"))
    return (
        f"crops under {after:.0%} of a picture's area have fewer pixels than {size[0]} x {size[1]} and lose detail; of "
        f"the originals, those under {before:.0%}"
    )
