"""Checks that formats share: of configurations and of tensors that may come from an attacker."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from servekit.errors import ConfigError

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
MAX_QUOTED_CHARACTERS = 60  # of a value or a name from a file


def quoted(value: Any) -> str:
    """Return a value from a file for an error message, bounded in length and in one line."""
    text = " ".join(repr(value)[: 2 * MAX_QUOTED_CHARACTERS].split())
    return text if len(text) <= MAX_QUOTED_CHARACTERS else f"{text[:MAX_QUOTED_CHARACTERS]} …"


def choice(config: Mapping[str, Any], key: str, known: Iterable[Any], default: Any, what: str) -> Any:
    """Return config[key], or the default where it is missing or null.

    Raises ConfigError unless it is one of the known values; `what` names the format.
    """
    value = config.get(key)
    if value is None:
        value = default
    known = list(known)
    # 1 == True == 1.0, so the types are compared, too.
    if any(value == option and type(value) is type(option) for option in known):
        return value
    raise ConfigError(
        f"the weights are quantized in the format {what} with {key} = {quoted(value)}, and servekit reads "
        f"{' or '.join(map(str, known))}; serve another checkpoint of the same model"
    )


def tensor(
    tensors: Mapping[str, Tensor],
    suffix: str,
    name: str,
    dtypes: Iterable[torch.dtype],
    shape: tuple[int | None, ...],
) -> Tensor:
    """Return a matrix's tensor. Raises ConfigError if it is missing or has another dtype or shape.

    None in `shape` allows any size but zero.
    """
    found = tensors.get(suffix)
    if found is None:
        raise ConfigError(f"the weights lack {_shortened(name)}{suffix}; download the model again")
    dtypes = tuple(dtypes)
    is_shaped = len(found.shape) == len(shape) and all(
        size == wanted or (wanted is None and size > 0) for size, wanted in zip(found.shape, shape, strict=True)
    )
    if found.dtype not in dtypes or not is_shaped:
        wanted_shape = ", ".join("any" if size is None else str(size) for size in shape)
        raise ConfigError(
            f"{_shortened(name)}{suffix} is {_dtype(found.dtype)} {list(found.shape)}, and must be "
            f"{' or '.join(map(_dtype, dtypes))} [{wanted_shape}]; the files do not belong together"
        )
    return found


def finite(values: Tensor, suffix: str, name: str) -> Tensor:
    """Return a tensor of scales. Raises ConfigError if one is not finite: every answer would be."""
    # An infinite or undefined number makes the sum so; a sum that overflows is looked at once more.
    if not torch.isfinite(values.double().sum()) and not bool(torch.isfinite(values.float()).all()):
        raise ConfigError(f"{_shortened(name)}{suffix} holds numbers that are not finite; download the model again")
    return values


def refused(name: str, reason: str) -> ConfigError:
    """Return the error for a matrix whose tensors contradict each other."""
    return ConfigError(f"{_shortened(name)} {reason}; the files do not belong together")


def _shortened(name: str) -> str:
    return name if len(name) <= 200 else f"{name[:200]} …"


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
