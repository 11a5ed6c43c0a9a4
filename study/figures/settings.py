"""Numbers that are not results: what was set, counted by design, or identifies something."""

import re


_INTEGER = r"(?<![\d.,])\d{1,3}(?:,\d{3}|\d)*"
_RANGE = rf"{_INTEGER}(?:(?: or | and | to | x ){_INTEGER})*"
_LIST = rf"{_INTEGER}(?:(?:, | or | and | to ){_INTEGER})*"
_UNITS = (
    "heads?|layers?|seeds|epochs?|steps|dimensions|items|tokens|parameters|shapes|models|simulated sweeps|images|"
    "matrices|GPUs?|cores?"
)
_QUANTITIES = "heads? of|[Ww]idths?|dimension(?: of)?|rank|batch|MLP|depth"

SETTINGS = [
    re.compile(pattern)
    for pattern in (
        r"(?:jax|CUDA|PyTorch) \d+(?:\.\d+)*|989 TFLOP/s",  # versions, and the vendor's number of an H200
        r"\| (?:held-out nats by )?head dimension \|(?: \d+ \|)+",  # columns of a table
        r"`[^`]*`|\]\([^)]*\)",  # commands, names and targets of links
        r"\b20\d\d(?:-\d\d-\d\d)?\b|arXiv \d{4}\.\d{5}",
        rf"{_INTEGER} % intervals?\b|Intervals(?::| are) 95 %|doubling, 90 %",  # levels of confidence
        rf"within {_INTEGER} % of parameters",
        rf"\b{_RANGE}(?= (?:{_UNITS})\b)",
        rf"\b(?:{_QUANTITIES}) {_LIST}",
        rf"{_INTEGER} x {_INTEGER}|instead of {_INTEGER}",
        r"section 3\.1|(?<= )\d\. (?=[A-Z])",  # items of a list
        r"(?:training loss of|steps to|reaches) \d\.\d nats|\| \d\.\d nats \|",  # losses that are reached
        r"(?:behind|minus|to|beats two|error|ViTs with) (?:of )?[24](?= on| heads| \(p| \||\.| with| instead| by)",
        r"[Ss]tep (?:200|300|400|500|700|1,000 \|)|steps 300, 500 and 700|with 4 patterns",
        r"1,000 of 4,000|at 4,000\. GPTs|4,000, per|390 updates|390; 234|over 32 inputs|after 15 the lean",
        r"0\.01 nats per doubling|set before, 0\.03|rates? 0\.\d+|at 0\.\d+, 0\.\d+ and 0\.\d+|one, 0\.003",
        r"√(?:128|256)/d|(?:heads minus 4, )?1/√d|one head at 4e-3|the loss 3\.3 nats",  # factors of the logits
        r"(?:[qQ]ueries(?: and|,) keys|values|those|heads) of (?:4|8|32)\b|instead of 4 of 32|margin 0\.03",
        r"taught by all 4|only 4 of the 32|each of 4 patterns|values minus by 32|32 heads at 3\.5 nats",
        r"1/16 minus 1/√32|minus 4 after|those with 4 from step 50",
        r"the factor at 256|less, 32 with|at 32 and at 4|at step 1,200|by step 1,000",
        r"\| (?:32, (?:tied|started)|4, queries)|: 6 is added|add 6, or weakly 3,",
        r"3 instead of 6|the same with 3;|of it with 6",
        r"1 and 0\.(?:01|32)|base (?:of )?10(?:,000)?\b",  # frequencies in radians per token
        r"per group of 8|keys of 4 minus 32|\) after 4, |heads minus 4, both",
        r"2\.38 times the rate|d = 4|queries, keys of 32 \| queries, keys of 4",
        r"(?:2,344|14,060) updates|\| error, % \| 2 heads \| 4 \| 8 \| 16 \| 16",
        r"prints 64 before|favour(?: of)? 64|at 120,000|layer of 2\.|two of 8\b|sixteen of 1|48: 1, 3, 12, 48",
        # of published models: steps of the head dimension, heads, batches and shapes
        r"[Ff]rom \d+ to \d+ (?:the order|it is|\||against)|At 64 and below|64 or less|always 128",
        r"to 33 \| 34 to 67 \| 68 and above|Up to 33|4 to 16, equal|2, 4 or 8, chosen",
        r"per GPU, on 8|`global_bs` 64|the grid 8 \||8060S",
    )
]
