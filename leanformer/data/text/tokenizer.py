"""Texts as numbers and back: bytes, BPE that is trained here, or any tokenizer.json of the `tokenizers` library."""

import functools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from leanformer.errors import DataError


FILE = "tokenizer.json"
END = "<|endoftext|>"  # of a document, and so the token before one, of tokenizers that are made here
ENDS = (END, "<|end_of_text|>", "<|im_end|>", "</s>", "[SEP]")  # by what others call it
BYTES, BPE = "bytes", "bpe"
FEWEST = 257  # tokens: a byte each, and the end of a document
PAIRS = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))  # files of GPT-2's, by its two publishers


class Tokenizer:
    """One of the `tokenizers` library, and what it is here: its vocabulary, its end of documents, bytes of tokens.

    Attributes:
        vocabulary: V, one more than the largest token.
        end: the token behind a document.
        lengths: how many bytes of text each token stands for, int32 V, 0 for special ones; None where tokens stand for
            characters and not for bytes (WordPiece, say), so that nobody can tell.

    Raises:
        DataError: it has no token for the end of a document.
    """

    def __init__(self, of_library: tokenizers.Tokenizer):
        self._of_library = of_library
        of_library.no_padding()
        of_library.no_truncation()
        ends = [token for token in map(of_library.token_to_id, ENDS) if token is not None]
        if not ends:
            raise DataError(f"The tokenizer has no token for the end of a document, none of {' '.join(ENDS)}. Add one.")
        self.end = ends[0]
        self.vocabulary = max(of_library.get_vocab().values()) + 1

    @functools.cached_property
    def lengths(self) -> np.ndarray | None:
        if not isinstance(self._of_library.decoder, decoders.ByteLevel):
            return None
        found = np.zeros(self.vocabulary, np.int32)
        special = self._of_library.get_added_tokens_decoder()
        for token, number in self._of_library.get_vocab().items():
            added = special.get(number)
            found[number] = len(token) if added is None else 0 if added.special else len(added.content.encode())
        return found

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The tokens of each text, int32, by all cores; without special tokens that the library would add."""
        encoded = self._of_library.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(one.ids, np.int32) for one in encoded]

    def number(self, token: str) -> int | None:
        """That of a token as the vocabulary has it, "[SEP]" say; None where it is not in it."""
        return self._of_library.token_to_id(token)

    def decode(self, tokens: Iterable[Any]) -> str:
        """The text of tokens, special ones left out; � where bytes are part of a character alone."""
        return self._of_library.decode([int(token) for token in tokens])

    def json(self) -> str:
        """As `tokenizer.json` has it; equal for equal tokenizers."""
        return json.dumps(json.loads(self._of_library.to_str()), sort_keys=True, ensure_ascii=False)


def parse(text: str, name: str) -> Tokenizer:
    """The tokenizer of a tokenizer.json. Raises DataError where it is none; `name` says whose it is."""
    try:
        return Tokenizer(tokenizers.Tokenizer.from_str(text))
    except DataError:
        raise
    except Exception as error:  # the library raises nothing narrower
        raise DataError(f"{name} is no tokenizer.json that the tokenizers library reads: {error}.") from error


def read(path: Path) -> Tokenizer:
    """A tokenizer.json, or a folder with one or with GPT-2's two files. Raises DataError where there is none."""
    if path.is_dir():
        for names in PAIRS:
            if all((path / name).is_file() for name in names):
                return _of_pair(*(path / name for name in names))
        path /= FILE
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"There is no tokenizer {path} ({error}). Set data.tokenizer to a tokenizer.json, to a folder with one or "
            f'with {" and ".join(PAIRS[0])}, to "{BYTES}", or to "{BPE}:<vocabulary>", which is trained on the texts.'
        ) from error
    return parse(text, str(path))


def of_bytes() -> Tokenizer:
    """Token b is byte b, 256 the end of a document."""
    alphabet = {symbol: byte for byte, symbol in enumerate(_symbols())}
    return _ended(_byte_level(models.BPE(alphabet, []), words=False))


def train(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """Byte-level BPE of so many tokens (Sennrich et al. 2016; Radford et al. 2019), the end of a document the last.

    Raises:
        DataError: the vocabulary has no room for all bytes, or the texts too few pairs for so large a one.
    """
    if vocabulary <= FEWEST:
        raise DataError(f"data.tokenizer={BPE}:{vocabulary}: all bytes and the end of a document are {FEWEST} tokens.")
    found, alphabet = _byte_level(models.BPE()), pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary - 1, initial_alphabet=alphabet, show_progress=False)
    found.train_from_iterator(texts, trainer)
    made = _ended(found)
    if made.vocabulary != vocabulary:
        raise DataError(
            f"data.tokenizer={BPE}:{vocabulary}: the texts give {made.vocabulary} tokens and no more. Ask for as many."
        )
    return made


def _byte_level(model: Any, *, words: bool = True) -> tokenizers.Tokenizer:
    """Over bytes; merges stay inside `words`, as GPT-2 cuts them."""
    found = tokenizers.Tokenizer(model)
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)
    found.decoder = decoders.ByteLevel()
    return found


def _ended(found: tokenizers.Tokenizer) -> Tokenizer:
    found.add_special_tokens([END])
    return Tokenizer(found)


def _symbols() -> list[str]:
    """The character that stands for each byte in byte-level vocabularies: itself, or one from 256 on."""
    plain = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = (chr(256 + i) for i in range(256))
    return [chr(byte) if byte in plain else next(others) for byte in range(256)]


def _of_pair(vocabulary: Path, merges: Path) -> Tokenizer:
    try:
        return _ended(_byte_level(models.BPE.from_file(str(vocabulary), str(merges))))
    except Exception as error:  # the library raises nothing narrower
        raise DataError(f"{vocabulary} and {merges} are no vocabulary with its merges: {error}.") from error
