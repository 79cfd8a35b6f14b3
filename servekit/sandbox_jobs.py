"""What the server asks of a sandbox process, and what it answers: frozen values, msgpack on the wire."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from servekit.generation_request import GrammarKind


class RenderChat(Struct, frozen=True, tag="render_chat"):
    """A conversation as the text that the model was trained to see."""

    template: str
    messages: list[dict[str, Any]]
    add_generation_prompt: bool
    continue_final_message: bool
    variables: dict[str, Any]


class CompileGrammar(Struct, frozen=True, tag="compile_grammar"):
    """A grammar in the form in which the worker takes it, after it was seen to compile."""

    kind: GrammarKind
    text: str


class Done(Struct, frozen=True, tag="done"):
    """What came out."""

    text: str


class Refused(Struct, frozen=True, tag="refused"):
    """What is wrong with what was sent."""

    message: str


Job = RenderChat | CompileGrammar
Outcome = Done | Refused
