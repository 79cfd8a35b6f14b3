"""Define the events of an answer: content, reasoning, and tool calls with their arguments in pieces."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct


class Content(Struct, frozen=True, gc=False):
    """The next piece of the content, which is meant for the user."""

    text: str


class Reasoning(Struct, frozen=True, gc=False):
    """The next piece of the reasoning, which the model writes before its answer."""

    text: str


class CallBegins(Struct, frozen=True, gc=False):
    """A call of a function begins. Calls are numbered from 0."""

    index: int
    name: str


class CallArguments(Struct, frozen=True, gc=False):
    """The next piece of a call's arguments, which together are one JSON object."""

    index: int
    text: str


AnswerEvent = Content | Reasoning | CallBegins | CallArguments


class AnswerEvents:
    """Collects the events of one answer.

    Whitespace next to a marker is not part of the text: models write blank lines after their reasoning and before
    calls. So whitespace is held until it is known what follows.
    """

    def __init__(
        self, max_calls: int, functions: Mapping[str, str] | None = None, has_strict_calls: bool = False
    ) -> None:
        """`max_calls`: further ones are left out; 0 if the request has no tools.

        `functions`: the JSON schema of the parameters of each function that the request has, by its name.
        `has_strict_calls`: a grammar restricts calls, so text that it accepts as content is not a call.
        """
        self.max_calls = max_calls
        self.functions = functions or {}
        self.has_strict_calls = has_strict_calls
        self.is_reasoning = False  # whether the text that comes next is reasoning
        self.num_calls = 0
        self._pending: list[AnswerEvent] = []
        self._held = ""  # whitespace at the end of the text so far
        self._is_after_marker = False  # no text has followed it yet

    def take(self) -> list[AnswerEvent]:
        """Return the events since the last call."""
        pending, self._pending = self._pending, []
        return pending

    def finish(self) -> None:
        """End the answer."""
        if self._held:
            self._pending.append(Reasoning(self._held) if self.is_reasoning else Content(self._held))
            self._held = ""

    def begin_reasoning(self) -> None:
        """Handle a marker that begins reasoning."""
        self._pass_marker()
        self.is_reasoning = True

    def begin_content(self) -> None:
        """Handle a marker that begins content."""
        self._pass_marker()
        self.is_reasoning = False

    def text(self, text: str) -> None:
        """Add text: of the reasoning or of the content, whichever has begun."""
        if self._is_after_marker:
            text = text.lstrip()
            if not text:
                return
            self._is_after_marker = False
        text = self._held + text
        shown = text.rstrip()
        self._held = text[len(shown) :]
        if shown:
            self._pending.append(Reasoning(shown) if self.is_reasoning else Content(shown))

    def begin_call(self, name: str) -> None:
        """Begin the next call."""
        self.begin_content()
        self.num_calls += 1
        if self.num_calls <= self.max_calls:
            self._pending.append(CallBegins(self.num_calls - 1, name))

    def arguments(self, text: str) -> None:
        """Add to the arguments of the call that has begun last."""
        if self.num_calls <= self.max_calls:
            self._pending.append(CallArguments(self.num_calls - 1, text))

    def _pass_marker(self) -> None:
        self._held, self._is_after_marker = "", True
