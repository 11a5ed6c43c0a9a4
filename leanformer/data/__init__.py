"""Data from the config's words to host batches: sources, and their order."""

from leanformer.data.classes import shown
from leanformer.data.images import open_images
from leanformer.data.loader import Batches, CorruptLog, stream
from leanformer.data.sequences import encode, open_sequences
from leanformer.data.sequences.texts import TokenSource
from leanformer.data.source import Source, size
from leanformer.data.subset import spread


__all__ = [
    "Batches",
    "CorruptLog",
    "Source",
    "TokenSource",
    "encode",
    "open_images",
    "open_sequences",
    "shown",
    "size",
    "spread",
    "stream",
]
