"""Assertions on error messages: error class, keys and values. The wording is not tested, so it can be improved."""

import contextlib
import re

import pytest

from leanformer.errors import ConfigError


def missing(text, *parts):
    """Return the parts that `text` does not mention as whole words or numbers.

    A part is a key ("model.head_dim"), a name, a path or a number. A number matches in any usual format: 1234567,
    1,234,567, 0.5, 5e-01. A string may contain punctuation ("model.width=0"), but should not be a sentence.
    """
    return [part for part in parts if not any(_is_in(text, form) for form in _forms(part))]


def _forms(part):
    if isinstance(part, bool) or not isinstance(part, int | float):
        return {str(part)}
    return {str(part), repr(part), f"{part:,}", f"{part:g}"}


def _is_in(text, form):
    # Word boundaries on both sides: 5 does not match in 15 or 5.5, and width not in total_width.
    before = r"(?<![\w.])(?<!\d,)" if form[:1].isalnum() else ""
    after = r"(?!\w|\.\d|,\d{3})" if form[-1:].isalnum() else ""
    return re.search(f"{before}{re.escape(form)}{after}", text) is not None


def mentions(text, *parts):
    """Return whether `text` mentions every part, in any order and any words around them."""
    return not missing(text, *parts)


@contextlib.contextmanager
def refuses(*parts, error=ConfigError):
    """Assert that the block raises `error` with a message that mentions every part: `with refuses("seed", 5): ...`."""
    with pytest.raises(error) as caught:
        yield caught
    assert parts, "name the key, the value or the file that the message must mention"
    assert not missing(str(caught.value), *parts), (
        f"not mentioned: {missing(str(caught.value), *parts)}\n{caught.value}"
    )
