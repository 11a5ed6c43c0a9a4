"""Assertions on messages match whole words and numbers."""

import pytest
from messages import mentions, missing, refuses


def test_mentions_match_whole_words_and_numbers():
    text = "model.head_dim=15: must be at most 1,234,567 (model.width=5.5)"
    assert mentions(text, "model.head_dim", 15, 1234567, 5.5, "model.width=5.5")
    assert missing(text, 5, 1, 234, "head", "model.wid", 567) == [5, 1, 234, "head", "model.wid", 567]
    with pytest.raises(AssertionError), refuses("seed", error=ValueError):
        raise ValueError("model.seed=3")
