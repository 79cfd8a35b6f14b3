"""Claims about text printed on a terminal: nothing that a model writes can control the terminal."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servekit.client.safe_text import safe_line, safe_text

# The Unicode format characters that words and emoji need: number signs of Arabic, Syriac and Kaithi, and the joiners.
KEPT = {*map(chr, (*range(0x600, 0x606), 0x6DD, 0x70F, 0x890, 0x891, 0x8E2, 0x110BD, 0x110CD)), "\u200c", "\u200d"}


def test_all_control_and_format_characters_are_replaced_or_removed() -> None:
    shown = safe_text("".join(map(chr, range(0x110000))))
    categories = {character: unicodedata.category(character) for character in set(shown)}
    assert {character for character, category in categories.items() if category == "Cc"} == {"\n"}
    assert {character for character, category in categories.items() if category == "Cf"} == KEPT
    assert not set(categories.values()) & {"Cs", "Zl", "Zp"}
    shown.encode()  # fails if there is a surrogate


def test_all_other_characters_are_kept() -> None:
    ordinary = [
        character
        for character in map(chr, range(0x110000))
        if unicodedata.category(character) not in ("Cc", "Cf", "Cn", "Cs", "Zl", "Zp")
    ]
    text = "".join(ordinary)
    assert safe_text(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "plain, with\nlines\n\nand spaces  ",
        "e\u0301 combines, \N{WOMAN}\u200d\N{PERSONAL COMPUTER} is joined, \N{HEAVY BLACK HEART}\ufe0f is red",
        "العربية עברית नमस्ते 漢字 می\u200cخواهم",  # noqa: RUF001
    ],
)
def test_ordinary_text_is_unchanged(text: str) -> None:
    assert safe_text(text) == text


@pytest.mark.parametrize(
    ("hostile", "shown"),
    [
        ("\x1b[2J\x1b[31mred", "␛[2J␛[31mred"),
        ("\x1b]0;title\x07", "␛]0;title␇"),
        ("\x1b]52;c;cm0gLXJm\x1b\\", "␛]52;c;cm0gLXJm␛\\"),
        ("\x9b31m", "�31m"),
        ("safe\rover", "safe␍over"),
        ("a\r\nb\tc", "a\nb    c"),
        ("\u202egpj.exe\u202c", "gpj.exe"),
        ("a\u2028b", "a\nb"),
        ("\ud83d", "�"),
        ("x\x7f\x08y", "x␡␈y"),
    ],
)
def test_terminal_controls_become_visible_or_are_removed(hostile: str, shown: str) -> None:
    assert safe_text(hostile) == shown
    assert "\n" not in safe_line(hostile)


@given(st.lists(st.text(st.characters(exclude_categories=())), max_size=5))
def test_no_escape_sequence_can_be_assembled_from_chunks(chunks: list[str]) -> None:
    shown = "".join(map(safe_text, chunks))
    assert all(character == "\n" or unicodedata.category(character) != "Cc" for character in shown)
