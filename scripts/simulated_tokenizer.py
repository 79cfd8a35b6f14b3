"""Write the simulated model's tokenizer: a token for each byte."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from servekit.engine.model_files import SIMULATED_MODEL_PATH
from servekit.engine.tokenizer import byte_level_alphabet

FILE = SIMULATED_MODEL_PATH / "tokenizer.json"


def text() -> str:
    """Return the content of the tokenizer file."""
    tokenizer = Tokenizer(models.BPE(vocab=byte_level_alphabet(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer.to_str(pretty=True)


if __name__ == "__main__":
    FILE.write_text(text())
