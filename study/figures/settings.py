"""Numbers that are not results: what was set, counted by design, or identifies something."""

import re


_INTEGER = r"(?<![\d.,])\d{1,3}(?:,\d{3}|\d)*"
_RANGE = rf"{_INTEGER}(?:(?: or | and | to | x ){_INTEGER})*"
_LIST = rf"{_INTEGER}(?:(?:, | or | and | to ){_INTEGER})*"
_UNITS = (
    "heads?|layers?|seeds|epochs?|steps|points of|dimensions|items|tokens|symbols|parameters|shapes|draws|models|"
    "hidden units|shapes each|simulated sweeps|images|test images|examples|ViTs|budgets|matrices|GPUs?|cores?"
)
_QUANTITIES = "heads? of|[Ww]idths?|dimension|rank|batch|MLP|depth|Tables?|Figures?|Theorem|contour|short side"

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
        r"Intervals(?::| are) 95 %|section 3\.1|(?<= )\d\. (?=[A-Z])",  # levels, sections, items of a list
        r"(?:training loss of|steps to|reaches) \d\.\d(?:, \d\.\d and \d\.\d)? nats",  # losses that are reached
        r"(?:behind|minus|with|to|All runs of one,) 4(?= on| heads| \(p| with| instead|, 16 and)|two of 8 err",
        r"step 400|step 1,000 of 4,000|390 updates|0\.01 nats per doubling|seeds 0 to 2|10 degrees of freedom",
        r"set before, 0\.03",
        r"rates? 0\.\d+(?:, 0\.\d+)*(?: and 0\.\d+)?|at 0\.\d+ and 0\.\d+|ended at 0\.\d+|0\.\d+ was not tried",
        r"prints 64 before|favour 64|at one \(256\)|at 120,000|test error of 13 %|of 10,000 images",
        r"from 64 to 32(?: and from 32 to 16)?|steps 64 to 32|has logits of at most 2|at most 4, so|\d with 32\.",
        r"one to \d+(?= -)|(?<= % )after 15\)",
        r"`global_bs` 64|grid has 8|about 1,900 to 3,400|390; 234|depths 4 to 12|with 128 sequences|ones with 512",
        r"\| \d+ \| (?:128|512) \|(?= [\d,]+ \|)|72 to 24|From \d+ to \d+ (?:the order|it is)|At 65 and above",
        r"1 layer over 6 by|best of 1, 3 and 6 layers|width 240 against 32",
    )
]
