"""Whether a folder of files is still what was written: a list of sizes and checksums, kept inside it."""

import json
import zlib
from pathlib import Path

from leanformer.errors import first_line
from leanformer.runtime import files


MANIFEST = "files.json"


def note(folder: Path) -> None:
    """Writes down size and CRC-32 of every file in a folder."""
    found = sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(MANIFEST))
    listed = {str(path.relative_to(folder)): [path.stat().st_size, _crc(path)] for path in found}
    files.write_json(folder / MANIFEST, listed)


def damage(folder: Path) -> str | None:
    """What of a folder is not as it was noted, None where nothing is wrong. A save that was killed just before its list
    was written has none, and is left to the storage library to judge."""
    try:
        listed = json.loads((folder / MANIFEST).read_text()) if (folder / MANIFEST).is_file() else {}
        for name, (size, crc) in listed.items():
            path = folder / name
            found = path.stat().st_size if path.is_file() else "no file"
            if found != size:
                return f"{name} had {size} bytes when it was saved, found {found}"
            if _crc(path) != crc:
                return f"{name} is not what was saved: its checksum differs"
    except (OSError, ValueError) as error:
        return first_line(error)
    return None


def _crc(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(2**22):
            crc = zlib.crc32(block, crc)
    return crc
