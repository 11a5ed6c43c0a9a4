"""Data sources, opened by the names in configs, and their order in host batches."""

from leanformer.data.images import open_images
from leanformer.data.loader import Batches, CorruptLog, batches
from leanformer.data.source import Source, quote, size, take_subset


__all__ = ["Batches", "CorruptLog", "Source", "batches", "open_images", "quote", "size", "take_subset"]
