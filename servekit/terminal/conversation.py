"""Keep the messages of a conversation, which each request sends in full. Questions and answers always alternate."""

from __future__ import annotations

Message = dict[str, str]


class Conversation:
    """Messages of a conversation.

    A question is open from `ask` until `finish`, `stop` or `discard_question` ends its answer.
    """

    def __init__(self, system: str = "") -> None:
        self.system = system
        self._messages: list[Message] = []
        self._answer: list[str] | None = None  # parts of the answer being received

    @property
    def is_open(self) -> bool:
        return self._answer is not None

    def messages(self) -> list[Message]:
        """Return all messages, for the body of a request."""
        return ([{"role": "system", "content": self.system}] if self.system else []) + self._messages

    def ask(self, question: str) -> None:
        """Add a question; its answer follows."""
        assert not self.is_open, "the answer to the last question has not ended"
        self._messages.append({"role": "user", "content": question})
        self._answer = []

    def add_to_answer(self, text: str) -> None:
        """Add a part of the answer."""
        assert self._answer is not None, "no question is open"
        self._answer.append(text)

    def finish(self) -> None:
        """End the answer, which is complete."""
        assert self._answer is not None, "no question is open"
        self._close("".join(self._answer))

    def stop(self) -> None:
        """End the answer at the user's request; its text stays, with an ellipsis that shows the model the cut.

        A complete answer does not change. If there is no text yet, the question is discarded.
        """
        if self._answer is None:
            return
        text = "".join(self._answer).rstrip()
        if text:
            self._close(text + "\N{HORIZONTAL ELLIPSIS}")
        else:
            self.discard_question()

    def discard_question(self) -> None:
        """Remove the open question and its partial answer, because the answer failed."""
        assert self.is_open, "no question is open"
        self._messages.pop()
        self._answer = None

    def clear(self) -> None:
        """Remove all messages except the system message."""
        assert not self.is_open, "the answer to the last question has not ended"
        self._messages.clear()

    def _close(self, answer: str) -> None:
        self._messages.append({"role": "assistant", "content": answer})
        self._answer = None
