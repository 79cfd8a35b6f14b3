"""What has to be installed: looked for by name, so that whoever asks can say what is missing before an import fails."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable

# By every stage. What only one of them needs is its own affair.
BY_ALL = ("torch", "transformers", "numpy", "safetensors", "tqdm", "msgspec", "llguidance")
PACKAGES = {"pytest_asyncio": "pytest-asyncio", "prometheus_client": "prometheus-client"}


def what_to_install(names: Iterable[str]) -> str:
    """For people, of the modules that are not there; empty if all are."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    packages = " ".join(PACKAGES.get(name, name) for name in missing)
    return f"{', '.join(missing)} cannot be imported: pip install {packages}" if missing else ""
