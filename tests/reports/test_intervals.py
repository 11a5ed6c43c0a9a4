"""Numbers in the summary: significant digits."""

from leanformer.training import progress


def test_numbers_are_rounded_to_significant_digits():
    values = {"loss": 0.46707453155517575, "small": 1.23456e-7, "large": 1234567.8, "ppl": 9876.54321}
    rounded = {"loss": "0.4671", "small": "1.235e-07", "large": "1,234,568", "ppl": "9877"}
    assert progress.round_values(values | {"step": 123456, "split": "a"}) == rounded | {"step": 123456, "split": "a"}
