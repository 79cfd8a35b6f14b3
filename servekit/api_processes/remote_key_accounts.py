"""Count requests against the limits of their API keys in the engine process, which counts for all API processes."""

from __future__ import annotations

import itertools

from servekit.api.auth.rate_limits import Limits
from servekit.api_processes import messages as ms
from servekit.api_processes.engine_client import EngineClient, RemoteRequestState
from servekit.engine.request_state import RequestState
from servekit.errors import ServekitError


class RemoteKeyAccounts:
    """The accounts of all keys, as an API process sees them."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._numbers = itertools.count()

    async def enter(self, digest: bytes, limits: Limits) -> RemoteRequestAccount:
        account = RemoteRequestAccount(self._client, next(self._numbers))
        question = ms.CountRequest(
            question_id=self._client.next_question_id(), account=account.number, digest=digest, limits=limits
        )
        try:
            await self._client.ask(question, None)
        except ServekitError:
            raise
        except BaseException:
            account.end()
            raise
        return account


class RemoteRequestAccount:
    """One request, which is counted in the engine process."""

    __slots__ = ("_client", "_has_ended", "number")

    def __init__(self, client: EngineClient, number: int) -> None:
        self.number = number
        self._client = client
        self._has_ended = False

    async def reserve(self, num_sequences: int, max_tokens: int | None, num_prompt_tokens: int) -> None:
        question = ms.ReserveOfKey(
            question_id=self._client.next_question_id(),
            account=self.number,
            num_sequences=num_sequences,
            max_tokens=max_tokens,
            num_prompt_tokens=num_prompt_tokens,
        )
        await self._client.ask(question, None)

    def charge(self, state: RequestState) -> None:
        assert isinstance(state, RemoteRequestState)
        self._client.send(ms.ChargeTokens(self.number, state.number))

    def charge_tokens(self, num_tokens: int) -> None:
        raise AssertionError("predictors are served by one API process")

    def end(self) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._client.send(ms.UncountRequest(self.number))
