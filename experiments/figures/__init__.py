"""Registry of the figures on README, findings, results and the page on GPUs, by subject."""

from experiments.figures import (
    conditioning,
    engineering,
    families,
    heads,
    language,
    papers,
    published,
    shapes,
    tasks,
    trained,
)
from experiments.figures.passages import FINDINGS, GPUS, README, RESULTS
from experiments.figures.settings import SETTINGS


PASSAGES = [*conditioning.PASSAGES, *shapes.PASSAGES, *tasks.PASSAGES, *language.PASSAGES, *heads.PASSAGES]
PASSAGES += [*families.PASSAGES, *papers.PASSAGES, *published.PASSAGES, *engineering.PASSAGES, *trained.PASSAGES]
# Sections in which every figure is checked; () is all.
PAGES = {README: ("What we found",), FINDINGS: (), RESULTS: (), GPUS: ("Measured",)}
__all__ = ["PAGES", "PASSAGES", "SETTINGS"]
