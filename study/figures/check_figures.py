"""Check of figures on README, findings, results, published models and the page on GPUs against study/data.

    python -m study.figures.check_figures [--root=FOLDER] [--write]

Each passage in study/figures is a template of text on a page, with fields that are computed from a table. Prints
place, field and value of every figure. Exit status 1 if a page has another value, or a figure that no field computes
and that no pattern of settings.SETTINGS (seeds, shapes, dates, commands) describes. --write first puts the computed
values on the pages where they differ; a passage whose words differ stays as it is and is reported.
"""

import functools
import itertools
import re
import string
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from leanformer import cli
from study.figures.registry import PAGES, PASSAGES, SETTINGS


ROOT = Path(__file__).parents[2]
NUMBER = re.compile(r"(?<![\w.])(?<!\w-)(?:\d+(?:[.,]\d+)*(?:e-?\d+)?|\.\d+)")  # not of a name: top-1, x86-64
FORMATTER = string.Formatter()
compute: Callable[[Callable[[], Any]], Any] = functools.cache(lambda values: values())


class Figure(NamedTuple):
    """Field of a passage: where it stands on the page, its name, and its text as computed."""

    start: int
    end: int
    name: str
    text: str


class Page:
    """Text of a page, every run of white space as one space."""

    def __init__(self, name: str, text: str) -> None:
        self.name, self.raw, lines = name, text, [line.split() for line in text.split("\n")]
        self.text = " ".join(word for line in lines for word in line)
        self._lines = [number for number, words in enumerate(lines, 1) for word in words for _ in f"{word} "]
        self._places = [place for word in re.finditer(r"\S+", text) for place in range(word.start(), word.end() + 1)]

    def place(self, start: int) -> str:
        """Return FILE:LINE of a character."""
        return f"{self.name}:{self._lines[start]}"

    def written(self, figures: Iterable[Figure]) -> str:
        """Return the page with the computed texts of figures, line breaks as they are."""
        changes = {(f.start, f.end): f.text for f in figures if self.text[f.start : f.end] != f.text}
        result = self.raw
        for (first, last), text in sorted(changes.items(), reverse=True):
            start, end = self._places[first], self._places[last - 1] + 1
            words = text.split(" ")
            gaps = re.findall(r"\s+", result[start:end])[: len(words) - 1]
            pairs = itertools.zip_longest(words, gaps, fillvalue=" ")
            result = result[:start] + "".join(map("".join, pairs))[:-1] + result[end:]
        return result

    def around(self, match: re.Match[str]) -> str:
        """Return a match with the text before and after it."""
        return f"…{self.text[max(0, match.start() - 50) : match.end() + 30]}…"

    def sections(self, titles: Sequence[str]) -> Iterator[tuple[int, int]]:
        """Yield start and end of the sections with these titles, or of the whole page."""
        for title in titles:
            start = self.text.index(f"## {title} ")
            yield start, self.text.find(" ## ", start) % (len(self.text) + 1)
        if not titles:
            yield 0, len(self.text)


def render(template: str, values: Mapping[str, Any]) -> list[tuple[str, str | None]]:
    """Return the parts of a passage: text, and the name of the field that it is the value of."""
    parts: list[tuple[str, str | None]] = []
    for literal, name, spec, _ in FORMATTER.parse(template):
        parts.append((literal, None))
        if name is not None:
            parts.append((format(FORMATTER.get_field(name, (), values)[0], spec), name))
    return parts


def locate(page: Page, template: str, values: Mapping[str, Any]) -> tuple[list[Figure], list[str]]:
    """Return the figures of a passage wherever a page has it, and what is wrong."""
    parts = render(template, values)
    passage, figures = "".join(text for text, _ in parts), []
    for match in re.finditer(re.escape(passage), page.text):
        start = match.start()
        for text, name in parts:
            figures += [Figure(start, start + len(text), name, text)] if name else []
            start += len(text)
    return (figures, []) if figures else explain(page, parts)


def explain(page: Page, parts: Sequence[tuple[str, str | None]]) -> tuple[list[Figure], list[str]]:
    """Return the figures of a passage that has other values on the page, and how they differ."""
    match = re.search("".join(f"({_any_value(text)})" if name else re.escape(text) for text, name in parts), page.text)
    if match is None:
        return [], [f"{page.name}: no such passage: {''.join(text for text, _ in parts)}"]
    fields = [(text, name) for text, name in parts if name]
    figures = [Figure(*match.span(i), name, text) for i, (text, name) in enumerate(fields, 1)]
    wrong = [f"{f.name}={f.text}, on the page: {page.text[f.start : f.end]}" for f in figures]
    wrong = [text for text, f in zip(wrong, figures, strict=True) if page.text[f.start : f.end] != f.text]
    return figures, [f"{page.place(match.start())}: {'; '.join(wrong)}"]


def _any_value(text: str) -> str:
    """Return a pattern of texts that differ from `text` in their numbers, or of any text of a cell if it has none."""
    pattern, count = re.subn(r"(?:\\[-+]|\+)?\d+(?:(?:\\\.|,)\d+)*", r"[-+]?\\d+(?:[.,]\\d+)*", re.escape(text))
    return pattern if count else "[^|]{0,80}?"


def find_unchecked(page: Page, figures: Sequence[Figure]) -> list[str]:
    """Return the numbers in the checked sections that are neither fields of a passage nor settings."""
    covered = {i for f in figures for i in range(f.start, f.end)}
    covered |= {i for pattern in SETTINGS for match in pattern.finditer(page.text) for i in range(*match.span())}
    return [
        f"{page.place(match.start())}: {match[0]} is not computed: {page.around(match)}"
        for section in page.sections(PAGES[page.name])
        for match in NUMBER.finditer(page.text, *section)
        if match.start() not in covered
    ]


def write(root: Path = ROOT) -> None:
    """Put the computed values on the pages where they differ."""
    for name in PAGES:
        page = Page(name, (root / name).read_text(encoding="utf-8"))
        located = (locate(page, t, compute(p.values))[0] for p in PASSAGES for t in p.pages.get(name, ()))
        (root / name).write_text(page.written(itertools.chain(*located)), encoding="utf-8")


def check(root: Path = ROOT) -> tuple[dict[str, list[tuple[str, Figure]]], list[str]]:
    """Return the figures of each page with their places, and what is wrong."""
    result: dict[str, list[tuple[str, Figure]]] = {}
    problems: list[str] = []
    for name in PAGES:
        page, figures = Page(name, (root / name).read_text(encoding="utf-8")), []
        for passage in PASSAGES:
            for template in passage.pages.get(name, ()):
                more, wrong = locate(page, template, compute(passage.values))
                figures, problems = figures + more, problems + wrong
        problems += find_unchecked(page, figures)
        result[name] = [(page.place(figure.start), figure) for figure in figures]
    return result, problems


@cli.command(
    cli.Flag("root", "Folder with README.md and docs; the repository if not given."),
    cli.Flag("write", "Put the computed values on the pages where they differ.", bool, default=False),
)
def main(f: cli.Values) -> int:
    root = Path(f.root) if f.root else ROOT
    if f.write:
        write(root)
    figures, problems = check(root)
    for place, figure in (item for page in figures.values() for item in page):
        print(f"{place}: {figure.name} = {figure.text}")
    counts = [f"{name} {sum(len(NUMBER.findall(f.text)) for _, f in page)}" for name, page in figures.items()]
    print(f"\nFigures checked: {', '.join(counts)}. Differences: {len(problems)}.")
    print(*problems, sep="\n", end="\n" * bool(problems), file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    cli.run(main)
