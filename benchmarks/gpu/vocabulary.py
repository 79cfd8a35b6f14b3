"""A tokenizer for a model that has none: a token for each byte, and words for all other ids.

So prompts have as many tokens as characters, and every token that a random model chooses is text.
"""

from __future__ import annotations

import json
from typing import Any

from servekit.model_files import SIMULATED_MODEL_PATH


def tokenizer_file(vocab_size: int) -> dict[str, Any]:
    """What a tokenizer.json has."""
    told: dict[str, Any] = json.loads((SIMULATED_MODEL_PATH / "tokenizer.json").read_text())
    vocabulary: dict[str, int] = told["model"]["vocab"]
    vocabulary |= {f"Ġw{token_id}": token_id for token_id in range(len(vocabulary), vocab_size)}
    return told
