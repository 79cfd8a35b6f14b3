"""Make untrusted text safe to print on a terminal.

A model's output can contain escape sequences that retitle the window, fill the clipboard or type in the user's place,
and marks that display a line in another order than it has. The rule works per character and keeps no state, so text can
be made safe in pieces: without its ESC (or the C1 equivalent) an escape sequence is only letters.

Control characters become their Unicode pictures, a tab becomes four spaces. Invisible format characters are removed
(Unicode's Cf: bidirectional marks, overrides and isolates, zero-width spaces, tags). Some of them stay, because words
and emoji need them: the joiner, the non-joiner and the number signs of Indic and Semitic scripts.
"""

from __future__ import annotations

import re

_DELETE, _REPLACEMENT, _PICTURES = 0x7F, "\N{REPLACEMENT CHARACTER}", 0x2400
_UNSAFE = re.compile(
    r"\r\n|[\x00-\x09\x0b-\x1f\x7f-\x9f"  # C0, DEL and C1, except the newline
    r"\u2028\u2029\ud800-\udfff"  # other line separators; surrogates
    r"\xad\u061c\u180e\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    r"\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0001-\U000e007f]"
)
_REPLACEMENTS = {
    "\r\n": "\n",
    "\t": "    ",
    "\u2028": "\n",
    "\u2029": "\n",
    chr(_DELETE): "\N{SYMBOL FOR DELETE}",
    **{chr(control): chr(_PICTURES + control) for control in range(0x20) if control != 0x09},
    **dict.fromkeys(map(chr, (*range(0x80, 0xA0), *range(0xD800, 0xE000))), _REPLACEMENT),
}


def safe_text(text: str) -> str:
    """Return text whose only control character is the newline, and which displays in its logical order."""
    return _UNSAFE.sub(lambda match: _REPLACEMENTS.get(match[0], ""), text)


def safe_line(text: str) -> str:
    """Return the same on one line: spaces replace newlines."""
    return safe_text(text).replace("\n", " ")
