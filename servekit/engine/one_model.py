"""Make the engine of a server with one model also its registry of models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Literal, Self, cast

from servekit.config import ServeConfig
from servekit.engine.adapted_model import AdaptedModel
from servekit.engine.caller import Caller
from servekit.engine.interface import Adapters, ServedModel
from servekit.engine.model_kind import GENERATE
from servekit.engine.model_names import ANY_MODEL, model_not_found
from servekit.errors import InvalidRequest


class OneModel(ABC):
    """What makes an engine the `Models` of its server, the one `ServedModel` in it, and each `ModelUse` of that."""

    config: ServeConfig
    kind: str = GENERATE
    has_choice = False
    takes_messages = False
    has_spare_connections = True
    adapters: Adapters | None = None
    headers: Sequence[tuple[bytes, bytes]] = ()  # an answer says nothing of the choice

    @property
    def name(self) -> str:
        """The name that answers give the model."""
        return self.config.model_name

    @property
    @abstractmethod
    def max_prompt_tokens(self) -> int:
        """Tokens of the longest sequence, or of the longest input. Raises WorkerNotReady."""

    @property
    def adapter_paths(self) -> Mapping[str, str]:
        """The directory of each of its LoRA adapters, by name."""
        return {} if self.adapters is None else self.adapters.paths

    def adapters_for(self, caller: Caller) -> Mapping[str, str]:
        """The same: every caller may use them."""
        return self.adapter_paths

    @property
    def engine(self) -> Self:
        """The engine itself."""
        return self

    def served(self, caller: Caller) -> Sequence[Self]:
        """Return the model; every caller may use it."""
        return [self]

    def find(
        self,
        name: str | None,
        caller: Caller,
        conversation: Callable[[], bytes] | None = None,
        kind: str | None = None,
    ) -> Self | AdaptedModel:
        """Return the model if the name is its own, one of its adapters', or none. Raises ModelNotFound."""
        config = self.config
        if name is None or name in ANY_MODEL or name == config.model_name or name == config.model:
            return self
        if (path := self.adapter_paths.get(name)) is not None:
            return AdaptedModel(cast(ServedModel, self), name, path)
        raise model_not_found(name, chain([config.model_name], self.adapter_paths))

    def begin_use(self, caller: Caller) -> Self:
        """Return the engine. While the model loads, it refuses requests itself."""
        return self

    async def wait_for_use(self, caller: Caller) -> Self:
        """Return the engine."""
        return self

    def release(self) -> None:  # noqa: B027  # it does nothing
        """Do nothing: the model stays loaded."""

    async def load_model(self, model_id: str) -> Self:
        """Raise InvalidRequest: the one model is loaded at the start."""
        raise _has_one_model()

    def unload_model(self, model_id: str) -> Self:
        """Raise InvalidRequest: the one model stays loaded."""
        raise _has_one_model()

    def divide(
        self,
        alias: str,
        weights: Mapping[str, float],
        sticky: Literal["key", "conversation"] | None = None,
        mirror: str | None = None,
        mirror_percent: float = 100.0,
    ) -> None:
        """Raise InvalidRequest: there are no models among which an alias could divide requests."""
        raise _has_one_model()

    def remove_alias(self, alias: str) -> None:
        """Raise InvalidRequest: there are no aliases."""
        raise _has_one_model()

    def sticky(self) -> Mapping[str, Literal["key", "conversation"]]:
        """Return no aliases."""
        return {}

    def divided(self) -> Mapping[str, Mapping[str, float]]:
        """Return no aliases."""
        return {}

    def mirrored(self) -> Mapping[str, Mapping[str, float]]:
        """Return no aliases."""
        return {}

    @property
    def has_waiting(self) -> bool:
        """Return False: the model stays loaded."""
        return False

    def mirror_of(self, name: str | None, caller: Caller, kind: str) -> str | None:
        """Return None: there is no other model."""
        return None

    def note_mirrored(self, model_id: str, result: str) -> None:
        """Raise AssertionError: it is never called, because there are no copies."""
        raise AssertionError


def _has_one_model() -> InvalidRequest:
    return InvalidRequest(
        "this server has one model, which stays loaded; start it with --models FILE to load and unload several "
        "(docs/several_models.md)",
        code="not_supported",
    )
