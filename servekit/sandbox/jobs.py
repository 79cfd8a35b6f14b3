"""Messages between the server and a sandbox process: frozen values, encoded as msgpack."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from servekit.request import GrammarKind


class RenderChat(Struct, frozen=True, tag="render_chat"):
    """Render a conversation as the text that the model was trained on."""

    template: str
    messages: list[dict[str, Any]]
    add_generation_prompt: bool
    continue_final_message: bool
    variables: dict[str, Any]


class CompileGrammar(Struct, frozen=True, tag="compile_grammar"):
    """Translate a grammar into the form that the worker accepts, and check that it compiles."""

    kind: GrammarKind
    text: str


class Done(Struct, frozen=True, tag="done"):
    """The result of a job that makes text."""

    text: str


class DoneBytes(Struct, frozen=True, tag="done_bytes"):
    """The result of a job that makes bytes. Only the code that gave the job knows their format."""

    payload: bytes


class Refused(Struct, frozen=True, tag="refused"):
    """The reason why a job's input is invalid."""

    message: str


Job = RenderChat | CompileGrammar
Outcome = Done | DoneBytes | Refused
