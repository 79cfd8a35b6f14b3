"""servekit serves large language models.

docs/ARCHITECTURE.md describes its packages. No module of servekit imports torch.

`LLM`, `AsyncLLM`, `SamplingParams` and the outputs are the Python interface (docs/python.md). They are imported when
they are first used, so that `import servekit` stays cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from servekit.embedded import LLM, AsyncLLM, CompletionOutput, Logprob, RequestOutput, SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLM", "CompletionOutput", "Logprob", "RequestOutput", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'servekit' has no attribute {name!r}")
    from servekit import embedded

    return getattr(embedded, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
