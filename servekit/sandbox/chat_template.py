"""Render a conversation with a chat template. Runs only in a sandbox process, because templates are programs.

The renderer is that of transformers, which runs Jinja in Jinja's own sandbox, so the text equals that of training.
"""

from __future__ import annotations

from typing import Any

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

from servekit.sandbox.jobs import DoneLong, Outcome, Refused, RenderChat


def render_chat(job: RenderChat) -> Outcome:
    """Return the conversation as text, or why the template refuses it."""
    try:
        # Its annotations say that it returns one text. It returns a list of texts, and the spans of assistant turns.
        rendered: Any = render_jinja_template(
            [job.messages],
            chat_template=job.template,
            add_generation_prompt=job.add_generation_prompt,
            continue_final_message=job.continue_final_message,
            **job.variables,
        )
        return DoneLong(memoryview(rendered[0][0].encode()))
    except (jinja2.TemplateError, ValueError, TypeError, ArithmeticError, LookupError, AttributeError) as error:
        return Refused(f"the chat template refuses these messages: {error}")
