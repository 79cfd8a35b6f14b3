"""Tests of streamed text, against Python's own decoder and a character-by-character search for stop strings."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from servekit.engine.detokenizer import Detokenizer, NullDetokenizer

Tokens = st.lists(st.binary(min_size=0, max_size=4), max_size=30)


def stream(
    tokens: list[bytes], stop: tuple[str, ...] = (), include_stop: bool = False, min_tokens: int = 0
) -> tuple[list[str], Detokenizer]:
    detokenizer = Detokenizer(lambda index: tokens[index], stop, include_stop, min_tokens)
    pieces = []
    for index in range(len(tokens)):
        pieces.append(detokenizer.feed(index))
        if detokenizer.stop_string is not None:
            return pieces, detokenizer
    return [*pieces, detokenizer.finish()], detokenizer


def stopped_naively(text: str, stop: tuple[str, ...]) -> tuple[str, str | None]:
    """Read one character more each time; the first stop string that the text ends with cuts it."""
    for end in range(len(text) + 1):
        ending = [string for string in stop if text[:end].endswith(string)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[start:stop] for start, stop in pairwise(edges)]


@settings(max_examples=300, deadline=None)
@given(Tokens)
def test_pieces_concatenate_to_the_decoding_of_all_bytes(tokens: list[bytes]) -> None:
    pieces, _ = stream(tokens)
    assert "".join(pieces) == b"".join(tokens).decode("utf-8", "replace")


@settings(max_examples=500, deadline=None)
@given(st.text(), st.lists(st.integers(0, 200)))
def test_characters_split_over_tokens_are_never_broken(text: str, cuts: list[int]) -> None:
    pieces, _ = stream(split(text.encode("utf-8", "ignore"), cuts))
    assert "".join(pieces) == text.encode("utf-8", "ignore").decode()
    assert all("\ufffd" not in piece for piece in pieces if "\ufffd" not in text)


@settings(max_examples=500, deadline=None)
@given(
    st.text(alphabet="abé", max_size=40),
    st.lists(st.text(alphabet="abé", min_size=1, max_size=5), min_size=1, max_size=4),
    st.lists(st.integers(0, 80)),
)
def test_stop_strings_across_tokens_match_a_search_character_by_character(
    text: str, stop: list[str], cuts: list[int]
) -> None:
    pieces, detokenizer = stream(split(text.encode(), cuts), tuple(stop))
    assert ("".join(pieces), detokenizer.stop_string) == stopped_naively(text, tuple(stop))


@settings(max_examples=500, deadline=None)
@given(
    st.text(alphabet="abé", max_size=20),
    st.lists(st.text(alphabet="abé", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(0, 40)),
    st.booleans(),
    st.integers(0, 8),
)
def test_stop_strings_are_ignored_before_min_tokens_and_included_on_request(
    text: str, stop: list[str], cuts: list[int], include_stop: bool, min_tokens: int
) -> None:
    tokens = split(text.encode(), cuts)
    pieces, detokenizer = stream(tokens, tuple(stop), include_stop, min_tokens)
    early = b"".join(tokens[: max(min_tokens - 1, 0)]).decode("utf-8", "ignore")  # a broken character comes later
    late, found = stopped_naively(text.removeprefix(early), tuple(stop))
    assert ("".join(pieces), detokenizer.stop_string) == (early + late + (found or "") * include_stop, found)


def test_text_before_min_tokens_is_not_held_back() -> None:
    detokenizer = Detokenizer(lambda token_id: bytes([token_id]), ("ab",), min_tokens=3)
    assert [detokenizer.feed(byte) for byte in b"abaab"] == ["a", "b", "", "a", ""]
    assert detokenizer.stop_string == "ab"


@settings(max_examples=500, deadline=None)
@given(st.text(alphabet="ab", max_size=30), st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1))
def test_only_possible_beginnings_of_stop_strings_are_held_back(text: str, stop: list[str]) -> None:
    """Minimal hold-back: what is unreleased is always a beginning of some stop string."""
    detokenizer = Detokenizer(lambda index: text[index].encode(), tuple(stop))
    released = ""
    for index in range(len(text)):
        released += detokenizer.feed(index)
        if detokenizer.stop_string is not None:
            return
        held = text[len(released) : index + 1]
        assert held == "" or any(string.startswith(held) for string in stop)


def test_no_text_follows_a_stop_string() -> None:
    detokenizer = Detokenizer(lambda token_id: bytes([token_id]), ("b",))
    assert [detokenizer.feed(byte) for byte in b"abc"] == ["a", "", ""]
    assert detokenizer.finish() == "" and detokenizer.stop_string == "b"


def test_the_last_token_releases_what_is_held_back_and_may_have_no_text_itself() -> None:
    pieces = [b"one", b" \xe2\x82", b"\xac", b"end"]
    detokenizer = Detokenizer(pieces.__getitem__, stop=("  ",))
    assert [detokenizer.text_of(0, True, False), detokenizer.text_of(1, True, False)] == ["one", ""]
    assert detokenizer.text_of(3, False, True) == " \ufffd"
    stopped = Detokenizer(pieces.__getitem__, stop=("e",))
    assert stopped.text_of(0, True, True) == "on" and stopped.stop_string == "e"


def test_where_another_process_makes_the_text_there_is_none() -> None:
    detokenizer = NullDetokenizer()
    assert detokenizer.text_of(5, True, True) == detokenizer.feed(5) == detokenizer.finish() == ""
