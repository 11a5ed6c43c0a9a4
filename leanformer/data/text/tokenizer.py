"""Texts as numbers and back: bytes, BPE or WordPiece that is trained here, or any tokenizer.json of the `tokenizers`
library."""

import functools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from leanformer.errors import DataError


FILE = "tokenizer.json"
END = "<|endoftext|>"  # of a document, and so the token before one, of tokenizers that are made here
ENDS = (END, "<|end_of_text|>", "<|im_end|>", "</s>", "[SEP]")  # by what others call it
MASKS = ("[MASK]", "<mask>", "<|mask|>")  # in place of a token that is to be told, by what tokenizers call it
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")  # of WordPiece that is trained here, from 0 on
BYTES, BPE, WORDPIECE = "bytes", "bpe", "wordpiece"
FEWEST = 257  # tokens: a byte each, and the end of a document
PAIRS = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))  # files of GPT-2's, by its two publishers


class Tokenizer:
    """One of the `tokenizers` library, and what it is here: its vocabulary, its end of documents, bytes of tokens.

    Attributes:
        vocabulary: V, one more than the largest token.
        end: the token behind a document.
        mask: the token in place of one that is to be told; None where it has none.
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
        self.mask = next((token for token in map(of_library.token_to_id, MASKS) if token is not None), None)
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
            f'with {" and ".join(PAIRS[0])}, to "{BYTES}", or to "{BPE}:<vocabulary>" or "{WORDPIECE}:<vocabulary>", '
            "which are trained on the texts."
        ) from error
    return parse(text, str(path))


def of_bytes() -> Tokenizer:
    """Token b is byte b, 256 the end of a document."""
    alphabet = {symbol: byte for byte, symbol in enumerate(_symbols())}
    return _ended(_byte_level(models.BPE(alphabet, []), words=False))


def train_bpe(texts: Iterable[str], vocabulary: int) -> Tokenizer:
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
    _check_size(BPE, vocabulary, made.vocabulary)
    return made


def train_wordpiece(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """WordPiece of so many tokens, over words in lower case without accents, as BERT's (Devlin et al. 2019).

    SPECIAL come first, the others in the order of their characters: the library numbers them anew at every training.

    Raises:
        DataError: the vocabulary has no room for all letters, or the texts too few pairs for so large a one.
    """
    trainer = trainers.WordPieceTrainer(vocab_size=vocabulary, special_tokens=list(SPECIAL), show_progress=False)
    found = _wordpiece({token: number for number, token in enumerate(SPECIAL)})
    found.train_from_iterator(texts, trainer)
    learned = sorted(found.get_vocab().keys() - set(SPECIAL))
    _check_size(WORDPIECE, vocabulary, len(SPECIAL) + len(learned))
    return Tokenizer(_wordpiece({token: number for number, token in enumerate([*SPECIAL, *learned])}))


def _wordpiece(vocabulary: dict[str, int]) -> tokenizers.Tokenizer:
    found = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    found.normalizer = normalizers.BertNormalizer(lowercase=True)
    found.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    found.decoder = decoders.WordPiece()
    found.add_special_tokens(list(SPECIAL))
    first, last = (("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"]))
    found.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[first, last]
    )
    return found


def _check_size(kind: str, asked: int, made: int) -> None:
    if made < asked:
        raise DataError(f"data.tokenizer={kind}:{asked}: the texts give {made} tokens and no more. Ask for as many.")
    if made > asked:
        raise DataError(f"data.tokenizer={kind}:{asked}: letters and special tokens are {made}. Ask for more.")


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
