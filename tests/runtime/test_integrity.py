"""Checksums of a folder: every byte of every file counts."""

import json
import zlib

import pytest
from messages import mentions

from leanformer.runtime import files


BLOCK = 2**22  # bytes per read


@pytest.fixture
def folder(tmp_path, rng):
    """Return a folder with files of several blocks, of one byte and of zero bytes, one of them in a subfolder."""
    (tmp_path / "state" / "d").mkdir(parents=True)
    for name, size in (("large", 2 * BLOCK + 77), ("d/small", 1), ("empty", 0)):
        (tmp_path / "state" / name).write_bytes(rng.bytes(size))
    files.write_checksums(tmp_path / "state")
    return tmp_path / "state"


def test_manifest_has_sizes_and_checksums(folder):
    manifest = json.loads((folder / files.MANIFEST).read_text())
    contents = {name: (folder / name).read_bytes() for name in ("large", "d/small", "empty")}
    assert manifest == {name: [len(content), zlib.crc32(content)] for name, content in contents.items()}
    assert files.find_corruption(folder) is None


@pytest.mark.parametrize("offset", [0, BLOCK - 1, BLOCK, 2 * BLOCK, -1])
def test_one_flipped_bit_is_detected(folder, offset):
    content = bytearray((folder / "large").read_bytes())
    content[offset] ^= 1
    (folder / "large").write_bytes(content)
    assert mentions(files.find_corruption(folder), "large")


def test_wrong_sizes_and_missing_files_are_detected(folder):
    (folder / "d" / "small").write_bytes(b"")
    assert mentions(files.find_corruption(folder), "d/small", 1, 0)
    (folder / "d" / "small").unlink()
    assert mentions(files.find_corruption(folder), "d/small", 1)
    (folder / files.MANIFEST).write_text("{")
    assert files.find_corruption(folder)
    (folder / files.MANIFEST).unlink()
    assert files.find_corruption(folder) is None  # a save that was killed before its manifest was written
