"""Ask a server for tokens, for the logprobs of a prompt, and for greedy answers, through OpenAI's API."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

from msgspec import Struct
from tokenizers import Tokenizer
from tqdm import tqdm  # type: ignore[import-untyped]

from servekit.client.http_client import HttpClient, Refusal, RequestFailed
from servekit.evaluation.measurement import Answer
from servekit.evaluation.perplexity import TokenScore
from servekit.evaluation.questions import Message, Question

T = TypeVar("T")
_MAX_BYTES = 1 << 26  # of an answer; a prompt of 100,000 tokens with logprobs has some 20 MB
_RETRY_AFTER_S = (1.0, 2.0, 4.0, 8.0)


class _Model(Struct):
    id: str
    max_model_len: int | None = None  # servekit's and vLLM's


class _Models(Struct):
    data: list[_Model]


class _Tokens(Struct):
    tokens: list[int]


class _Logprobs(Struct):
    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float] | None] | None = None


class _CompletionChoice(Struct):
    text: str
    logprobs: _Logprobs | None = None


class _Completion(Struct):
    choices: list[_CompletionChoice]


class _ChatMessage(Struct):
    content: str | None = None


class _ChatToken(Struct):
    token: str


class _ChatLogprobs(Struct):
    content: list[_ChatToken] | None = None


class _ChatChoice(Struct):
    message: _ChatMessage
    logprobs: _ChatLogprobs | None = None


class _Chat(Struct):
    choices: list[_ChatChoice]


class ModelClient(HttpClient):
    """Client of the model that a server lists first, or of the named one. The methods raise RequestFailed.

    At most `concurrency` requests are open at a time. A request that fails because the server is busy, or because the
    connection is lost, is repeated up to four times.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None,
        *,
        concurrency: int,
        model: str = "",
        tokenizer: Tokenizer | None = None,
    ) -> None:
        super().__init__(url.removesuffix("/").removesuffix("/v1"), api_key)
        self.model = model
        self.max_model_len: int | None = None
        self._tokenizer = tokenizer
        self._places = asyncio.Semaphore(concurrency)

    async def find_model(self) -> None:
        """Take the model that the server lists first, unless one is named, and look up its longest sequence."""
        models = (await self.get("/v1/models", _Models, _MAX_BYTES)).data
        found = [each for each in models if self.model in ("", each.id)]
        if not found:
            listed = ", ".join(each.id for each in models[:20])
            named = f" {self.model!r}; it lists {listed}" if self.model else ""
            raise RequestFailed(f"{self.url} lists no model{named}", is_permanent=True)
        self.model, self.max_model_len = found[0].id, found[0].max_model_len

    async def encode(self, text: str, special: bool) -> list[int]:
        """Return the token ids of a text, with or without the special tokens that the model expects around it."""
        if self._tokenizer is not None:
            encoding = await asyncio.to_thread(self._tokenizer.encode, text, add_special_tokens=special)
            token_ids: list[int] = encoding.ids
            return token_ids
        body = {"model": self.model, "prompt": text, "add_special_tokens": special}
        return (await self._send("/tokenize", body, _Tokens)).tokens

    async def score(self, token_ids: list[int], scored_from: int) -> list[TokenScore]:
        """Return the model's scores of the tokens of a prompt from `scored_from` on. The first one has no logprob.

        One token is generated, because not all servers accept 0, and dropped.
        """
        assert 0 < scored_from < len(token_ids)
        body = {
            "model": self.model,
            "prompt": token_ids,
            "max_tokens": 1,
            "temperature": 0,
            "echo": True,
            "logprobs": 1,
        }
        found = _first((await self._send("/v1/completions", body, _Completion)).choices, self.url).logprobs
        logprobs = (found.token_logprobs if found else None) or []
        top = (found.top_logprobs if found else None) or [None] * len(logprobs)
        scores = [
            TokenScore(logprob, max(likely, key=likely.__getitem__) if likely else None)
            for logprob, likely in list(zip(logprobs, top, strict=False))[scored_from : len(token_ids)]
            if logprob is not None
        ]
        if len(scores) < len(token_ids) - scored_from:
            raise RequestFailed(
                f"{self.url} returns the logprobs of {len(scores)} of a prompt's last {len(token_ids) - scored_from} "
                "tokens; perplexity and choices need a server that honours echo with logprobs on /v1/completions",
                is_permanent=True,
            )
        return scores

    async def answer(self, question: Question) -> Answer:
        """Return the greedy answer to a question; of one with choices, the choice with the highest probability."""
        if question.choices is not None:
            assert question.prompt is not None
            prompt = question.prompt
            sums = [await self._logprob_of_continuation(prompt, choice) for choice in question.choices]
            return Answer(question.choices[sums.index(max(sums))])
        if question.messages is not None:
            return await self.chat(question.messages, question.max_tokens, returns_tokens=True)
        body = {
            "model": self.model,
            "prompt": question.prompt,
            "max_tokens": question.max_tokens,
            "temperature": 0,
            "logprobs": 0,  # the tokens themselves, to find the first that differs
        }
        choice = _first((await self._send("/v1/completions", body, _Completion)).choices, self.url)
        return Answer(choice.text, choice.logprobs.tokens if choice.logprobs else None)

    async def chat(self, messages: list[Message], max_tokens: int, *, returns_tokens: bool) -> Answer:
        """Return the greedy answer to a conversation. Some servers refuse to return tokens."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": 0,
        }
        if returns_tokens:
            body["logprobs"] = True
        choice = _first((await self._send("/v1/chat/completions", body, _Chat)).choices, self.url)
        content = choice.logprobs.content if choice.logprobs else None
        return Answer(choice.message.content or "", None if content is None else [each.token for each in content])

    async def _logprob_of_continuation(self, prompt: str, choice: str) -> float:
        """Return the logprob of the tokens that the choice adds to the prompt, or changes in its end."""
        before, whole = await self.encode(prompt, True), await self.encode(prompt + choice, True)
        num_same = next((i for i, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b), len(before))
        # The first token has no logprob, and a choice must have one that counts.
        scored_from = max(1, min(num_same, len(whole) - 1))
        return sum(score.logprob for score in await self.score(whole, scored_from))

    async def _send(self, path: str, body: dict[str, Any], kind: type[T]) -> T:
        async with self._places:
            for wait_s in _RETRY_AFTER_S:
                try:
                    return await self.post(path, body, kind, _MAX_BYTES)
                except RequestFailed as failure:
                    if failure.is_permanent:
                        raise
                await asyncio.sleep(wait_s)
            return await self.post(path, body, kind, _MAX_BYTES)

    def explain(self, refusal: Refusal) -> RequestFailed:
        """Return the error for a refusal; of /tokenize, which not all servers have, with the remedy."""
        if refusal.path.endswith("/tokenize") and refusal.status in (404, 405):
            return RequestFailed(
                f"{self.url} has no route /tokenize; give the model's tokenizer.json with --tokenizer",
                is_permanent=True,
            )
        return super().explain(refusal)


def _first(choices: list[T], url: str) -> T:
    if not choices:
        raise RequestFailed(f"{url} sent an answer without choices", is_permanent=True)
    return choices[0]


async def in_order(what: str, ask: Callable[[T], Coroutine[Any, Any, Any]], items: Iterable[T]) -> list[Any]:
    """Return `ask` of each item, in their order. The first failure cancels the others, and is raised.

    A terminal shows a bar with the progress.
    """
    wanted = list(items)
    with tqdm(total=len(wanted), desc=what, disable=None, leave=False) as bar:

        async def one(item: T) -> Any:
            result = await ask(item)
            bar.update()
            return result

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(item)) for item in wanted]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
    return [task.result() for task in tasks]
