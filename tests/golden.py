"""Pages compared with stored ones: tests/golden/NAME.txt. LEANFORMER_UPDATE_GOLDEN=1 writes them anew.

A stored page holds the words and the order of what a user sees, not its numbers, which tests compare with references
and which depend on the machine. Every number is stored as #, runs of spaces as one.
"""

import os
import re
from pathlib import Path


FOLDER = Path(__file__).parent / "golden"
NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)(?:e[-+]?\d+)?(?!\w)", re.IGNORECASE)


def masked(text, paths=()):
    """Return `text` without what differs from run to run: numbers, spacing, and `paths`, shown as PATH."""
    for path in sorted(map(str, paths), key=len, reverse=True):
        text = text.replace(path, "PATH")
    lines = (re.sub(r"[ \t]+", " ", NUMBER.sub("#", line)).rstrip() for line in text.splitlines())
    return "\n".join(lines).strip() + "\n"


def check_page(name, text, paths=()):
    """Assert that a page reads as the stored one."""
    stored = FOLDER / f"{name}.txt"
    page = masked(text, paths)
    if os.environ.get("LEANFORMER_UPDATE_GOLDEN"):
        stored.parent.mkdir(exist_ok=True)
        stored.write_text(page, encoding="utf-8")
    assert stored.exists(), f"no {stored.name}: run this test with LEANFORMER_UPDATE_GOLDEN=1, and read the file"
    assert page == stored.read_text(encoding="utf-8"), (
        f"{stored.name} differs. If the change is meant, run this test with LEANFORMER_UPDATE_GOLDEN=1"
    )
