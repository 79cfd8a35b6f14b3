"""Where a model's files are: the embedded demo model, a local directory, or a download from Hugging Face."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from servekit.config import DEMO_MODEL
from servekit.errors import ConfigError

Argument = TypeVar("Argument")
Result = TypeVar("Result")

log = logging.getLogger("servekit")

DEMO_MODEL_PATH = Path(__file__).parent / "demo_model"
# Weights as safetensors, configuration and tokenizer as JSON or plain text. No Python, no pickles.
DOWNLOADED = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"]


def find_model(model: str) -> Path:
    """The directory that holds `model`; downloads it where it must. Raises ConfigError."""
    if model == DEMO_MODEL:
        return DEMO_MODEL_PATH
    if Path(model).is_dir():
        return Path(model).resolve()
    if model.startswith((".", "/", "~")):
        raise ConfigError(f"model {model!r}: there is no such directory")
    log.info("fetching %s from Hugging Face", model)
    try:
        return Path(snapshot_download(model, allow_patterns=DOWNLOADED))
    except HFValidationError as error:
        raise ConfigError(f"model {model!r} is neither a directory nor a Hugging Face id: {error}") from None
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(f"model {model!r} is no directory here and could not be fetched: {error}") from None


async def in_daemon_thread(function: Callable[[Argument], Result], argument: Argument) -> Result:
    """Run a call that may take minutes, in a thread that nobody waits for when the process is told to end.

    asyncio.to_thread would have the interpreter wait for the download of a model before it exits.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()

    def settle(result: Result | None, error: Exception | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        try:
            outcome: tuple[Result | None, Exception | None] = (function(argument), None)
        except Exception as error:
            outcome = (None, error)
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=run, daemon=True, name=function.__name__).start()
    return await future
