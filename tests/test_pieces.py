"""Pieces become text: whole characters, every token in one cell, whatever vocabulary wrote them."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.figures.pieces import _ALPHABET, Cell, join

SPELLING = {byte: sign for sign, byte in _ALPHABET.items()}


def byte_level(text: str, cuts: random.Random) -> list[str]:
    """The text as a byte-level vocabulary would spell it, cut anywhere, also inside a character."""
    signs = [SPELLING[b] for b in text.encode()]
    pieces: list[str] = []
    while signs:
        size = cuts.randint(1, 4)
        pieces.append("".join(signs[:size]))
        signs = signs[size:]
    return pieces


def test_the_alphabet_is_gpt2s():
    assert len(_ALPHABET) == 256 and len(set(_ALPHABET.values())) == 256
    assert {SPELLING[b] for b in b" \n\t!\xc3"} == {"Ġ", "Ċ", "ĉ", "!", "Ã"} and SPELLING[0] == "Ā"


@given(st.text(st.characters(codec="utf-8"), max_size=30), st.integers(0, 99))
def test_byte_level_pieces_give_the_text_back(text, seed):
    pieces = byte_level(text, random.Random(seed))
    cells = join(pieces, text)
    assert [c.start for c in cells] == [0, *(c.stop for c in cells)][: len(cells)]
    assert (cells[-1].stop if cells else 0) == len(pieces)
    if text.strip() and not text.isascii():
        assert "".join(c.text for c in cells) == text
        assert "\ufffd" in text or not any("\ufffd" in c.text for c in cells)


@pytest.mark.parametrize(
    ("pieces", "text", "expected"),
    [
        (["take", "cushion", "<end>"], "take cushion", ["take", " cushion", " <end>"]),
        (["Ġtake", "ĠcafÃ", "©", "Ċ", "<|im_end|>"], "take café", [" take", " café", "\n", "<|im_end|>"]),
        (["ðŁ", "ĺ", "Ģ", "!"], "😀!", ["😀", "!"]),
        (["▁take", "▁", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>", "</s>"], None, [" take", " ", "😀", "</s>"]),
        (["un", "##break", "able"], None, ["un", "break", " able"]),
        (["café", " noir"], "café noir", ["café", " noir"]),
        (["Ġa", "Ã", "Ċ"], None, [" a", "\ufffd\n"]),
        (["Ġok", "ðŁ"], None, [" ok", "\ufffd"]),
        (["<｜end▁of｜>"], None, ["<｜end of｜>"]),
        ([], "", []),
    ],
)
def test_each_kind_of_vocabulary(pieces, text, expected):
    assert [c.text for c in join(pieces, text)] == expected


def test_a_character_over_three_tokens_is_one_cell():
    assert join(["Ġ", "ðŁ", "ĺ", "Ģ"], "😀") == [Cell(" ", 0, 1), Cell("😀", 1, 4)]
