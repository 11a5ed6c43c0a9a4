"""Texts for language models: documents out of files, a tokenizer, a memory map of tokens, and rows of one length."""

from leanformer.data.text.corpus import Corpus, open_corpus
from leanformer.data.text.rows import Full, Packed, Stream, Windows
from leanformer.data.text.tokenizer import Tokenizer


__all__ = ["Corpus", "Full", "Packed", "Stream", "Tokenizer", "Windows", "open_corpus"]
