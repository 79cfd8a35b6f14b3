"""What others wrote, made harmless for a terminal.

A model's output can hold anything: an escape sequence that retitles the window, fills the clipboard or answers in the
user's place, or marks that show a line in another order than it is. The rule is per character and needs no memory, so
text may come in any pieces: without its ESC (or its C1 twin) an escape sequence is only letters.

Seen afterwards: controls as pictures of themselves, a tab as four spaces. Gone: format characters, which by their
nature cannot be seen (Unicode's Cf: bidirectional marks, overrides and isolates, zero-width spaces, tags). Some of them
stay, because words and emoji need them: the joiner, the non-joiner and the number signs of Indic and Semitic scripts.
"""

from __future__ import annotations

import re

_DELETE, _REPLACEMENT, _PICTURES = 0x7F, "\N{REPLACEMENT CHARACTER}", 0x2400
_UNSAFE = re.compile(
    r"\r\n|[\x00-\x09\x0b-\x1f\x7f-\x9f"  # C0, DEL and C1, but for the newline
    r"\u2028\u2029\ud800-\udfff"  # the other ways to end a line; halves of characters
    r"\xad\u061c\u180e\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    r"\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0001-\U000e007f]"
)
_IN_ITS_PLACE = {
    "\r\n": "\n",
    "\t": "    ",
    "\u2028": "\n",
    "\u2029": "\n",
    chr(_DELETE): "\N{SYMBOL FOR DELETE}",
    **{chr(control): chr(_PICTURES + control) for control in range(0x20) if control != 0x09},
    **dict.fromkeys(map(chr, (*range(0x80, 0xA0), *range(0xD800, 0xE000))), _REPLACEMENT),
}


def safe_text(text: str) -> str:
    """Text whose only control character is the newline, and which is read in the order in which it stands."""
    return _UNSAFE.sub(lambda found: _IN_ITS_PLACE.get(found[0], ""), text)


def safe_line(text: str) -> str:
    """The same, on one line."""
    return safe_text(text).replace("\n", " ")
