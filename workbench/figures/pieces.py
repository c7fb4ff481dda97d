"""Tokenizer pieces as text that can be read: byte-level and byte-fallback pieces are joined into whole characters.

A vocabulary writes its tokens in signs of its own: byte-level BPE (GPT-2, Qwen, Llama 3) spells a byte as a printable
character, so that a space is "Ġ" and a newline "Ċ"; SentencePiece writes "▁" for a space and "<0xE2>" for a byte that
no piece covers; WordPiece marks the inside of a word by "##"; a word vocabulary leaves the spaces out. One character
may be spread over several tokens, which then make one cell.
"""

import codecs
import functools
import re
from collections.abc import Sequence
from typing import NamedTuple

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Cell(NamedTuple):
    """What can be shown as one: tokens `start` up to, but without, `stop` of a turn, and their text."""

    text: str
    start: int
    stop: int


def _byte_alphabet() -> dict[str, int]:
    """The printable character of each byte in byte-level BPE: itself where it is one, else one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(hidden)}


_ALPHABET = _byte_alphabet()


@functools.lru_cache(maxsize=1 << 16)
def _byte_level(piece: str) -> bytes | None:
    """The bytes a byte-level piece spells; None where it holds other characters, as added tokens may."""
    try:
        return bytes([_ALPHABET[c] for c in piece])
    except KeyError:
        return None


@functools.lru_cache(maxsize=1 << 16)
def _sentence_piece(piece: str) -> bytes:
    byte = _BYTE.fullmatch(piece)
    return bytes([int(byte[1], 16)]) if byte else piece.replace("▁", " ").encode()


def join(pieces: Sequence[str], text: str | None = None) -> list[Cell]:
    """The pieces of one turn as cells of whole characters, in order; every token is in one cell.

    text: what the turn said, where it is known; it tells apart vocabularies that look alike, and holds the spaces that
    a word vocabulary leaves out. Bytes that make no character become U+FFFD.
    """
    said = (text or "").strip()
    every = "".join(pieces)
    if "▁" in every or any(map(_BYTE.fullmatch, pieces)):
        return _decode([_sentence_piece(p) for p in pieces], pieces)
    if any(p.startswith("##") and len(p) > 2 for p in pieces) and "##" not in said:
        return [Cell(_word_piece(p, i), i, i + 1) for i, p in enumerate(pieces)]
    if every.isascii():
        return _spaced(pieces, said) if said and said not in every else _plain(pieces)
    spelled = [_byte_level(p) for p in pieces]
    decoded = _decode(spelled, pieces)
    shown = "".join(c.text for c in decoded)
    if said and said not in shown and said in every:
        return _plain(pieces)
    if (said and said in shown) or any(c in every for c in "ĠĊĉč"):
        return decoded
    split = [c for c in decoded if c.stop - c.start > 1]
    return decoded if split and "\ufffd" not in shown else _spaced(pieces, said) if said else _plain(pieces)


def _plain(pieces: Sequence[str]) -> list[Cell]:
    return [Cell(p, i, i + 1) for i, p in enumerate(pieces)]


def _word_piece(piece: str, index: int) -> str:
    return piece[2:] if piece.startswith("##") else f" {piece}" if index else piece


def _spaced(pieces: Sequence[str], said: str) -> list[Cell]:
    """Pieces with the white space that stands between them in `said`; one that is not found there gets one space."""
    out, at = [], 0
    for i, piece in enumerate(pieces):
        found = said.find(piece, at) if piece else -1
        gap = said[at:found] if found >= 0 else ""
        if found >= 0 and not gap.strip():
            at = found + len(piece)
        else:
            gap = " " if i else ""
        out.append(Cell(gap + piece, i, i + 1))
    return out


def _decode(spelled: Sequence[bytes | None], pieces: Sequence[str]) -> list[Cell]:
    """UTF-8 over tokens; one that ends inside a character is joined with the next. None stands for its own piece."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    out: list[Cell] = []
    text, start = "", 0

    def close(stop: int) -> None:
        nonlocal text, start
        text += decoder.decode(b"", final=True)
        decoder.reset()
        if stop > start:
            out.append(Cell(text, start, stop))
        text, start = "", stop

    for i, data in enumerate(spelled):
        if data is None:
            close(i)
            out.append(Cell(pieces[i], i, i + 1))
            start = i + 1
            continue
        text += decoder.decode(data)
        if not decoder.getstate()[0]:
            close(i + 1)
    close(len(spelled))
    return out
