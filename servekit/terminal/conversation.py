"""What was said, as the next request repeats it. Questions and answers alternate, whatever happens to an answer."""

from __future__ import annotations

Message = dict[str, str]


class Conversation:
    """A question is open from `ask` until its answer is `finish`ed, cut by `stop` or undone by `take_back`."""

    def __init__(self, system: str = "") -> None:
        self.system = system
        self._said: list[Message] = []
        self._pieces: list[str] | None = None  # of the answer that is on its way

    @property
    def is_open(self) -> bool:
        return self._pieces is not None

    def messages(self) -> list[Message]:
        """For the body of a request."""
        return ([{"role": "system", "content": self.system}] if self.system else []) + self._said

    def ask(self, question: str) -> None:
        assert not self.is_open, "the answer before is still on its way"
        self._said.append({"role": "user", "content": question})
        self._pieces = []

    def hear(self, piece: str) -> None:
        """A piece of the answer has come."""
        assert self._pieces is not None, "nobody asked"
        self._pieces.append(piece)

    def finish(self) -> None:
        """The answer is whole."""
        assert self._pieces is not None, "nobody asked"
        self._close("".join(self._pieces))

    def stop(self) -> None:
        """The user has heard enough. What came of the answer stays, with a mark that tells the model so.

        An answer that is whole already stays so; of one that has not begun, the question goes too.
        """
        if self._pieces is None:
            return
        if heard := "".join(self._pieces).rstrip():
            self._close(heard + "\N{HORIZONTAL ELLIPSIS}")
        else:
            self.take_back()

    def take_back(self) -> None:
        """The answer failed: as if the question had not been asked."""
        assert self.is_open, "nobody asked"
        self._said.pop()
        self._pieces = None

    def begin_anew(self) -> None:
        """Forget all that was said; the system message stays."""
        assert not self.is_open, "the answer before is still on its way"
        self._said.clear()

    def _close(self, answer: str) -> None:
        self._said.append({"role": "assistant", "content": answer})
        self._pieces = None
