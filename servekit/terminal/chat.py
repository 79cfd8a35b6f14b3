"""Chat with the model of a server in the terminal: `servekit chat`.

The program is in one of two states: it prompts for a message, or it runs a turn. A turn begins when the prompt returns
a message, and ends with the answer. Ctrl-C during a turn stops the answer. Every other Ctrl-C belongs to a prompt: to
the next one, if it arrives before that prompt is drawn. The keyboard delivers keys in the order in which they were
typed, so there is no third case.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import aclosing
from typing import Any

from servekit.client.http_client import RequestFailed
from servekit.client.safe_text import safe_line, safe_text
from servekit.terminal.client import AnswerChunk, Client
from servekit.terminal.conversation import Conversation
from servekit.terminal.keyboard import INTERRUPT, Keyboard
from servekit.terminal.process import StandardStreamFailed, run, with_standard_streams
from servekit.terminal.prompt import CONTINUATION, Prompt

HELP = """\
/new             start a new conversation
/system [TEXT]   start a new conversation with the system message TEXT, or without a system message
/help            show this help
/quit            quit, like Ctrl-D, and Ctrl-C at an empty prompt
Ctrl-C stops an answer, or clears the prompt. A \\ at the end of a line continues the message on the next line.
To send a message that begins with /, put a space before it."""
_FINISH_REASONS = {"length": "stopped at the token limit", "abort": "aborted by the server"}


def chat(url: str, api_key: str | None, system: str, sampling: Mapping[str, Any]) -> int:
    """Chat until the user quits, and return the exit code. Raises RequestFailed, StandardStreamFailed, ConfigError."""
    client, conversation = Client(url, api_key), Conversation(system)

    def start() -> int:
        is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        if is_terminal and os.environ.get("TERM") not in (None, "dumb", "unknown"):
            return run(_Session(client, conversation, sampling).run())
        return _chat_without_terminal(client, conversation, sampling)

    return with_standard_streams(start)


_DIM, _ITALIC = "\x1b[2m", "\x1b[3m"


class Answer:
    """One answer: added to the conversation, printed as it arrives, and timed."""

    def __init__(self, client: Client, conversation: Conversation, sampling: Mapping[str, Any]) -> None:
        self._client = client
        self._conversation = conversation
        self._sampling = sampling
        self._sent_s = time.monotonic()
        self._first_token_s = self._last_token_s = 0.0
        self._last_chunk = AnswerChunk("", 0)
        self.ends_in_newline = True
        self._is_reasoning = False  # what was written last is reasoning

    async def run(self) -> None:
        """Receive the answer. Cancelling it closes the connection, which aborts the request. Raises RequestFailed."""
        async with aclosing(self._client.chat(self._conversation.messages(), self._sampling)) as chunks:
            async for chunk in chunks:
                self._receive(chunk)
        self._conversation.finish()

    def _receive(self, chunk: AnswerChunk) -> None:
        self._last_chunk = chunk
        if not chunk.text and not chunk.reasoning:
            return
        self._last_token_s = time.monotonic()
        self._first_token_s = self._first_token_s or self._last_token_s
        if chunk.reasoning and sys.stdout.isatty():  # a program that reads a pipe wants the answer
            _write(_styled(safe_text(chunk.reasoning), _ITALIC))
            self.ends_in_newline, self._is_reasoning = False, True
        if chunk.text:
            self._receive_text(chunk.text)

    def _receive_text(self, text: str) -> None:
        if self._is_reasoning:
            _write("\n\n")
            self._is_reasoning = False
        self._conversation.add_to_answer(text)
        text = safe_text(text)
        _write(text)
        self.ends_in_newline = text.endswith("\n") if text else self.ends_in_newline

    def summary(self) -> str:
        """Return the figures, such as `12 tokens, 0.21 s to the first, 85 tok/s`."""
        num_tokens = self._last_chunk.num_tokens
        figures = [f"{num_tokens:,} token{'s' * (num_tokens != 1)}"]
        if self._first_token_s:
            figures.append(f"{self._first_token_s - self._sent_s:.2f} s to the first")
        if num_tokens > 1 and self._last_token_s > self._first_token_s:
            figures.append(f"{(num_tokens - 1) / (self._last_token_s - self._first_token_s):.0f} tok/s")
        reason = self._last_chunk.finish_reason
        if reason not in (None, "stop"):
            figures.append(_FINISH_REASONS.get(reason, safe_line(reason)))
        return ", ".join(figures)


# -- at a terminal -----------------------------------------------------------------------------------------------------


class _Session:
    """Alternate prompts and turns at a terminal."""

    def __init__(self, client: Client, conversation: Conversation, sampling: Mapping[str, Any]) -> None:
        self._client = client
        self._conversation = conversation
        self._sampling = sampling

    async def run(self) -> int:
        async with self._client as client:
            name = await client.model_name()
            with Keyboard() as keyboard:
                _print_notice(f"{safe_line(name)} at {client.url}; /help lists the commands, Ctrl-D quits")
                prompt = Prompt(keyboard)
                while (message := await prompt.ask()) is not None:
                    if message.startswith("/"):
                        if not _run_command(message, self._conversation, _print_notice):
                            break
                    elif message.strip():
                        await self._turn(keyboard, message)
        return 0

    async def _turn(self, keyboard: Keyboard, message: str) -> None:
        self._conversation.ask(message)
        answer = Answer(self._client, self._conversation, self._sampling)
        task = asyncio.create_task(answer.run())

        def on_key(key: str) -> bool:
            if key != INTERRUPT.key:
                return False
            keyboard.discard_waiting()  # keys typed during the answer, as a terminal itself does at Ctrl-C
            task.cancel()
            return True

        try:
            with keyboard.listening(on_key):
                await asyncio.wait([task])
        finally:
            if not task.done():  # a signal ends the program
                task.cancel()
                await asyncio.wait([task])
        if not answer.ends_in_newline:
            _write("\n")
        if task.cancelled():
            self._conversation.stop()
            _print_notice(f"stopped: {answer.summary()}")
        elif (error := task.exception()) is not None:
            self._conversation.discard_question()
            if not isinstance(error, RequestFailed):
                raise error
            _print_notice(error.message)
        else:
            _print_notice(answer.summary())


def _run_command(command: str, conversation: Conversation, notify: Callable[[str], None]) -> bool:
    """Run a line that begins with a slash. Return False to quit."""
    name, _, rest = command.strip().partition(" ")
    match name:
        case "/quit":
            return False
        case "/new":
            conversation.clear()
            notify("new conversation")
        case "/system":
            conversation.clear()
            conversation.system = rest.strip()
            notify(f"new conversation {'with this' if rest.strip() else 'without a'} system message")
        case "/help":
            _write(HELP + "\n")
        case _:
            notify(
                f"unknown command {safe_line(name)}; /help lists the commands. To send it as a message, put a space "
                "before it"
            )
    return True


# -- without a terminal ------------------------------------------------------------------------------------------------


def _chat_without_terminal(client: Client, conversation: Conversation, sampling: Mapping[str, Any]) -> int:
    """Answer each message of standard input on standard output. Raises RequestFailed for the first failure.

    There is no state to restore at the end, so SIGINT gets its default action, with which the kernel ends the process.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    with asyncio.Runner() as runner:
        try:
            for message in _messages():
                if message.startswith("/"):
                    if not _run_command(message, conversation, _ignore_notice):
                        break
                elif message.strip():
                    conversation.ask(message)
                    answer = Answer(client, conversation, sampling)
                    runner.run(answer.run())
                    if not answer.ends_in_newline:
                        _write("\n")
        finally:
            runner.run(client.__aexit__(None, None, None))
    return 0


def _messages() -> Iterator[str]:
    lines: list[str] = []
    for line in _lines():
        lines.append(line.rstrip("\n"))
        if lines[-1].endswith(CONTINUATION):
            lines[-1] = lines[-1].removesuffix(CONTINUATION)
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
            raise StandardStreamFailed(f"cannot read standard input: {error.strerror or error}") from None
        if not line:
            return
        yield line


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _print_notice(text: str) -> None:
    """Print a message of the program itself, dimmed. A model's text cannot look like it: its escapes are removed."""
    _write(_styled(f"[{text}]", _DIM) + "\n")


def _styled(text: str, style: str) -> str:
    return text if os.environ.get("NO_COLOR") else f"{style}{text}\x1b[0m"


def _ignore_notice(text: str) -> None:
    """Print no notices where standard output is not a terminal."""
