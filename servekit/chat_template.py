"""Render a conversation with the model's chat template. Runs in a sandbox process only: templates are programs.

The renderer is transformers' own, so that what the model sees is what its makers meant; it runs Jinja in its sandbox.
"""

from __future__ import annotations

from typing import Any

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

from servekit.sandbox_jobs import Done, Outcome, Refused, RenderChat


def render_chat(job: RenderChat) -> Outcome:
    try:
        # Declared as one text, it returns a list of texts and the spans of the assistant's turns.
        rendered: Any = render_jinja_template(
            [job.messages],
            chat_template=job.template,
            add_generation_prompt=job.add_generation_prompt,
            continue_final_message=job.continue_final_message,
            **job.variables,
        )
    except (jinja2.TemplateError, ValueError, TypeError, ArithmeticError, LookupError, AttributeError) as error:
        return Refused(f"the chat template refuses these messages: {error}")
    return Done(rendered[0][0])
