"""Claims about `servekit chat`'s parts: the conversation, the stream's events, and what is imported for it."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servekit.cli import main
from servekit.terminal.conversation import Conversation
from servekit.terminal.event_parser import EventParser, EventTooLong


def said(conversation: Conversation) -> list[str]:
    return [f"{message['role']}: {message['content']}" for message in conversation.messages()]


def test_a_whole_answer_is_repeated_as_it_was() -> None:
    conversation = Conversation("Be brief.")
    conversation.ask("hi")
    assert said(conversation) == ["system: Be brief.", "user: hi"]
    conversation.hear("hel")
    conversation.hear("lo ")
    conversation.finish()
    conversation.ask("again")
    assert said(conversation) == ["system: Be brief.", "user: hi", "assistant: hello ", "user: again"]


def test_a_stopped_answer_stays_as_far_as_it_came_and_is_marked() -> None:
    conversation = Conversation()
    conversation.ask("hi")
    conversation.hear("hel ")
    conversation.stop()
    assert said(conversation) == ["user: hi", "assistant: hel…"]


def test_to_stop_what_has_ended_changes_nothing() -> None:
    conversation = Conversation()
    conversation.ask("hi")
    conversation.hear("hello")
    conversation.finish()
    conversation.stop()
    assert said(conversation) == ["user: hi", "assistant: hello"]


@pytest.mark.parametrize("heard", [[], [""], [" "]])
def test_of_an_answer_stopped_before_it_began_the_question_goes_too(heard: list[str]) -> None:
    conversation = Conversation()
    conversation.ask("hi")
    for piece in heard:
        conversation.hear(piece)
    conversation.stop()
    assert not said(conversation)


def test_a_failed_answer_is_as_if_nobody_had_asked() -> None:
    conversation = Conversation()
    conversation.ask("hi")
    conversation.hear("hel")
    conversation.take_back()
    assert not said(conversation)


@given(st.lists(st.sampled_from(["finish", "stop", "take_back"])), st.lists(st.text(), max_size=2))
def test_questions_and_answers_alternate_however_answers_end(ends: list[str], pieces: list[str]) -> None:
    conversation = Conversation()
    for end in ends:
        conversation.ask("?")
        for piece in pieces:
            conversation.hear(piece)
        getattr(conversation, end)()
        roles = [message["role"] for message in conversation.messages()]
        assert roles == ["user", "assistant"] * (len(roles) // 2)


STREAM = b'retry: 1000\n\nevent: state\r\nid: 1\r\ndata: {"a":1}\r\n\r\n: comment\n\ndata: x\ndata:y\n\ndata:\n\n'


@given(st.lists(st.integers(0, len(STREAM))))
def test_events_are_the_same_in_whatever_pieces_they_come(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(STREAM)]
    parser = EventParser()
    events = [event for begin, end in pairwise(edges) for event in parser.feed(STREAM[begin:end])]
    assert events == [b'{"a":1}', b"x\ny", b""]


@pytest.mark.parametrize("piece", [b"x" * 100_000, b"data: " + b"x" * 100_000 + b"\n", b"data:\n" * 100_000])
def test_an_event_without_end_is_given_up(piece: bytes) -> None:
    parser = EventParser()

    def feed() -> None:
        for _ in range(100):
            parser.feed(piece)

    with pytest.raises(EventTooLong):
        feed()


def test_other_commands_load_nothing_of_it() -> None:
    code = (
        "import sys; from servekit.cli import main; main(['version']); assert main(['serve', '--port', 'x']) == 2; "
        "assert not {'prompt_toolkit', 'rich', 'httpx2', 'servekit.terminal'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd="/")


@pytest.mark.parametrize("url", ["foo://x", "http://", "http://a b", "http://x:99999"])
@pytest.mark.parametrize("command", ["top", "chat"])
def test_a_wrong_address_is_told_at_once(command: str, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, url]) == 2
    assert "it takes http://HOST:PORT" in capsys.readouterr().err


def test_a_key_that_fits_no_header_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--api-key", "schlüssel\u2028"]) == 2
    assert "API key" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--temperature", "--top-p"])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "x"])
def test_what_is_no_number_of_jsons_is_told(flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["chat", f"{flag}={value}"])
    assert ended.value.code == 2
    assert f"{value!r} is no finite number" in capsys.readouterr().err


def test_an_unknown_flag_is_told_with_where_to_look(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--sytem", "x"]) == 2
    assert "servekit chat --help" in capsys.readouterr().err
