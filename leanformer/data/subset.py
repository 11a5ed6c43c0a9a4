"""Part of a source, for evaluations that need not see all of it."""

from typing import Any

import numpy as np

from leanformer.data.source import Source


class Spread:
    """So many examples of a source, evenly spaced over it: of a split that is sorted by class, all classes alike.

    What else a source says of itself is that of the whole.
    """

    SAID = ("classes", "num_classes", "vocabulary", "tokenizer")

    def __init__(self, source: Source, examples: int):
        self.source = source
        vars(self).update({name: getattr(source, name) for name in self.SAID if hasattr(source, name)})
        self._chosen = np.linspace(0, len(source) - 1, examples).round().astype(np.int64)

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.source[int(self._chosen[index])]

    def several(self, first: int, number: int) -> dict[str, np.ndarray]:
        """Those from `first` on at once, leading axis B, where the source can; the last again where they are over."""
        places = np.minimum(np.arange(first, first + number), len(self) - 1)
        drawn = [self.source.several(int(place), 1) for place in self._chosen[places]]
        return {name: np.concatenate([one[name] for one in drawn]) for name in drawn[0]}

    def name(self, index: int) -> str:
        """That of the example in the whole."""
        return self.source.name(int(self._chosen[index]))


def spread(source: Source, examples: int) -> Source:
    """`examples` of a source, evenly spaced; all of it for 0, and where it has no more."""
    return Spread(source, examples) if 0 < examples < len(source) else source
