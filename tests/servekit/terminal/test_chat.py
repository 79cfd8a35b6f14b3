"""Claims about the parts of `servekit chat`: the conversation, the event parser, and the command line."""

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


def messages_of(conversation: Conversation) -> list[str]:
    return [f"{message['role']}: {message['content']}" for message in conversation.messages()]


def test_a_complete_answer_is_sent_unchanged_with_the_next_question() -> None:
    conversation = Conversation("Be brief.")
    conversation.ask("hi")
    assert messages_of(conversation) == ["system: Be brief.", "user: hi"]
    conversation.add_to_answer("hel")
    conversation.add_to_answer("lo ")
    conversation.finish()
    conversation.ask("again")
    assert messages_of(conversation) == ["system: Be brief.", "user: hi", "assistant: hello ", "user: again"]


def test_a_stopped_answer_keeps_its_text_and_ends_with_an_ellipsis() -> None:
    conversation = Conversation()
    conversation.ask("hi")
    conversation.add_to_answer("hel ")
    conversation.stop()
    assert messages_of(conversation) == ["user: hi", "assistant: hel…"]


def test_stopping_a_finished_answer_changes_nothing() -> None:
    conversation = Conversation()
    conversation.ask("hi")
    conversation.add_to_answer("hello")
    conversation.finish()
    conversation.stop()
    assert messages_of(conversation) == ["user: hi", "assistant: hello"]


@pytest.mark.parametrize("chunks", [[], [""], [" "]])
def test_stopping_before_the_first_text_discards_the_question(chunks: list[str]) -> None:
    conversation = Conversation()
    conversation.ask("hi")
    for chunk in chunks:
        conversation.add_to_answer(chunk)
    conversation.stop()
    assert not messages_of(conversation)


def test_a_failed_answer_leaves_no_trace_in_the_conversation() -> None:
    conversation = Conversation()
    conversation.ask("hi")
    conversation.add_to_answer("hel")
    conversation.discard_question()
    assert not messages_of(conversation)


@given(st.lists(st.sampled_from(["finish", "stop", "discard_question"])), st.lists(st.text(), max_size=2))
def test_questions_and_answers_always_alternate(ends: list[str], chunks: list[str]) -> None:
    conversation = Conversation()
    for end in ends:
        conversation.ask("?")
        for chunk in chunks:
            conversation.add_to_answer(chunk)
        getattr(conversation, end)()
        roles = [message["role"] for message in conversation.messages()]
        assert roles == ["user", "assistant"] * (len(roles) // 2)


STREAM = b'retry: 1000\n\nevent: state\r\nid: 1\r\ndata: {"a":1}\r\n\r\n: comment\n\ndata: x\ndata:y\n\ndata:\n\n'


@given(st.lists(st.integers(0, len(STREAM))))
def test_events_do_not_depend_on_how_the_bytes_are_split(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(STREAM)]
    parser = EventParser()
    events = [event for begin, end in pairwise(edges) for event in parser.feed(STREAM[begin:end])]
    assert events == [b'{"a":1}', b"x\ny", b""]


@pytest.mark.parametrize("chunk", [b"x" * 100_000, b"data: " + b"x" * 100_000 + b"\n", b"data:\n" * 100_000])
def test_an_endless_event_is_refused(chunk: bytes) -> None:
    parser = EventParser()

    def feed() -> None:
        for _ in range(100):
            parser.feed(chunk)

    with pytest.raises(EventTooLong):
        feed()


def test_other_commands_do_not_import_terminal_packages() -> None:
    code = (
        "import sys; from servekit.cli import main; main(['version']); assert main(['serve', '--port', 'x']) == 2; "
        "assert not {'prompt_toolkit', 'rich', 'httpx2', 'servekit.terminal', 'servekit.client'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd="/")


@pytest.mark.parametrize("url", ["foo://x", "http://", "http://a b", "http://x:99999"])
@pytest.mark.parametrize("command", ["top", "chat"])
def test_an_invalid_url_is_refused_before_connecting(
    command: str, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, url]) == 2
    assert "it takes http://HOST:PORT" in capsys.readouterr().err


def test_an_api_key_that_is_not_ascii_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--api-key", "schlüssel\u2028"]) == 2
    assert "the API key contains characters that are not ASCII" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--temperature", "--top-p"])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "x"])
def test_sampling_flags_refuse_numbers_that_json_lacks(
    flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["chat", f"{flag}={value}"])
    assert ended.value.code == 2
    assert f"{value!r} is not a finite number" in capsys.readouterr().err


def test_an_unknown_flag_of_chat_points_to_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--sytem", "x"]) == 2
    assert "servekit chat --help" in capsys.readouterr().err
