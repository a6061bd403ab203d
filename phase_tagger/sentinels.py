"""Marks inside the strings that a template prints, so that the rendered text says where each string went.

Two marks per string: one behind its first visible character, one behind its last, so that templates that trim, or
look at how a text begins and ends, still do the same. Each mark carries the field's number. The characters are
taken from the C1 controls (one byte each in memory, neither whitespace nor escaped by JSON), or, if the prompt holds
one of those, from private-use planes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from .formats.chat import Segment

_BASES = (0x80, 0xF0000, 0x100000, 0xE000, 0xF8000)


@dataclass(frozen=True, slots=True)
class Alphabet:
    """Characters of the marks: `open`, `close`, and eight digits."""

    open: str
    close: str
    digits: str

    def number(self, value: int) -> str:
        return "".join(self.digits[int(digit)] for digit in f"{value:o}")

    def value(self, text: str) -> int:
        return int("".join(str(self.digits.index(character)) for character in text), 8)


ALPHABETS = tuple(
    Alphabet(chr(base + 0x11), chr(base + 0x12), "".join(chr(base + 0x06 + digit) for digit in range(8)))
    for base in _BASES
)


def choose_alphabet(text: str) -> Alphabet | None:
    """The first alphabet that the text holds no character of; None if it holds some of each."""
    for alphabet in ALPHABETS:
        if not re.search(f"[{alphabet.open}{alphabet.close}{alphabet.digits}]", text):
            return alphabet
    return None


@dataclass(frozen=True, slots=True)
class Field:
    """A segment found in the rendered text at characters `[start, end)`."""

    segment: Segment
    start: int
    end: int
    number: int = -1  # of the mark; a template that prints a string twice gives two fields of one number


class Marker:
    """Hands out marks and finds them again."""

    def __init__(self, alphabet: Alphabet) -> None:
        self.alphabet = alphabet
        self.segments: list[Segment] = []
        self._pattern = re.compile(f"([{alphabet.open}{alphabet.close}])([{alphabet.digits}]+)")

    def mark(self, segment: Segment) -> str:
        """The segment's text with its two marks; text without a visible character stays as it is."""
        text = segment.text
        begin, end = len(text) - len(text.lstrip()), len(text.rstrip())
        if end <= begin:
            return text
        number = self.alphabet.number(len(self.segments))
        self.segments.append(segment)
        opened, closed = self.alphabet.open + number, self.alphabet.close + number
        return text[: begin + 1] + opened + text[begin + 1 : end] + closed + text[end:]

    def find(self, marked: Iterable[str], plain: str) -> list[Field] | None:
        """The fields in the order of the text, if `marked` without its marks is `plain`; else None.

        `marked` comes in pieces that cut no mark, so that it is never held as a whole.
        """
        opened: dict[int, int] = {}
        fields: list[Field] = []
        half: list[tuple[int, int, bool]] = []
        length = 0
        for piece in marked:
            last = 0
            for match in self._pattern.finditer(piece):
                text = piece[last : match.start()]
                if not plain.startswith(text, length):
                    return None
                length, last = length + len(text), match.end()
                number = self.alphabet.value(match[2])
                if number >= len(self.segments):
                    return None
                if match[1] == self.alphabet.open:
                    opened[number] = length
                elif number in opened:
                    start = opened.pop(number) - 1
                    fields.append(Field(self.segments[number], max(start, 0), length, number))
                else:
                    half.append((number, length, False))
            text = piece[last:]
            if not plain.startswith(text, length):
                return None
            length += len(text)
        if length != len(plain):
            return None
        half += [(number, at, True) for number, at in opened.items()]
        fields += [self._half(plain, *mark) for mark in half]
        fields = [_grow(plain, field) for field in fields]
        return sorted(fields, key=lambda field: (field.start, field.end))

    def _half(self, text: str, number: int, at: int, is_open: bool) -> Field:
        """The template cut the string: keep what is left on the side of the mark that survived."""
        segment = self.segments[number]
        wanted = segment.text.strip()
        if is_open:
            length = 1
            while length < len(wanted) and text[at - 1 : at + length] == wanted[: length + 1]:
                length += 1
            return Field(segment, at - 1, at - 1 + length, number)
        length = 0
        while length < len(wanted) and at > length and text[at - length - 1] == wanted[-length - 1]:
            length += 1
        return Field(segment, at - length, at, number)


def _grow(text: str, field: Field) -> Field:
    """Take in the string's own leading and trailing whitespace where the template kept it."""
    wanted = field.segment.text
    before, after = wanted[: len(wanted) - len(wanted.lstrip())], wanted[len(wanted.rstrip()) :]
    start, end = field.start, field.end
    if before and text.endswith(before, 0, start):
        start -= len(before)
    if after and text.startswith(after, end):
        end += len(after)
    return Field(field.segment, start, end, field.number)


def search(text: str, segments: list[Segment]) -> list[Field]:
    """Fallback: find the segments' texts in order, each behind the one before."""
    fields: list[Field] = []
    position = 0
    for segment in segments:
        wanted = segment.text.strip()
        at = text.find(wanted, position) if wanted else -1
        if at >= 0:
            fields.append(Field(segment, at, at + len(wanted)))
            position = at + len(wanted)
    return fields
