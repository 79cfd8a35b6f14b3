"""Check the names of models in requests: which names stand for any model, and the error for an unknown one."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from servekit.errors import ModelNotFound

# Names that clients of one-model servers send: huggingface_hub sends "dummy", TGI's own clients "tgi".
ANY_MODEL = ("", "dummy", "tgi")
MAX_NAME_SHOWN = 100  # characters of a model's name that an error repeats
MAX_NAMES_SHOWN = 20  # names that an error lists; a server may have thousands of adapters


def listed(names: Iterable[str]) -> str:
    """Return the first names, as an error lists them. Reads no more of them than that."""
    first = list(islice(names, MAX_NAMES_SHOWN + 1))
    return ", ".join(map(repr, first[:MAX_NAMES_SHOWN])) + (" and others" if len(first) > MAX_NAMES_SHOWN else "")


def model_not_found(name: str, known: Iterable[str]) -> ModelNotFound:
    """Return the error for a name that no model has. `known` are those of the models that the caller may use."""
    shown = listed(known) or "no model that this API key may use"
    return ModelNotFound(f"The model {name[:MAX_NAME_SHOWN]!r} does not exist. This server has {shown}.", param="model")
