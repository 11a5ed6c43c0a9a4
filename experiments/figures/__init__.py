"""Registry of the figures on README, findings and results, by subject."""

from experiments.figures import conditioning, engineering, families, language, papers, published, shapes, tasks, trained
from experiments.figures.passages import FINDINGS, README, RESULTS
from experiments.figures.settings import SETTINGS


PASSAGES = [*conditioning.PASSAGES, *shapes.PASSAGES, *tasks.PASSAGES, *language.PASSAGES]
PASSAGES += [*families.PASSAGES, *papers.PASSAGES, *published.PASSAGES, *engineering.PASSAGES, *trained.PASSAGES]
PAGES = {README: ("What we found",), FINDINGS: (), RESULTS: ()}  # sections in which every figure is checked; () is all
__all__ = ["PAGES", "PASSAGES", "SETTINGS"]
