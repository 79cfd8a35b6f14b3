"""`servekit chat`: ask, read the answer as it comes, ask again.

Who is at work is one of two: the prompt, or a turn. A turn begins when the prompt has handed out a message, and ends
with its answer. Ctrl-C in a turn stops the answer, and any other is a prompt's: the next one's, if it comes before
that is drawn. The keyboard deals keys in the order in which they were typed, so there is no third case.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import aclosing
from typing import Any

from servekit.terminal.client import Client, Piece, ServerTrouble
from servekit.terminal.conversation import Conversation
from servekit.terminal.keyboard import INTERRUPT, Keyboard
from servekit.terminal.process import StreamTrouble, run, with_standard_streams
from servekit.terminal.prompt import CONTINUES, Prompt
from servekit.terminal.safe_text import safe_line, safe_text

HELP = """\
/new             begin a new conversation
/system [TEXT]   what the model is told before it; without TEXT nothing. Begins a new conversation
/help            this
/quit            leave, as Ctrl-D does, and Ctrl-C at an empty prompt
Ctrl-C stops an answer, or empties the prompt. A \\ at a line's end continues the message on the next.
A message that begins with / needs a space before it."""
_CUT = {"length": "cut at the most tokens it may have", "abort": "ended by the server"}


def chat(url: str, api_key: str | None, system: str, sampling: Mapping[str, Any]) -> int:
    """Talk until the user has enough; returns the exit code. Raises ServerTrouble, StreamTrouble, ConfigError."""
    client, conversation = Client(url, api_key), Conversation(system)

    def talk() -> int:
        is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        if is_terminal and os.environ.get("TERM") not in (None, "dumb", "unknown"):
            return run(_Talk(client, conversation, sampling).run())
        return _read(client, conversation, sampling)

    return with_standard_streams(talk)


class Answering:
    """One answer: read into the conversation, written as it comes, and measured."""

    def __init__(self, client: Client, conversation: Conversation, sampling: Mapping[str, Any]) -> None:
        self._client = client
        self._conversation = conversation
        self._sampling = sampling
        self._asked_s = time.monotonic()
        self._first_s = self._last_s = 0.0
        self._last = Piece("", 0)
        self.ends_in_newline = True

    async def run(self) -> None:
        """Raises ServerTrouble. When it is cancelled the connection is closed, and the server stops."""
        async with aclosing(self._client.chat(self._conversation.messages(), self._sampling)) as pieces:
            async for piece in pieces:
                self._hear(piece)
        self._conversation.finish()

    def _hear(self, piece: Piece) -> None:
        self._last = piece
        if not piece.text:
            return
        self._last_s = time.monotonic()
        self._first_s = self._first_s or self._last_s
        self._conversation.hear(piece.text)
        text = safe_text(piece.text)
        _write(text)
        self.ends_in_newline = text.endswith("\n") if text else self.ends_in_newline

    def summary(self) -> str:
        """As in `12 tokens, 0.21 s to the first, 85 tok/s`."""
        num_tokens = self._last.num_tokens
        told = [f"{num_tokens:,} token{'s' * (num_tokens != 1)}"]
        if self._first_s:
            told.append(f"{self._first_s - self._asked_s:.2f} s to the first")
        if num_tokens > 1 and self._last_s > self._first_s:
            told.append(f"{(num_tokens - 1) / (self._last_s - self._first_s):.0f} tok/s")
        reason = self._last.finish_reason
        if reason not in (None, "stop"):
            told.append(_CUT.get(reason, safe_line(reason)))
        return ", ".join(told)


# -- at a terminal -----------------------------------------------------------------------------------------------------


class _Talk:
    """Prompts and turns, alternating."""

    def __init__(self, client: Client, conversation: Conversation, sampling: Mapping[str, Any]) -> None:
        self._client = client
        self._conversation = conversation
        self._sampling = sampling

    async def run(self) -> int:
        async with self._client as client:
            name = await client.model_name()
            with Keyboard() as keyboard:
                _say(f"{safe_line(name)} at {client.url}; /help tells what can be typed, Ctrl-D leaves")
                prompt = Prompt(keyboard)
                while (message := await prompt.ask()) is not None:
                    if message.startswith("/"):
                        if not _obey(message, self._conversation, _say):
                            break
                    elif message.strip():
                        await self._turn(keyboard, message)
        return 0

    async def _turn(self, keyboard: Keyboard, message: str) -> None:
        self._conversation.ask(message)
        answering = Answering(self._client, self._conversation, self._sampling)
        task = asyncio.create_task(answering.run())

        def heard(key: str) -> bool:
            if key != INTERRUPT.key:
                return False
            keyboard.forget()  # what was typed while the answer came, as a terminal itself does at Ctrl-C
            task.cancel()
            return True

        try:
            with keyboard.listening(heard):
                await asyncio.wait([task])
        finally:
            if not task.done():  # the program is being ended
                task.cancel()
                await asyncio.wait([task])
        if not answering.ends_in_newline:
            _write("\n")
        if task.cancelled():
            self._conversation.stop()
            _say(f"stopped: {answering.summary()}")
        elif (error := task.exception()) is not None:
            self._conversation.take_back()
            if not isinstance(error, ServerTrouble):
                raise error
            _say(error.message)
        else:
            _say(answering.summary())


def _obey(command: str, conversation: Conversation, say: Any) -> bool:
    """Do what a line that begins with a slash says. False: leave."""
    name, _, rest = command.strip().partition(" ")
    match name:
        case "/quit":
            return False
        case "/new":
            conversation.begin_anew()
            say("a new conversation")
        case "/system":
            conversation.begin_anew()
            conversation.system = rest.strip()
            say(
                "a new conversation, with this system message"
                if rest.strip()
                else "a new conversation, without a system message"
            )
        case "/help":
            _write(HELP + "\n")
        case _:
            say(f"there is no {safe_line(name)}; /help tells what there is, and a space before it makes it a message")
    return True


# -- in a pipe ---------------------------------------------------------------------------------------------------------


def _read(client: Client, conversation: Conversation, sampling: Mapping[str, Any]) -> int:
    """Answer each message of standard input on standard output. Raises ServerTrouble at the first that fails.

    There is nothing to put in order at the end, so Ctrl-C ends the process wherever it is: the kernel sees to that.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    with asyncio.Runner() as runner:
        try:
            for message in _messages():
                if message.startswith("/"):
                    if not _obey(message, conversation, lambda words: None):
                        break
                elif message.strip():
                    conversation.ask(message)
                    answering = Answering(client, conversation, sampling)
                    runner.run(answering.run())
                    if not answering.ends_in_newline:
                        _write("\n")
        finally:
            runner.run(client.__aexit__(None, None, None))
    return 0


def _messages() -> Iterator[str]:
    lines: list[str] = []
    for line in _lines():
        lines.append(line.rstrip("\n"))
        if lines[-1].endswith(CONTINUES):
            lines[-1] = lines[-1].removesuffix(CONTINUES)
        else:
            yield "\n".join(lines)
            lines = []
    if lines:
        yield "\n".join(lines)


def _lines() -> Iterator[str]:
    while True:
        try:
            line = sys.stdin.readline()
        except OSError as error:
            raise StreamTrouble(f"cannot read: {error.strerror or error}") from None
        if not line:
            return
        yield line


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _say(words: str) -> None:
    """What the program itself says looks like nothing that a model can write."""
    _write(f"[{words}]\n" if os.environ.get("NO_COLOR") else f"\x1b[2m[{words}]\x1b[0m\n")
