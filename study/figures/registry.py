"""Registry of the figures on README, findings, results, published models and the page on GPUs, by subject."""

from study.figures import (
    afterwards,
    conditioning,
    engineering,
    families,
    heads,
    language,
    shapes,
    summary,
    tasks,
    trained,
)
from study.figures.passages import FINDINGS, GPUS, PUBLISHED, README, RESULTS
from study.figures.settings import SETTINGS


PASSAGES = [*conditioning.PASSAGES, *shapes.PASSAGES, *tasks.PASSAGES, *language.PASSAGES, *heads.PASSAGES]
PASSAGES += [*families.PASSAGES, *engineering.PASSAGES, *trained.PASSAGES, *afterwards.PASSAGES, *summary.PASSAGES]
# Sections in which every figure is checked; () is all.
PAGES = {README: ("What we found",), FINDINGS: (), RESULTS: (), GPUS: ("Measured",)}
PAGES[PUBLISHED] = ("The number of updates",)
__all__ = ["PAGES", "PASSAGES", "SETTINGS"]
