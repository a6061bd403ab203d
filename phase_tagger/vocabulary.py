"""A tokenizer as the tagger needs it: ids and offsets of a text, the bytes of every token, control tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

Ids = npt.NDArray[np.int32]
_HALF_PAIR = re.compile("[\ud800-\udfff]")
PIECE = 1 << 11  # characters; longer texts are cut at control tokens so that memory stays bounded


class TokenizerError(ValueError):
    """A tokenizer that cannot be loaded or is of a kind that the tagger cannot read."""


class Vocabulary:
    """Wraps a `tokenizers.Tokenizer`, a fast Hugging Face tokenizer, or a folder with `tokenizer.json`."""

    def __init__(self, source: Any) -> None:
        self.tokenizer = _open(source)
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        added = self.tokenizer.get_added_tokens_decoder()
        self.added: dict[int, str] = {number: token.content for number, token in added.items()}
        self.special: frozenset[int] = frozenset(number for number, token in added.items() if token.special)
        self._plain_controls = not any(token.lstrip or token.rstrip or token.single_word for token in added.values())
        self._names = {token: number for number, token in self.added.items()}

    @cached_property
    def size(self) -> int:
        """One more than the highest token id."""
        return 1 + max(self.tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)

    @cached_property
    def is_added(self) -> npt.NDArray[np.bool_]:
        """Whether each id `[V]` is an added (control) token."""
        mask = np.zeros(self.size, np.bool_)
        mask[list(self.added)] = True
        return mask

    def id_of(self, token: str) -> int | None:
        """Id of an added (control) token by its text; None when the text is no single control token."""
        return self._names.get(token)

    def encode(self, text: str) -> tuple[Ids, Ids]:
        """Ids `[n]` and the character that each token starts at `[n]`, without any added BOS or EOS.

        Byte pieces of one character all start at that character.
        """
        parts = list(self.pieces(text))
        return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])

    def pieces(self, text: str) -> Iterator[tuple[Ids, Ids, int]]:
        """As `encode`, piece by piece, with the character that each piece ends before.

        A long text is cut where the tokenizer itself cuts it.
        """
        for base, piece in self._pieces(text):
            yield *self._encode(piece, base), base + len(piece)

    def decode(self, ids: Any) -> str:
        """Text of token ids, control tokens included."""
        return str(self.tokenizer.decode([int(number) for number in ids], skip_special_tokens=False))

    def token_bytes(self) -> list[bytes]:
        """The bytes that each token id adds to the text, for all ids below `size`; b"" for unused ids."""
        table = [b""] * self.size
        plain = _byte_level if self._is_byte_level else _sentence_piece
        for token, number in self.tokenizer.get_vocab(with_added_tokens=False).items():
            table[number] = plain(token)
        for number, token in self.added.items():
            table[number] = token.encode()
        return table

    @cached_property
    def _is_byte_level(self) -> bool:
        description = json.loads(self.tokenizer.to_str())
        kinds = set(_types(description.get("decoder"))) | set(_types(description.get("pre_tokenizer")))
        return "ByteLevel" in kinds

    @cached_property
    def _cuttable(self) -> bool:
        # Metaspace, Prepend and a prefix space treat the start of a text specially: such texts are never cut.
        prefixed = self.tokenizer.encode("a", add_special_tokens=False).tokens[:1] == ["Ġa"]
        return self._is_byte_level and self._plain_controls and not prefixed

    @cached_property
    def control(self) -> re.Pattern[str]:
        """Any added token's text, the longest first, as the tokenizer matches them."""
        names = sorted((name for name in self.added.values() if name.strip()), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, names)) or r"(?!)")

    @cached_property
    def _special(self) -> re.Pattern[str]:
        names = sorted((self.added[number] for number in self.special), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, names)) or r"(?!)")

    def _pieces(self, text: str) -> Iterator[tuple[int, str]]:
        begin = last = 0
        if len(text) > PIECE and self._cuttable:
            for match in self._special.finditer(text):
                if match.start() - begin > PIECE and last > begin:
                    yield begin, text[begin:last]
                    begin = last
                last = match.start()
        yield begin, text[begin:]

    @cached_property
    def _widths(self) -> tuple[Ids, Ids] | None:
        """Characters of each token `[V]` and how many of the first are not counted as its own, for ASCII texts; None
        where ids do not say which characters they stand for."""
        description = json.loads(self.tokenizer.to_str())
        normalizer = (description.get("normalizer") or {}).get("type")
        if not self._cuttable or normalizer not in (None, "NFC"):
            return None
        lengths, leads = np.zeros(self.size, np.int32), np.zeros(self.size, np.int32)
        trims = any("trim_offsets" in part and part["trim_offsets"] for part in _parts(description["post_processor"]))
        for number, token in enumerate(self.token_bytes()):
            lengths[number] = len(token)
            leads[number] = (len(token) - len(token.lstrip(b" "))) if trims else 0
        return lengths, leads

    def _encode(self, piece: str, base: int) -> tuple[Ids, Ids]:
        if self._widths is not None and piece.isascii():
            # Without offsets the tokenizer is a quarter faster; the ids themselves say where each token starts.
            lengths, leads = self._widths
            ids = np.array(self.tokenizer.encode_batch_fast([piece], add_special_tokens=False)[0].ids, np.int32)
            ends = np.cumsum(lengths[ids], dtype=np.int32)
            if len(ids) and ends[-1] == len(piece):
                return ids, ends - lengths[ids] + leads[ids] + np.int32(base)
        if not piece.isascii():  # JSON may spell half a surrogate pair, which is no text
            piece = _HALF_PAIR.sub("\ufffd", piece)
        encoding = self.tokenizer.encode(piece, add_special_tokens=False)
        if len(encoding) <= PIECE:
            starts = np.array(encoding.offsets, np.int32).reshape(-1, 2)[:, 0]
        else:  # one at a time: the list of all offsets is many times the text
            place = encoding.token_to_chars
            every = range(len(encoding))
            starts = np.fromiter(((place(token) or (0, 0))[0] for token in every), np.int32, len(encoding))
        return np.asarray(encoding.ids, np.int32), starts + np.int32(base)


def _open(source: Any) -> Tokenizer:
    if isinstance(source, Tokenizer):
        return Tokenizer.from_str(source.to_str())  # ours alone: truncation and padding are switched off
    backend = getattr(source, "backend_tokenizer", None)
    if isinstance(backend, Tokenizer):
        return Tokenizer.from_str(backend.to_str())
    if isinstance(source, str | Path):
        file = Path(source)
        file = file / "tokenizer.json" if file.is_dir() else file
        if file.is_file():
            return Tokenizer.from_file(str(file))
        raise TokenizerError(f"no tokenizer.json in {source}; give a model folder that has one")
    raise TokenizerError(f"cannot read a tokenizer of type {type(source).__name__}; a fast tokenizer is needed")


def _parts(part: Any) -> Iterator[dict[str, Any]]:
    if isinstance(part, dict):
        yield part
        for value in part.values():
            yield from _parts(value)
    elif isinstance(part, list):
        for value in part:
            yield from _parts(value)


def _types(part: Any) -> Iterator[str]:
    return (each["type"] for each in _parts(part) if isinstance(each.get("type"), str))


def _byte_alphabet() -> dict[str, int]:
    """Characters that byte-level BPE writes for the 256 bytes (the printable ones stand for themselves)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


def _byte_level(token: str) -> bytes:
    try:
        return bytes(_ALPHABET[character] for character in token)
    except KeyError:
        return token.encode()


def _sentence_piece(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace("\u2581", " ").encode()
