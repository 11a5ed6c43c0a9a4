"""Cache of downscaled images for faster reading: ArrayRecord shards of encoded images, in the order of their source.

`<folder>/<split>/` contains the shards and, once all are complete, `cache.json`, which describes them. A shard appears
when it is complete, and its JSON record after it, so a killed run resumes at the first shard without a record. An
example is stored as its label, eight bytes, followed by the image.
"""

import contextlib
import functools
import io
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from array_record.python.array_record_data_source import ArrayRecordDataSource
from array_record.python.array_record_module import ArrayRecordWriter  # ty: ignore[import-not-found] - compiled, without types
from etils import epath
from PIL import Image

from leanformer.data import fingerprints
from leanformer.data.images.decoding import CorruptImage, decode_whole
from leanformer.data.pool import map_ordered
from leanformer.data.source import Labelled, Source
from leanformer.errors import DataError, first_line
from leanformer.runtime import files


VERSION = 1
SHARD = 4096  # examples per shard: about 100 MB, and a minute on one core
QUALITY = 90  # JPEG quality
RECORD, PLAN, FINGERPRINT = "cache.json", "plan.json", "fingerprint"  # files, and a key of the plan
COUNTS = ("shrunk", "kept", "unreadable", "pixels", "cached_pixels")


def write(
    source: Labelled,
    folder: Path,
    *,
    name: str,
    split: str,
    short_side: int | None,
    channels: int,
    processes: int,
    report: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Write the missing shards of a split to a cache, and return its record, the content of `cache.json`.

    Images whose short side is longer than `short_side` are resized to it, bicubic as in Pillow, and stored as JPEGs of
    quality 90. All others keep their bytes, including those that cannot be decoded, which training handles and counts.

    Args:
        source: source of encoded images.
        folder: folder of the cache, with a folder for each split.
        name: name of the source, as in a config.
        split: name of the split; the shards are in `<folder>/<split>`.
        short_side: maximum length of the short side in pixels; None keeps the bytes of all images.
        channels: channels of the model, 1 or 3, which the cached images have.
        processes: number of worker processes; 0 for this process.
        report: function that prints a line of progress.

    Returns:
        The record: the settings (version, source, split, examples, short_side, channels, quality, num_classes,
        classes); the numbers of images shrunk, kept and unreadable; pixels and cached_pixels, summed over the readable
        images of the source and of the cache; and bytes, the size of each shard by file name.

    Raises:
        DataError: the folder has other content, a cache with other settings, or one of images that have changed since;
            or it cannot be written, or the images of the source are not encoded.
    """
    target = folder / split
    names = None if source.classes is None else list(source.classes)
    plan: dict[str, Any] = {
        "version": VERSION,
        "source": name,
        "split": split,
        "examples": len(source),
        "short_side": short_side,
    }
    plan |= {"channels": channels, "quality": QUALITY, "num_classes": source.num_classes, "classes": names}
    if not isinstance(source[0]["image"], bytes):
        raise DataError(f'data.name="{name}" has pixels, not encoded images, so a cache would save no time.')
    parts = [range(start, min(start + SHARD, len(source))) for start in range(0, len(source), SHARD)]
    paths = [target / f"{i:05d}-of-{len(parts):05d}.array_record" for i in range(len(parts))]
    try:
        target.mkdir(parents=True, exist_ok=True)
        _check_plan(target, plan, fingerprints.compute(source))
        missing = [(path, part) for path, part in zip(paths, parts, strict=True) if not _record_path(path).is_file()]
        if missing and len(missing) < len(paths):
            report(f"{target}: {len(paths) - len(missing)} of {len(paths)} shards exist, resuming.")
        fill = functools.partial(_write_shard, source, short_side=short_side, channels=channels)
        for number, _ in enumerate(map_ordered(fill, missing, processes), start=len(paths) - len(missing) + 1):
            report(f"{target}: shard {number} of {len(paths)}")
        counts = [json.loads(_record_path(path).read_text(encoding="utf-8")) for path in paths]
        record = plan | {key: sum(count[key] for count in counts) for key in COUNTS}
        record |= {"bytes": {path.name: path.stat().st_size for path in paths}}
        files.write_json(target / RECORD, record)
    except OSError as error:
        raise DataError(f"The cache cannot be written to {target}: {error}") from error
    return record


def _check_plan(target: Path, plan: Mapping[str, Any], images: Mapping[str, Any]) -> None:
    """Record the plan of a cache and the fingerprint of its images; a cache of an earlier version has none.

    Raise DataError if the folder has another plan or other content, or if the images have changed since.
    """
    path = target / PLAN
    if not path.is_file():
        if any(target.iterdir()):
            raise DataError(f"{target} has other content. Use another folder.")
        files.write_json(path, {**plan, FINGERPRINT: dict(images)})
        return
    old = _read(path)
    wrong = [f"{key}={old.get(key)!r}, configured {value!r}" for key, value in plan.items() if old.get(key) != value]
    if wrong:
        raise DataError(
            f"{target} is a cache with other settings: {'; '.join(wrong)}. Use another folder, or remove this one."
        )
    if changes := fingerprints.describe_changes(old.get(FINGERPRINT, images), images):
        raise DataError(
            f"{target} is a cache of images that have changed since: {changes}. Use another folder, or remove this one."
        )


def _record_path(path: Path) -> Path:
    """Return the path of a shard's record, which exists once the shard is complete."""
    return path.with_suffix(".json")


def _write_shard(source: Source, piece: tuple[Path, range], *, short_side: int | None, channels: int) -> None:
    (path, part), counts = piece, dict.fromkeys(COUNTS, 0)
    with files.atomic_write(path) as draft:
        writer = ArrayRecordWriter(str(draft), "group_size:1,uncompressed")  # JPEGs do not compress further
        for index in part:
            example = source[index]
            image, fate, before, after = _shrink(example["image"], short_side, channels)
            for key, value in {fate: 1, "pixels": before, "cached_pixels": after}.items():
                counts[key] += value
            writer.write(int(example["label"]).to_bytes(8, "little", signed=True) + image)
        writer.close()
    files.write_json(_record_path(path), counts)


def _shrink(raw: bytes, short_side: int | None, channels: int) -> tuple[bytes, str, int, int]:
    """Return the bytes to cache, their counter of COUNTS, and the number of pixels before and after.

    Larger images become JPEGs. Others keep their bytes, unreadable ones with 0 pixels.
    """
    try:
        pixels = decode_whole(raw, channels)
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


def _read(path: Path | epath.Path) -> dict[str, Any]:
    """Return the content of a plan or record. Raise DataError if it is damaged or of another version."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict) or content.get("version") != VERSION:
        raise DataError(
            f"{path} does not belong to a cache of version {VERSION}. Build the cache again in a new folder."
        )
    return content


def _record(path: Path | epath.Path) -> dict[str, Any]:
    """Return the record of a cached split. Raise DataError if a field that reading needs is missing or malformed."""
    record = _read(path)
    sizes, number, names = (record.get(key) for key in ("bytes", "num_classes", "classes"))
    valid = {
        "bytes": isinstance(sizes, dict) and sizes and all(Path(name).name == name for name in sizes),
        "channels": record.get("channels") in (1, 3),
        "num_classes": number is None or (type(number) is int and number >= 0),
        "classes": names is None or (isinstance(names, list) and all(isinstance(name, str) for name in names)),
    }
    if wrong := [key for key, ok in valid.items() if key not in record or not ok]:
        problem = f"{path}: {', '.join(wrong)}: missing or malformed."
        raise DataError(f"{problem} Restore a copy, or remove {path.parent} and make it again.")
    return record


class Cache:
    """Source of the images in one split of a cache that `write` made.

    An example is {"image": encoded bytes, "label": int}. `num_classes` and `classes` are those of the original source.

    Args:
        folder: folder of the cache.
        split: name of the split.
        channels: number of channels of the model's images, 1 or 3.

    Raises:
        DataError: the cache is missing or incomplete, a shard has another size than recorded, or the images are grey
            and the model needs colours; from `[]`, an image is damaged.
    """

    def __init__(self, folder: Path | epath.Path, split: str, channels: int):
        self.folder, self.split = folder / split, split
        command = "Run `python -m leanformer.prepare cache` with the config of the original dataset."
        if not (self.folder / RECORD).is_file():
            existing = len(list(self.folder.glob("*.array_record")))
            state = f"is incomplete (found {existing} shards)" if existing else "does not exist"
            raise DataError(f'data.name="cache:{folder}": {self.folder} {state}. {command}')
        record = _record(self.folder / RECORD)
        for name, size in record["bytes"].items():
            path = self.folder / name
            if not path.is_file() or epath.Path(path).stat().length != size:
                raise DataError(f"{path} is missing or was modified. Remove {self.folder}. {command}")
        if record["channels"] < channels:
            raise DataError(
                f"model.channels={channels}: the images in {self.folder} are grey. Make a cache in a new folder."
            )
        self.num_classes, self.classes = record["num_classes"], record["classes"]
        self._digest = fingerprints.digest(json.dumps(record, sort_keys=True).encode())
        with self._explain_damage(str(self.folder)):
            self._records = ArrayRecordDataSource([str(self.folder / name) for name in sorted(record["bytes"])])

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> dict[str, Any]:
        with self._explain_damage(self.name(index)):
            record = self._records[index]
        return {"image": record[8:], "label": int.from_bytes(record[:8], "little", signed=True)}

    @contextlib.contextmanager
    def _explain_damage(self, about: str) -> Iterator[None]:
        """Raise DataError for an error of the library, which is a RuntimeError for damaged records."""
        try:
            yield
        except (RuntimeError, ValueError, IndexError) as error:
            raise DataError(
                f"{about} is damaged: {first_line(error)}. Remove {self.folder}, and run `python -m "
                "leanformer.prepare cache` with the config of the original dataset."
            ) from error

    def name(self, index: int) -> str:
        return f"{self.folder}, example {index}"

    def fingerprint(self) -> dict[str, str]:
        """Return a digest of the cache's record, {"shards": digest}, for `data.fingerprints`."""
        return {"shards": self._digest}


def describe_effect(record: Mapping[str, Any], size: tuple[int, int]) -> str:
    """Return a sentence that says which random crops lose detail through a cache, for an image of mean size.

    Args:
        record: result of `write`.
        size: (height, width) in pixels to which crops are resized.
    """
    if not record["shrunk"]:
        return "no effect: no image was larger"
    pictures, target = record["examples"] - record["unreadable"], size[0] * size[1]
    before, after = (min(1.0, target * pictures / record[key]) for key in ("pixels", "cached_pixels"))
    return (
        f"crops under {after:.0%} of an image's area have fewer pixels than {size[0]} x {size[1]} and lose detail; in "
        f"the originals, crops under {before:.0%}"
    )
