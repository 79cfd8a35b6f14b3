"""Packages that must be installed, checked by name, so that the message comes before an import fails."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable

# A stage that needs more checks for it itself.
REQUIRED_BY_ALL_STAGES = ("torch", "transformers", "numpy", "safetensors", "tqdm", "msgspec", "llguidance")
REQUIRED_BY_SERVER = ("starlette", "uvicorn", "uvloop", "httptools", "prometheus_client")
PACKAGES = {"pytest_asyncio": "pytest-asyncio", "prometheus_client": "prometheus-client"}


def installation_hint(names: Iterable[str]) -> str:
    """Say which modules are missing and how to install them; empty if none is."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    packages = " ".join(PACKAGES.get(name, name) for name in missing)
    return f"{', '.join(missing)} cannot be imported: pip install {packages}" if missing else ""
