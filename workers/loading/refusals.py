"""Word the errors that refuse a model: which architecture, what servekit needs, what is missing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import transformers
from safetensors import SafetensorError

from servekit.errors import ConfigError
from workers.attention.selector import PAGED_ATTENTION

MAX_QUOTED_CHARACTERS = 300  # of another library's error message; some list hundreds of class names
_NEEDS_AN_IMAGE = re.compile("pixel_values|flattened_patches|image_embeds")
SERVED = (
    "servekit serves decoders whose every layer goes through transformers' AttentionInterface, with full or "
    "sliding-window causal attention; choose one of docs/architectures.md"
)
EMBEDS = "it embeds text (--kind embed, docs/embeddings.md), and does not continue it"  # what an encoder is for


def refusal(architecture: str, reason: str, remedy: str = SERVED) -> ConfigError:
    """Return the error for an architecture that does not run over KV pages."""
    return ConfigError(f"architecture {architecture} cannot be served: {reason}; {remedy}")


def in_one_line(error: Exception) -> str:
    """Return the error's message as one line of bounded length, cut between words.

    The type is named, too, unless it is one that transformers words for users.
    """
    text = " ".join(str(error).split())
    if len(text) > MAX_QUOTED_CHARACTERS:
        text = f"{text[:MAX_QUOTED_CHARACTERS].rpartition(' ')[0]} …"
    return text if text and isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {text}"


@contextmanager
def loading_errors_named(architecture: str) -> Iterator[None]:
    """Turn what transformers raises as it builds and fills a model into a ConfigError that names the cause."""
    try:
        yield
    except ConfigError:
        raise
    except SafetensorError as error:
        raise ConfigError(f"the model's weights are damaged or incomplete: {error}; download them again") from error
    except (ImportError, OSError, ValueError, NotImplementedError) as error:
        raise refusal(architecture, in_one_line(error)) from error
    except Exception as error:
        # Older model files (Falcon, GPT-J) choose among attention classes of their own, by the implementation's name.
        if isinstance(error, KeyError) and error.args[0] == PAGED_ATTENTION:
            reason = "its layers choose among attention classes of their own and do not call AttentionInterface"
            raise refusal(architecture, reason) from error
        if "ignore_mismatched_sizes" in str(error):
            raise ConfigError(
                "the model's weights have other shapes than its config.json describes; take both from the same source"
            ) from error
        raise _does_not_run(architecture, error) from error


@contextmanager
def forward_errors_named(architecture: str, is_language_part: bool = False) -> Iterator[None]:
    """Turn what a forward pass of transformers' own layers raises into a ConfigError.

    `is_language_part` says that the model has no parts for other inputs than text.
    """
    try:
        yield
    except Exception as error:
        if is_language_part and not _NEEDS_AN_IMAGE.search(str(error)):
            reason = f"transformers does not run its language part alone ({in_one_line(error)})"
            raise refusal(architecture, reason) from error
        raise _does_not_run(architecture, error) from error


def _does_not_run(architecture: str, error: Exception) -> ConfigError:
    if _NEEDS_AN_IMAGE.search(str(error)):
        return refusal(architecture, "it answers only with an image, and servekit sends text alone")
    return ConfigError(
        f"transformers {transformers.__version__} cannot run the {architecture} that config.json describes: "
        f"{in_one_line(error)}; compare config.json with the one that the model's makers publish"
    )
