"""Golden-file comparison of printed pages: tests/golden/NAME.txt. LEANFORMER_UPDATE_GOLDEN=1 rewrites the files.

A stored page contains the words that a user sees, in their order. It contains no numbers: they depend on the machine,
and other tests compare them with references. Every number is stored as #, runs of spaces as one space.
"""

import os
import re
from pathlib import Path


FOLDER = Path(__file__).parent / "golden"
NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)(?:e[-+]?\d+)?(?!\w)", re.IGNORECASE)


def mask_page(text, paths=()):
    """Return `text` with numbers replaced by #, `paths` by PATH, and runs of spaces by one space."""
    for path in sorted(map(str, paths), key=len, reverse=True):
        text = text.replace(path, "PATH")
    lines = (re.sub(r"[ \t]+", " ", NUMBER.sub("#", line)).rstrip() for line in text.splitlines())
    return "\n".join(lines).strip() + "\n"


def check_page(name, text, paths=()):
    """Assert that a page equals the stored one, apart from numbers, spacing and `paths`."""
    stored = FOLDER / f"{name}.txt"
    page = mask_page(text, paths)
    if os.environ.get("LEANFORMER_UPDATE_GOLDEN"):
        stored.parent.mkdir(exist_ok=True)
        stored.write_text(page, encoding="utf-8")
    assert stored.exists(), f"no {stored.name}: run this test with LEANFORMER_UPDATE_GOLDEN=1, and read the file"
    assert page == stored.read_text(encoding="utf-8"), (
        f"{stored.name} differs. If the change is meant, run this test with LEANFORMER_UPDATE_GOLDEN=1"
    )
