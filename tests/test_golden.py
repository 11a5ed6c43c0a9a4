"""Tests of the masking of stored pages: only numbers, paths and spacing are replaced."""

import pytest
from golden import mask_page


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
def test_numbers_and_paths_are_masked(text, page):
    assert mask_page(text, ["/tmp/x", "/tmp/x/run5"]) == page + "\n"
