"""Parse the value of `--speculative`: how drafts for speculative decoding are made."""

from __future__ import annotations

import re
from posixpath import join

from msgspec import Struct
from msgspec.structs import replace

from servekit.errors import ConfigError

# Drafts that a step may verify for a sequence where K is not given. With 7, a step verifies 8 positions, which is the
# most that CPU kernels compute in the time of one. n-gram drafts cost nothing to make, and those of a small draft model
# little; the others cost more, or are seldom right beyond the fourth.
DEFAULT_MAX_DRAFTS = {"ngram": 7, "draft": 7, "self": 4, "medusa": 4, "eagle": 4, "mtp": 2}
MAX_DRAFTS = 16
QUANTIZATIONS = ("int8", "int4", "w4a8", "fp8", "nf4")
DEFAULT_QUANTIZATION = "w4a8"  # of `self`: reads the fewest bytes, and computes fastest
_LOOKUP_FIRST = "ngram+"
_FORMS = (
    "off, auto, ngram[:K], draft[:PATH][:K], self[:QUANTIZATION][:K], medusa[:PATH], eagle:PATH[:K], mtp[:K], or "
    f"{_LOOKUP_FIRST} before one of the last five, as in {_LOOKUP_FIRST}draft"
)
_WITHOUT_PATH = ("ngram", "self", "mtp")
_NUMBER = re.compile(r"\d{1,9}", re.ASCII)


class SpeculativeConfig(Struct, frozen=True):
    """A drafter, where its files are, and how many drafts a step may verify for a sequence.

    `auto` is the drafter that comes with the model. The server decides which one that is before it starts a worker.
    """

    method: str = "off"  # or auto, or one of DEFAULT_MAX_DRAFTS
    path: str = ""  # of a draft model or heads; "": those that come with the model
    max_drafts: int = 0
    quantization: str = ""  # of `self`: the format that a second copy of the weights is rounded to
    lookup_first: bool = False  # whether prompt lookup is asked before this drafter

    @property
    def name(self) -> str:
        """The drafter as users see it, for example `ngram+draft`."""
        return f"{_LOOKUP_FIRST}{self.method}" if self.lookup_first else self.method

    @property
    def is_on(self) -> bool:
        return self.method != "off"

    def directory(self, model_path: str) -> str:
        """The drafter's files: by default the folder with the method's name in the model's directory."""
        return self.path or join(model_path, self.method)


def parse_speculative(text: str) -> SpeculativeConfig:
    """Parse the value of `--speculative`, for example `ngram:5` or `draft:models/small:4`. Raises ConfigError."""
    if text.startswith(_LOOKUP_FIRST):
        behind = text.removeprefix(_LOOKUP_FIRST)
        other = _parse(behind, text)
        if other.method in ("off", "auto", "ngram"):
            raise _malformed(text, f"{behind} is no drafter that prompt lookup can be put before")
        has_number = other.method != "medusa" and _NUMBER.fullmatch(behind.rpartition(":")[2])
        max_drafts = other.max_drafts if has_number else DEFAULT_MAX_DRAFTS["ngram"]
        return replace(other, lookup_first=True, max_drafts=max_drafts)
    return _parse(text, text)


def _parse(value: str, text: str) -> SpeculativeConfig:
    """Parse a value that has one drafter. Errors name `text`, the whole value that the user gave."""
    method, *rest = value.split(":")
    if method in ("off", "auto"):
        if rest:
            raise _malformed(text, f"{method} takes no more than its name")
        return SpeculativeConfig(method, max_drafts=DEFAULT_MAX_DRAFTS["ngram"] if method == "auto" else 0)
    if method not in DEFAULT_MAX_DRAFTS:
        raise _malformed(text, f"{method!r} is no drafter")
    max_drafts = DEFAULT_MAX_DRAFTS[method]
    if rest and _NUMBER.fullmatch(rest[-1]) and method != "medusa":
        max_drafts = int(rest.pop())
        if not 1 <= max_drafts <= MAX_DRAFTS:
            default = DEFAULT_MAX_DRAFTS["ngram" if text.startswith(_LOOKUP_FIRST) else method]
            raise ConfigError(
                f"speculative = {text!r} (--speculative): K is {max_drafts}, and must be from 1 to {MAX_DRAFTS}; give "
                f"less, leave K out for {default}, or choose off for no drafts"
            )
    argument = ":".join(rest)  # a path may contain colons
    if rest and not argument:
        raise _malformed(text, "a colon is followed by nothing")
    if method == "self":
        if argument and argument not in QUANTIZATIONS:
            raise _malformed(text, f"{argument!r} is not one of the formats {', '.join(QUANTIZATIONS)}")
        return SpeculativeConfig(method, max_drafts=max_drafts, quantization=argument or DEFAULT_QUANTIZATION)
    if argument and method in _WITHOUT_PATH:
        raise _malformed(text, f"{argument!r} is not a number, and {method} has no files of its own")
    if method == "eagle" and not argument:
        raise _malformed(text, "eagle needs the path of its head")
    return SpeculativeConfig(method, argument, max_drafts)


def _malformed(text: str, why: str) -> ConfigError:
    return ConfigError(f"speculative = {text!r:.200} (--speculative): {why:.200}; it takes one of {_FORMS}")
