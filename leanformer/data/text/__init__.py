"""Texts for language models: documents from files, tokenizers, memory-mapped tokens, and rows of fixed length."""
