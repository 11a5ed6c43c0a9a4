"""Masks of stored pages: numbers and paths, and nothing around them."""

import pytest
from golden import masked


@pytest.mark.parametrize(
    ("text", "page"),
    [
        ("[16, 22.5] and 1,234,567.", "[#, #] and #."),
        ("[16.1, 22] and 12,34.", "[#, #] and #,#."),
        ("-1.5e-06 .5 +3 1e+03 5% 0:01:59 2/3", "# # # # #% #:#:# #/#"),
        ("vit_b 12x16 h100 float32", "vit_b 12x16 h100 float32"),
        ("a \t b   1  ", "a b #"),
        ("/tmp/x/run5/a.png", "PATH/a.png"),
    ],
)
def test_a_masked_page(text, page):
    assert masked(text, ["/tmp/x", "/tmp/x/run5"]) == page + "\n"
