"""Checksums of the files in a folder, written to a list in the folder and verified later."""

import json
import zlib
from pathlib import Path

from leanformer.errors import first_line
from leanformer.runtime import files


MANIFEST = "files.json"


def write_checksums(folder: Path) -> None:
    """Write the size and CRC-32 of every file in a folder and its subfolders to files.json (MANIFEST) in the folder."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(MANIFEST))
    entries = {str(path.relative_to(folder)): [path.stat().st_size, _compute_crc(path)] for path in paths}
    files.write_json(folder / MANIFEST, entries)


def find_corruption(folder: Path) -> str | None:
    """Return a description of the first file that does not match the list of `write_checksums`, or cannot be read.

    None if all files match, or there is no list: a save that was killed just before its list was written has none. The
    storage library then checks the files. An unreadable list is described too.
    """
    try:
        entries = json.loads((folder / MANIFEST).read_text(encoding="utf-8")) if (folder / MANIFEST).is_file() else {}
        if not isinstance(entries, dict) or not all(isinstance(x, list) and len(x) == 2 for x in entries.values()):
            return f"{MANIFEST} is not a list of sizes and checksums"
        for name, (size, crc) in entries.items():
            path = folder / name
            actual = path.stat().st_size if path.is_file() else "no file"
            if actual != size:
                return f"{name} had {size} bytes when it was saved, found {actual}"
            if _compute_crc(path) != crc:
                return f"{name} has changed since it was saved (checksum differs)"
    except (OSError, ValueError) as error:
        return first_line(error)
    return None


def _compute_crc(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(2**22):
            crc = zlib.crc32(block, crc)
    return crc
