"""Registry of the figures on README, findings, results, published models and the page on GPUs, by subject."""

from study.figures import (
    afterwards,
    conditioning,
    engineering,
    families,
    heads,
    language,
    mechanism,
    published,
    shapes,
    summary,
    tasks,
    trained,
)
from study.figures.passages import FINDINGS, GPUS, PUBLISHED, README, RESULTS
from study.figures.settings import SETTINGS


PASSAGES = [*conditioning.PASSAGES, *shapes.PASSAGES, *tasks.PASSAGES, *language.PASSAGES, *heads.PASSAGES]
PASSAGES += [
    *families.PASSAGES,
    *engineering.PASSAGES,
    *mechanism.PASSAGES,
    *trained.PASSAGES,
    *published.PASSAGES,
    *afterwards.PASSAGES,
    *summary.PASSAGES,
]
# Sections in which every figure is checked; () is all.
PAGES = {README: ("What we found",), FINDINGS: (), RESULTS: (), PUBLISHED: (), GPUS: ("Measured",)}
__all__ = ["PAGES", "PASSAGES", "SETTINGS"]
