"""Whitespace beside markers is no text, and other whitespace stays."""

from __future__ import annotations

from servekit.parsing.answer_events import AnswerEvents, CallArguments, CallBegins, Content, Reasoning


def test_whitespace_beside_markers_is_left_out() -> None:
    events = AnswerEvents(1)
    events.begin_reasoning()
    for text in ("\n", " Hm", ". \n", "\n"):
        events.text(text)
    events.begin_content()
    for text in ("\n\n", " a", " ", "b "):
        events.text(text)
    assert events.take() == [Reasoning("Hm"), Reasoning("."), Content("a"), Content(" b")]
    events.begin_call("f")
    events.arguments(" {}")
    assert events.take() == [CallBegins(0, "f"), CallArguments(0, " {}")]


def test_whitespace_at_the_ends_of_an_answer_stays() -> None:
    events = AnswerEvents(0)
    events.text("\n a \n")
    events.finish()
    assert events.take() == [Content("\n a"), Content(" \n")]
    events.begin_reasoning()
    events.text("b ")
    events.finish()
    assert events.take() == [Reasoning("b"), Reasoning(" ")]


def test_calls_beyond_the_bound_are_left_out() -> None:
    events = AnswerEvents(1)
    for name in ("f", "g"):
        events.begin_call(name)
        events.arguments("{}")
    assert events.take() == [CallBegins(0, "f"), CallArguments(0, "{}")] and events.num_calls == 2
