"""Define what `generate` and `chat` return. The names are those of vLLM."""

from __future__ import annotations

from array import array

from msgspec import Struct

from servekit.api.responses.chat_message import ChatMessageAnswer, ChatMessageReader
from servekit.api.responses.collect import Answer, usage_of
from servekit.api.schemas.common_fields import Usage
from servekit.api.schemas.openai import ToolCall
from servekit.engine.client_queue import TokenDelta
from servekit.engine.request_state import RequestState
from servekit.engine.tokenizer import Tokenizer
from servekit.parsing.chat_format import AnswerFormat
from servekit.protocol.messages import TokenLogprobs


class Logprob(Struct, frozen=True):
    """The model's log-probability of one token at one position."""

    logprob: float  # natural logarithm, before any sampling parameter
    rank: int | None  # 1 is the likeliest; None for a token that is not among the likeliest ones that were asked for
    decoded_token: str


class CompletionOutput(Struct, frozen=True, kw_only=True):
    """One answer to a prompt. In a stream: what there is of it so far."""

    index: int  # among the answers to its prompt
    text: str  # of a chat: its content, without reasoning and tool calls
    delta: str  # the text since the previous output of a stream; without a stream, all of it
    packed_token_ids: array[int]  # 32-bit integers, which take a tenth of the memory of a list
    cumulative_logprob: float | None  # the sum over all tokens; None if logprobs were not asked for
    logprobs: list[dict[int, Logprob]] | None  # for each token: its own, and those of the likeliest ones, by token id
    finish_reason: str | None  # stop, length, deadline or abort; None while the answer goes on
    stop_reason: str | int | None  # the stop string or stop token that ended it; None for the model's own end
    reasoning: str = ""  # of a chat, if the model writes some
    tool_calls: tuple[ToolCall, ...] = ()  # of a chat with tools, when it has ended

    @property
    def token_ids(self) -> list[int]:
        """The token ids of the answer, with those of its reasoning and of its end."""
        return self.packed_token_ids.tolist()


class RequestOutput(Struct, frozen=True, kw_only=True):
    """The answers to one prompt."""

    request_id: str
    prompt: str | None  # its text; None if it was given as token ids
    packed_prompt_token_ids: array[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None  # for each token of the prompt; None for the first one
    outputs: list[CompletionOutput]  # n of them; with `best_of`, the likeliest first
    finished: bool
    usage: Usage  # how many tokens it took

    @property
    def prompt_token_ids(self) -> list[int]:
        """The token ids of the prompt."""
        return self.packed_prompt_token_ids.tolist()

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that were found in the prefix cache."""
        return self.usage.cached_tokens


class _AnswerReader:
    """Collects one answer."""

    def __init__(
        self, index: int, tokenizer: Tokenizer, wants_logprobs: bool, answer_format: AnswerFormat | None
    ) -> None:
        self.answer: Answer
        if answer_format is None:
            self.answer = Answer(index)
        else:
            reader = ChatMessageReader(answer_format.make_parser())
            self.answer = ChatMessageAnswer(index, False, reader, answer_format.call_id_length)
        self._tokenizer = tokenizer
        self._token_ids = array("i")
        self._logprobs: list[dict[int, Logprob]] | None = [] if wants_logprobs else None
        self._cumulative_logprob = 0.0
        self._num_characters = 0  # that the previous output had

    def add(self, delta: TokenDelta) -> None:
        self.answer.add((delta,))
        if delta.token_id is None:
            return
        self._token_ids.append(delta.token_id)
        if self._logprobs is not None and delta.logprobs is not None:
            self._logprobs.append(logprobs_of(delta.token_id, delta.logprobs, self._tokenizer))
            self._cumulative_logprob += delta.logprobs.logprob

    def output(self, index: int) -> CompletionOutput:
        answer = self.answer
        text, reasoning, calls = answer.text, "", []
        if isinstance(answer, ChatMessageAnswer):
            text, reasoning = answer.content, answer.reasoning
            calls = answer.tool_calls() if answer.is_finished else []
        delta, self._num_characters = text[self._num_characters :], len(text)
        reason = answer.finish_reason if answer.is_finished else None
        return CompletionOutput(
            index=index,
            text=text,
            delta=delta,
            packed_token_ids=self._token_ids[:],
            cumulative_logprob=None if self._logprobs is None else self._cumulative_logprob,
            logprobs=None if self._logprobs is None else list(self._logprobs),
            finish_reason=None if reason is None else reason.value,
            stop_reason=answer.stop_reason if answer.is_finished else None,
            reasoning=reasoning,
            tool_calls=tuple(calls),
        )


class OutputReader:
    """Collects the answers to one prompt from the deltas of its request."""

    def __init__(
        self, request_id: str, state: RequestState, tokenizer: Tokenizer, answer_format: AnswerFormat | None
    ) -> None:
        self._request_id = request_id
        self._state = state
        self._tokenizer = tokenizer
        wants_logprobs = state.request.logprobs is not None
        self._answers = [
            _AnswerReader(index, tokenizer, wants_logprobs, answer_format) for index in range(state.num_answers)
        ]
        self._num_unfinished = len(self._answers)

    @property
    def is_finished(self) -> bool:
        return self._num_unfinished == 0

    def add(self, deltas: list[TokenDelta]) -> None:
        for delta in deltas:
            self._answers[delta.index].add(delta)
            self._num_unfinished -= delta.finish_reason is not None

    def output(self) -> RequestOutput:
        """Return what there is so far."""
        request, answers = self._state.request, self._answers
        if request.best_of > request.n:
            answers = sorted(answers, key=lambda each: each.answer.mean_logprob, reverse=True)[: request.n]
        prompt = request.prompts[0].content
        return RequestOutput(
            request_id=self._request_id,
            prompt=prompt if isinstance(prompt, str) else None,
            packed_prompt_token_ids=self._state.prompt_token_ids(0),
            prompt_logprobs=self._prompt_logprobs(),
            outputs=[each.output(index) for index, each in enumerate(answers)],
            finished=self.is_finished,
            usage=usage_of(self._state, sum(each.answer.num_tokens for each in answers)),
        )

    def _prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """Return the logprobs of the prompt, if they were asked for, and are complete."""
        if self._state.request.prompt_logprobs is None:
            return None
        token_ids, known = self._state.prompt_token_ids(0), self._state.prompt_logprobs(0)
        if len(known) + 1 < len(token_ids):
            return None
        pairs = zip(token_ids[1:], known, strict=True)
        return [None, *(logprobs_of(token_id, each, self._tokenizer) for token_id, each in pairs)]


def logprobs_of(token_id: int, known: TokenLogprobs, tokenizer: Tokenizer) -> dict[int, Logprob]:
    """Return the logprobs at one position, by token id: that of the token, and those of the likeliest ones."""
    found = {token_id: Logprob(known.logprob, None, tokenizer.decode([token_id]))}
    for rank, (top_id, logprob) in enumerate(known.top, start=1):
        found[top_id] = Logprob(logprob, rank, tokenizer.decode([top_id]))
    return found
