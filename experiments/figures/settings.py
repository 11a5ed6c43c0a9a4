"""Numbers that are not results: what was set, counted by design, or identifies something."""

import re


_INTEGER = r"(?<![\d.,])\d{1,3}(?:,\d{3}|\d)*"
_RANGE = rf"{_INTEGER}(?:(?: or | and | to | x ){_INTEGER})*"
_LIST = rf"{_INTEGER}(?:(?:, | or | and | to ){_INTEGER})*"
_UNITS = (
    "heads?|layers?|seeds|epochs?|steps|points of|dimensions|items|tokens|symbols|parameters|shapes|draws|models|"
    "hidden units|shapes each|simulated sweeps|images|test images|examples|ViTs|budgets|matrices|GPUs?|cores?"
)
_QUANTITIES = "heads? of|width|dimension|rank|batch|MLP|depth|Tables?|Figures?|Theorem|contour|short side"

SETTINGS = [
    re.compile(pattern)
    for pattern in (
        r"(?:jax|CUDA|PyTorch) \d+(?:\.\d+)*|989 TFLOP/s",  # versions, and the vendor's number of an H200
        r"\| head dimension \|(?: \d+ \|)+",  # columns of a table
        r"`[^`]*`",  # commands and names
        r"\]\([^)]*\)",  # targets of links
        r"\b(?=[0-9a-f]*\d)[0-9a-f]{7}\b",  # commits
        r"\b20\d\d(?:-\d\d-\d\d)?\b",  # years and dates
        r"arXiv \d{4}\.\d{5}",
        rf"{_INTEGER} % (?:prediction )?intervals?\b|middle {_INTEGER} % of",  # levels of confidence
        rf"(?:up to|within) {_INTEGER} % (?:fewer|of parameters)",
        rf"\b{_RANGE}(?= (?:{_UNITS})\b)",
        rf"\b(?:{_QUANTITIES}) {_LIST}",
        rf"{_INTEGER} x {_INTEGER}",  # sizes of matrices and images
        r"split into [\d, ]+ heads|3, 5 and 10 seeds",
        rf"instead of {_INTEGER}|heads for 2\b",
        r"\b\d+x\d+\b",  # layers x heads
        rf"\b(?:from )?{_INTEGER} to {_INTEGER}(?= [-+]\d)",  # steps of the head dimension
        r"1 % of (?:top-1|the mean accuracy)|below 1e-3|1 - R²|1:? all directions",  # margin and threshold, definitions
        r"token graying, power 0\.\d+|λ = [\d.]*\d",  # strengths of interventions
        r"(?<= )\d+\. (?=\*\*)",  # items of a list
        r"[Bb]elow 48|48 or below",
        r"dimensions?,? (?:are |of |below )?\d+(?: to \d+)?|than at 12 of 4",
        r"At 64 and below|48 or less|equivalent at 270,000",
        r"1 layer over 6 by|best of 1, 3 and 6 layers|width 240 against 32",
    )
]
