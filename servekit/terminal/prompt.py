"""Read messages of one or more lines; prompt_toolkit provides editing and history, the key bindings are servekit's."""

from __future__ import annotations

import sys

from prompt_toolkit import PromptSession
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import has_focus
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.key_binding import KeyBindings, KeyPress
from prompt_toolkit.key_binding.key_processor import KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.output.vt100 import Vt100_Output

from servekit.terminal.keyboard import Keyboard

CONTINUATION = "\\"  # at the end of a line: the message continues on the next one


class Prompt:
    """Prompt for messages. The history is kept in memory only."""

    def __init__(self, keyboard: Keyboard) -> None:
        self._keyboard = keyboard
        output = Vt100_Output.from_pty(sys.stdout)
        # A terminal that does not answer a request for its cursor position would make the prompt wait.
        output.enable_cpr = False
        self._session: PromptSession[str] = PromptSession(
            FormattedText([("bold", "> ")]),
            input=keyboard.input,
            output=output,
            multiline=True,
            key_bindings=_key_bindings(),
            prompt_continuation="  ",
            reserve_space_for_menu=0,
        )

    async def ask(self) -> str | None:
        """Return the message that was typed, or None to quit."""
        try:
            # SIGINT belongs to the keyboard. The event loop reports errors in callbacks; prompt_toolkit's own handler
            # would wait for Enter.
            with self._keyboard.delivering_to(self._press):
                return await self._session.prompt_async(handle_sigint=False, set_exception_handler=False)
        except EOFError:
            return None

    def _press(self, keys: list[KeyPress]) -> bool:
        """Process keys as if they were typed. Return False if the prompt does not take keys at the moment."""
        app = self._session.app
        if not app.is_running or app.is_done or app.context is None:
            return False
        app.key_processor.feed_multiple(keys)
        app.context.copy().run(
            app.key_processor.process_keys
        )  # in the context in which bindings find their application
        return True


def _key_bindings() -> KeyBindings:
    bindings = KeyBindings()
    typing = has_focus(DEFAULT_BUFFER)  # not while searching the history

    @bindings.add("enter", filter=typing)
    def enter(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.text.endswith(CONTINUATION) and buffer.cursor_position == len(buffer.text):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @bindings.add("c-c", filter=typing)
    def interrupt(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        elif not event.app.is_done:
            event.app.exit(exception=EOFError())

    # Typed or pasted text can look like a report of the terminal, such as a colour; prompt_toolkit would parse it.
    @bindings.add(Keys.Vt100MouseEvent)
    @bindings.add(Keys.CPRResponse)
    def ignore(event: KeyPressEvent) -> None:
        pass

    return bindings
