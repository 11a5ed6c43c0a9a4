"""Checksums of a folder: every byte of every file counts."""

import json
import zlib

import pytest
from messages import mentions

from leanformer.runtime import integrity


BLOCK = 2**22  # bytes per read


@pytest.fixture
def folder(tmp_path, rng):
    """Return a folder with files of several blocks, of one byte and of zero bytes, one of them in a subfolder."""
    (tmp_path / "state" / "d").mkdir(parents=True)
    for name, size in (("large", 2 * BLOCK + 77), ("d/small", 1), ("empty", 0)):
        (tmp_path / "state" / name).write_bytes(rng.bytes(size))
    integrity.write_checksums(tmp_path / "state")
    return tmp_path / "state"


def test_manifest_has_sizes_and_checksums(folder):
    manifest = json.loads((folder / integrity.MANIFEST).read_text())
    contents = {name: (folder / name).read_bytes() for name in ("large", "d/small", "empty")}
    assert manifest == {name: [len(content), zlib.crc32(content)] for name, content in contents.items()}
    assert integrity.find_corruption(folder) is None


@pytest.mark.parametrize("offset", [0, BLOCK - 1, BLOCK, 2 * BLOCK, -1])
def test_one_flipped_bit_is_detected(folder, offset):
    content = bytearray((folder / "large").read_bytes())
    content[offset] ^= 1
    (folder / "large").write_bytes(content)
    assert mentions(integrity.find_corruption(folder), "large")


@pytest.mark.parametrize("content", ["[]", "null", '{"large": 3}', '{"large": [1]}'])
def test_list_of_another_form_is_described(folder, content):
    (folder / integrity.MANIFEST).write_text(content)
    assert mentions(integrity.find_corruption(folder), integrity.MANIFEST)


def test_wrong_sizes_and_missing_files_are_detected(folder):
    (folder / "d" / "small").write_bytes(b"")
    assert mentions(integrity.find_corruption(folder), "d/small", 1, 0)
    (folder / "d" / "small").unlink()
    assert mentions(integrity.find_corruption(folder), "d/small", 1)
    (folder / integrity.MANIFEST).write_text("{")
    assert integrity.find_corruption(folder)
    (folder / integrity.MANIFEST).unlink()
    assert integrity.find_corruption(folder) is None  # a save that was killed before its manifest was written
