"""Numbers in the summary: significant digits."""

import pytest

from leanformer.runtime.text import format_float


@pytest.mark.parametrize(
    ("number", "text"),
    [(0.46707453155517575, "0.4671"), (1.23456e-7, "1.235e-07"), (1234567.8, "1,234,568"), (9876.54321, "9877")],
)
def test_numbers_are_rounded_to_significant_digits(number, text):
    assert format_float(number) == text
