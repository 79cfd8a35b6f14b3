"""A tokenizer for models without one: a token for each byte, and an invented word for every other id.

So a prompt has as many tokens as characters, and every token that a random model chooses is text.
"""

from __future__ import annotations

import json
from typing import Any

from servekit.engine.model_files import SIMULATED_MODEL_PATH


def tokenizer_file(vocab_size: int) -> dict[str, Any]:
    """Return the contents of a tokenizer.json."""
    contents: dict[str, Any] = json.loads((SIMULATED_MODEL_PATH / "tokenizer.json").read_text())
    vocabulary: dict[str, int] = contents["model"]["vocab"]
    vocabulary |= {f"Ġw{token_id}": token_id for token_id in range(len(vocabulary), vocab_size)}
    return contents
