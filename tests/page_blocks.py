"""Python blocks of a page in docs/, by the heading that they follow."""

import re
from pathlib import Path


def find_blocks(page):
    """Return {heading: Python blocks} of a page."""
    text = (Path(__file__).parents[1] / "docs" / page).read_text(encoding="utf-8")
    sections = re.split(r"^#+ (.*)\n", text, flags=re.MULTILINE)[1:]
    pattern = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
    return {title: pattern.findall(body) for title, body in zip(sections[::2], sections[1::2], strict=True)}
