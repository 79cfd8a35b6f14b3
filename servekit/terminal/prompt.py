"""One line to type into, or several: editing and history are prompt_toolkit's, what Ctrl-C means is ours."""

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

CONTINUES = "\\"  # at a line's end


class Prompt:
    """Asks for a message. History is in memory and goes with the program."""

    def __init__(self, keyboard: Keyboard) -> None:
        self._keyboard = keyboard
        output = Vt100_Output.from_pty(sys.stdout)
        # Asking the terminal where its cursor is would wait for one that does not answer.
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
        """What was typed; None if the user wants to leave."""
        try:
            # The keyboard has SIGINT, for good; of an error in a callback the loop tells, and asks for no Enter.
            with self._keyboard.delivering_to(self._press):
                return await self._session.prompt_async(handle_sigint=False, set_exception_handler=False)
        except EOFError:
            return None

    def _press(self, keys: list[KeyPress]) -> bool:
        """As if they were typed. False if the prompt does not listen yet, or no longer."""
        app = self._session.app
        if not app.is_running or app.is_done or app.context is None:
            return False
        app.key_processor.feed_multiple(keys)
        app.context.copy().run(app.key_processor.process_keys)  # where bindings find the application that they are of
        return True


def _key_bindings() -> KeyBindings:
    bindings = KeyBindings()
    typing = has_focus(DEFAULT_BUFFER)  # and not searching in the history

    @bindings.add("enter", filter=typing)
    def enter(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.text.endswith(CONTINUES) and buffer.cursor_position == len(buffer.text):
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

    # What looks like a terminal's own report and was typed or pasted, such as a colour: prompt_toolkit would parse it.
    @bindings.add(Keys.Vt100MouseEvent)
    @bindings.add(Keys.CPRResponse)
    def nothing(event: KeyPressEvent) -> None:
        pass

    return bindings
