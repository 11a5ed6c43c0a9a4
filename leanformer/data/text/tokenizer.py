"""Tokenizers: bytes, locally trained BPE or WordPiece, or any tokenizer.json of the `tokenizers` library."""

import functools
import json
import re
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path
from string import punctuation
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from leanformer.errors import DataError


FILE = "tokenizer.json"
END = "<|endoftext|>"  # end of a document, so also the token before one, in tokenizers trained here
ENDS = (END, "<|end_of_text|>", "<|im_end|>", "</s>", "[SEP]")  # its names in other tokenizers
MASKS = ("[MASK]", "<mask>", "<|mask|>")  # names of the mask token
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")  # first tokens of a WordPiece trained here
PAIRS = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))  # GPT-2's files from its two publishers


class Tokenizer:
    """Wrapper of a tokenizer of the `tokenizers` library, without padding and truncation."""

    vocabulary: int  # V, one more than the largest token
    end: int  # token after a document
    mask: int | None  # mask token

    def __init__(self, of_library: tokenizers.Tokenizer):
        self._base = of_library
        of_library.no_padding()
        of_library.no_truncation()
        # A text in which "<|endoftext|>" is written does not end there: its bytes count, and decode to themselves.
        of_library.encode_special_tokens = isinstance(of_library.decoder, decoders.ByteLevel)
        ends = [token for token in map(of_library.token_to_id, ENDS) if token is not None]
        if not ends:
            raise DataError(f"The tokenizer has no token for the end of a document, none of {' '.join(ENDS)}. Add one.")
        self.end = ends[0]
        self.mask = next((token for token in map(of_library.token_to_id, MASKS) if token is not None), None)
        self.vocabulary = max(of_library.get_vocab().values()) + 1

    @functools.cached_property
    def lengths(self) -> np.ndarray | None:
        """Bytes of text per token, int32 (V,), 0 for special tokens; None if tokens are of characters (WordPiece)."""
        if not isinstance(self._base.decoder, decoders.ByteLevel):
            return None
        sizes = np.zeros(self.vocabulary, np.int32)
        special = self._base.get_added_tokens_decoder()
        for token, number in self._base.get_vocab().items():
            added = special.get(number)
            sizes[number] = len(token) if added is None else 0 if added.special else len(added.content.encode())
        return sizes

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the tokens of each text, int32 (n,), without added special tokens. All cores are used.

        Names of special tokens in a text are text, such as "<|endoftext|>", if tokens are of bytes. In WordPiece they
        are those tokens, so that "[MASK]" can be written.
        """
        encoded = self._base.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(one.ids, np.int32) for one in encoded]

    @property
    def tokens(self) -> dict[str, int]:
        """Number of each token of the vocabulary, by its text."""
        return self._base.get_vocab()

    def number(self, token: str) -> int | None:
        """Return the number of a token of the vocabulary such as "[SEP]"; None if it has no such token."""
        return self._base.token_to_id(token)

    def decode(self, tokens: Iterable[Any]) -> str:
        """Return the text of token numbers. Special tokens are left out, and incomplete characters become �."""
        return self._base.decode([int(token) for token in tokens])

    def json(self) -> str:
        """Return the content of `tokenizer.json`, equal for equal tokenizers."""
        return json.dumps(json.loads(self._base.to_str()), sort_keys=True, ensure_ascii=False)


def parse(text: str) -> Tokenizer:
    """Return the tokenizer of the content of a tokenizer.json."""
    return Tokenizer(tokenizers.Tokenizer.from_str(text))


def read(path: Path) -> Tokenizer:
    """Return the tokenizer of a tokenizer.json, or of a folder with one or with the files of one of PAIRS."""
    if path.is_dir():
        for names in PAIRS:
            if all((path / name).is_file() for name in names):
                vocabulary, merges = (str(path / name) for name in names)
                return _add_end(_byte_level(models.BPE.from_file(vocabulary, merges)))
        path /= FILE
    if not path.is_file():
        raise DataError(
            f"There is no tokenizer {path}. Set data.tokenizer to a tokenizer.json, to a folder with one or with "
            f'{" and ".join(PAIRS[0])}, to "bytes", or to "bpe:<vocabulary>" or "wordpiece:<vocabulary>", which are '
            "trained on the texts."
        )
    return parse(path.read_text(encoding="utf-8"))


def byte_tokenizer() -> Tokenizer:
    """Return the byte tokenizer: token b is byte b, and 256 is the end of a document.

    >>> byte_tokenizer().encode(["hi"])[0].tolist()
    [104, 105]
    """
    alphabet = {symbol: byte for byte, symbol in enumerate(_symbols())}
    return _add_end(_byte_level(models.BPE(alphabet, []), words=False))


def train_bpe(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """Train a byte-level BPE (Sennrich et al. 2016; Radford et al. 2019); the end of a document is the last token."""
    base, alphabet = _byte_level(models.BPE()), pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=max(vocabulary - 1, 0), initial_alphabet=alphabet, show_progress=False)
    base.train_from_iterator(texts, trainer)
    tokenizer = _add_end(base)
    _check_size("bpe", vocabulary, tokenizer.vocabulary)
    return tokenizer


def train_wordpiece(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """Train a WordPiece tokenizer on words in lower case without accents, as in BERT (Devlin et al. 2019).

    The tokens of SPECIAL come first, followed by the others in alphabetical order: the library numbers tokens
    differently in every training. It also prefers the pair of lower numbers among equally frequent ones, so letters
    inside words are numbered first.
    """
    base = _wordpiece({token: number for number, token in enumerate(SPECIAL)})
    inside = set().union(*(re.sub(r"(^|\s)\S", " ", base.normalizer.normalize_str(text)) for text in texts))
    letters = [f"##{c}" for c in sorted(inside) if unicodedata.category(c)[0] not in "PZC" and c not in punctuation]
    trainer = trainers.WordPieceTrainer(vocab_size=vocabulary, special_tokens=[*SPECIAL, *letters], show_progress=False)
    base.train_from_iterator(texts, trainer)
    learned = sorted(base.get_vocab().keys() - set(SPECIAL))
    _check_size("wordpiece", vocabulary, len(SPECIAL) + len(learned))
    return Tokenizer(_wordpiece({token: number for number, token in enumerate([*SPECIAL, *learned])}))


def _wordpiece(vocabulary: dict[str, int]) -> tokenizers.Tokenizer:
    base = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    base.normalizer = normalizers.BertNormalizer(lowercase=True)
    base.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    base.decoder = decoders.WordPiece()
    base.add_special_tokens(list(SPECIAL))
    first, last = (("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"]))
    base.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[first, last]
    )
    return base


def _check_size(kind: str, vocabulary: int, trained: int) -> None:
    """Raise DataError unless a trained vocabulary has the configured size: letters or words of the texts limit it."""
    if trained != vocabulary:
        limit = "only" if trained < vocabulary else "at least"
        raise DataError(f"data.tokenizer={kind}:{vocabulary}: the texts have {limit} {trained} tokens. Use {trained}.")


def _byte_level(model: Any, *, words: bool = True) -> tokenizers.Tokenizer:
    """Return a byte-level tokenizer; if `words`, merges stay inside words as in GPT-2."""
    base = tokenizers.Tokenizer(model)
    base.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)
    base.decoder = decoders.ByteLevel()
    return base


def _add_end(base: tokenizers.Tokenizer) -> Tokenizer:
    base.add_special_tokens([END])
    return Tokenizer(base)


def _symbols() -> list[str]:
    """Return the character for each byte in byte-level vocabularies: the byte itself, or a character from 256 on."""
    plain = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = (chr(256 + i) for i in range(256))
    return [chr(byte) if byte in plain else next(others) for byte in range(256)]
