"""Data from the config's words to host batches: sources, and their order."""

from leanformer.data.classes import shown
from leanformer.data.loader import Batches, CorruptLog, stream
from leanformer.data.sequences import encode, open_sequences
from leanformer.data.source import Source, open_source, size
from leanformer.data.subset import spread
from leanformer.data.teacher import Teacher, open_teacher
from leanformer.data.tokens import TokenSource


__all__ = [
    "Batches",
    "CorruptLog",
    "Source",
    "Teacher",
    "TokenSource",
    "encode",
    "open_sequences",
    "open_source",
    "open_teacher",
    "shown",
    "size",
    "spread",
    "stream",
]
