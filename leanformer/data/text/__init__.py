"""Texts for language models: documents from files, tokenizers, memory-mapped tokens, and rows of fixed length."""

from leanformer.data.text.corpus import Corpus, open_corpus
from leanformer.data.text.rows import OverlappingLastWindow, Packed, Stream, Windows
from leanformer.data.text.tokenizer import Tokenizer


__all__ = ["Corpus", "OverlappingLastWindow", "Packed", "Stream", "Tokenizer", "Windows", "open_corpus"]
