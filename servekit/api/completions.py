"""OpenAI's words for a request's answers: completions and chat completions, whole and in chunks."""

from __future__ import annotations

import time
from codecs import getincrementaldecoder
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Protocol

from msgspec import UNSET, Struct, UnsetType

from servekit.api.answers import Answer
from servekit.client_queue import TokenDelta
from servekit.messages import TokenLogprobs
from servekit.schemas.openai import (
    ChatAnswer,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatDelta,
    ChatLogprob,
    ChatLogprobs,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
    OpenAIFields,
    OpenAIUsage,
    PromptLogprob,
    PromptTokensDetails,
    TopLogprob,
    finish_reason,
)
from servekit.sequence import FinishReason
from servekit.submission import Submission
from servekit.tokenizer import Tokenizer

PromptLogprobs = list[dict[int, PromptLogprob] | None]


class Teller(Protocol):
    """One of the two below."""

    tells_logprobs: bool

    def response(self, prompts: list[list[Answer]]) -> Struct: ...
    def chunks(self, deltas: list[TokenDelta]) -> Iterator[Struct]: ...
    def last_chunks(self) -> Iterator[Struct]: ...


class _Common:
    """What both have: names, counts, and the tokens of the prompts."""

    def __init__(
        self, asked: OpenAIFields, submission: Submission, tokenizer: Tokenizer, answer_id: str, model: str
    ) -> None:
        self._submission = submission
        self._tokenizer = tokenizer
        self._head = (answer_id, int(time.time()), model)
        self._tells_usage = asked.tells_usage
        self._tells_usage_always = asked.tells_usage_always
        self._num_tokens = 0  # told so far
        self._begun: set[int] = set()  # whose first chunk is out

    def _usage(self, completion_tokens: int) -> OpenAIUsage:
        prompt_tokens = self._submission.num_prompt_tokens
        details = PromptTokensDetails(self._submission.num_cached_tokens)
        return OpenAIUsage(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens, details)

    def _usage_of_chunk(self) -> OpenAIUsage | UnsetType | None:
        """On every chunk but the last: null where the last one has it, and the truth so far where that is wanted."""
        if self._tells_usage_always:
            return self._usage(self._num_tokens)
        return None if self._tells_usage else UNSET

    def _begins(self, index: int) -> bool:
        """Whether the chunk to come is the first of its choice."""
        is_first = index not in self._begun
        self._begun.add(index)
        return is_first

    def _prompt_logprobs(self, index: int) -> PromptLogprobs | UnsetType:
        """For each token of the prompt at `index`: itself and the likeliest there; nothing foretells the first."""
        if self._submission.request.prompt_logprobs is None:
            return UNSET
        told: PromptLogprobs = [None]
        known = self._submission.prompt_logprobs(index)
        for token_id, logprobs in zip(self._submission.prompt_token_ids(index)[1:], known, strict=False):
            pairs = {**dict(logprobs.top), token_id: logprobs.logprob}
            told.append({id_: PromptLogprob(value, self._text(id_)) for id_, value in pairs.items()})
        return told

    def _text(self, token_id: int) -> str:
        return self._tokenizer.decode([token_id])

    def _bytes(self, token_id: int) -> list[int]:
        return list(self._tokenizer.token_bytes_with_special(token_id))


class _Position:
    """How far a choice's text has come."""

    def __init__(self) -> None:
        self.num_characters = 0
        self.text = ""  # of the prompt, if it is echoed
        self.decode = getincrementaldecoder("utf-8")("replace").decode


class CompletionTeller(_Common):
    """/v1/completions."""

    def __init__(
        self, asked: CompletionRequest, submission: Submission, tokenizer: Tokenizer, answer_id: str, model: str
    ) -> None:
        super().__init__(asked, submission, tokenizer, answer_id, model)
        self._tells_nothing_new = asked.max_tokens == 0
        self.tells_logprobs = asked.logprobs is not None
        self._tells_top = bool(asked.logprobs)
        self._tells_prompt_logprobs = asked.prompt_logprobs is not None
        self._echo = bool(asked.echo)
        self._skips_special = asked.skip_special_tokens is not False
        self._positions: defaultdict[int, _Position] = defaultdict(_Position)

    def response(self, prompts: list[list[Answer]]) -> CompletionResponse:
        choices = []
        for number, answers in enumerate(prompts):
            for place, answer in enumerate(answers[: self._submission.request.n]):
                index = number * self._submission.request.n + place
                choice = self._choice(index, answer.index, answer.text, answer.tokens, begins=True)
                self._finish(choice, answer.finish_reason, answer.stop_reason)
                if self._tells_prompt_logprobs:
                    choice.prompt_logprobs = self._prompt_logprobs(number)
                choices.append(choice)
        num_tokens = 0 if self._tells_nothing_new else sum(a.num_tokens for answers in prompts for a in answers)
        return CompletionResponse(*self._head, choices, self._usage(num_tokens))

    def chunks(self, deltas: list[TokenDelta]) -> Iterator[CompletionResponse]:
        index = deltas[0].index
        begins = self._begins(index)
        self._num_tokens += 0 if self._tells_nothing_new else sum(delta.token_id is not None for delta in deltas)
        text = "".join(delta.text for delta in deltas)
        choice = self._choice(index, index, text, [delta for delta in deltas if delta.token_id is not None], begins)
        if (reason := deltas[-1].finish_reason) is not None:
            self._finish(choice, reason, deltas[-1].stop_reason)
        if begins and self._tells_prompt_logprobs:
            choice.prompt_logprobs = self._prompt_logprobs(index // self._submission.request.best_of)
        if choice.text or choice.logprobs or choice.finish_reason or choice.prompt_logprobs is not UNSET:
            yield CompletionResponse(*self._head, [choice], self._usage_of_chunk())

    def last_chunks(self) -> Iterator[CompletionResponse]:
        if self._tells_usage:
            yield CompletionResponse(*self._head, [], self._usage(self._num_tokens))

    def _choice(self, index: int, sequence: int, text: str, told: list[TokenDelta], begins: bool) -> CompletionChoice:
        """What these tokens say; before the first of an answer comes its prompt, if it is to be echoed."""
        if self._tells_nothing_new:
            text, told = "", []
        tokens: list[tuple[int, TokenLogprobs | None]] = [(delta.token_id or 0, delta.logprobs) for delta in told]
        if begins and self._echo:
            number = sequence // self._submission.request.best_of
            token_ids = self._submission.prompt_token_ids(number)
            position = self._positions[sequence]
            position.text = prompt = self._prompt_text(number, token_ids)
            text = prompt + text
            if self.tells_logprobs:
                known = [None, *self._submission.prompt_logprobs(number)]
                tokens = [*zip(token_ids, known, strict=False), *tokens]
        choice = CompletionChoice(index, text)
        if self.tells_logprobs:
            choice.logprobs = self._logprobs(sequence, tokens)
        return choice

    def _finish(self, choice: CompletionChoice, reason: FinishReason, stop_reason: str | int | None) -> None:
        """Why it ended: by its length, if nothing of the answer was wanted."""
        of_nothing = ("length", None) if self._tells_nothing_new else None
        choice.finish_reason, choice.stop_reason = of_nothing or finish_reason(reason, stop_reason)

    def _logprobs(self, sequence: int, tokens: Sequence[tuple[int, TokenLogprobs | None]]) -> CompletionLogprobs:
        return CompletionLogprobs(
            [self._name(token_id) for token_id, _ in tokens],
            [None if known is None else known.logprob for _, known in tokens],
            [self._top(token_id, known) for token_id, known in tokens] if self._tells_top else None,
            [self._next_offset(sequence, token_id) for token_id, _ in tokens],
        )

    def _prompt_text(self, number: int, token_ids: list[int]) -> str:
        """What was sent, unless it was token ids, or cut: then what was computed."""
        request = self._submission.request
        content = request.prompts[number].content
        if isinstance(content, str) and request.truncate is None:
            return content
        return self._tokenizer.decode(token_ids, self._skips_special)

    def _next_offset(self, sequence: int, token_id: int) -> int:
        """Where a token begins in its choice's text; one that is part of a character, where that one does."""
        position = self._positions[sequence]
        begins = position.num_characters
        own = self._tokenizer.token_bytes_with_special(token_id)
        if self._tokenizer.is_special(token_id):
            # In a prompt, one that was written out is part of the text, and one that was put around it is not.
            in_prompt = begins < len(position.text)
            is_told = position.text.startswith(own.decode(), begins) if in_prompt else not self._skips_special
            own = own if is_told else b""
        position.num_characters += len(position.decode(own))
        try:
            return position.num_characters - len(own.decode())  # bytes before it that were no character are behind it
        except UnicodeDecodeError:
            return begins

    def _top(self, token_id: int, known: TokenLogprobs | None) -> dict[str, float] | None:
        """The likeliest tokens by their text, and the token itself, which need not be one of them."""
        if known is None:
            return None
        top = {self._name(likely): logprob for likely, logprob in reversed(known.top)}
        return dict(sorted({**top, self._name(token_id): known.logprob}.items(), key=lambda item: -item[1]))

    def _name(self, token_id: int) -> str:
        """A token's text; of one that is only part of a character its bytes, as OpenAI writes them."""
        own = self._tokenizer.token_bytes_with_special(token_id)
        try:
            return own.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in own)


class ChatTeller(_Common):
    """/v1/chat/completions."""

    def __init__(
        self, asked: ChatCompletionRequest, submission: Submission, tokenizer: Tokenizer, answer_id: str, model: str
    ) -> None:
        super().__init__(asked, submission, tokenizer, answer_id, model)
        self.tells_logprobs = bool(asked.logprobs)

    def response(self, prompts: list[list[Answer]]) -> ChatCompletionResponse:
        (answers,) = prompts
        choices = []
        for answer in answers:
            reason, stop_reason = finish_reason(answer.finish_reason, answer.stop_reason)
            message = ChatAnswer(answer.text)
            choices.append(ChatChoice(answer.index, message, self._logprobs(answer.tokens), reason, stop_reason))
        usage = self._usage(sum(answer.num_tokens for answer in answers))
        response = ChatCompletionResponse(*self._head, choices, usage)
        response.prompt_logprobs = self._prompt_logprobs(0)
        return response

    def chunks(self, deltas: list[TokenDelta]) -> Iterator[ChatCompletionChunk]:
        index = deltas[0].index
        if self._begins(index):
            first = ChatCompletionChunk(
                *self._head, [ChatChunkChoice(index, ChatDelta("assistant", ""))], self._usage_of_chunk()
            )
            if len(self._begun) == 1:
                first.prompt_logprobs = self._prompt_logprobs(0)
            yield first
        self._num_tokens += sum(delta.token_id is not None for delta in deltas)
        text = "".join(delta.text for delta in deltas)
        choice = ChatChunkChoice(index, ChatDelta(content=text) if text else ChatDelta(), self._logprobs(deltas))
        if (reason := deltas[-1].finish_reason) is not None:
            choice.finish_reason, choice.stop_reason = finish_reason(reason, deltas[-1].stop_reason)
        if text or choice.logprobs or choice.finish_reason:
            yield ChatCompletionChunk(*self._head, [choice], self._usage_of_chunk())

    def last_chunks(self) -> Iterator[ChatCompletionChunk]:
        if self._tells_usage:
            yield ChatCompletionChunk(*self._head, [], self._usage(self._num_tokens))

    def _logprobs(self, deltas: list[TokenDelta]) -> ChatLogprobs | None:
        if not self.tells_logprobs:
            return None
        told = []
        for delta in deltas:
            if delta.token_id is None or delta.logprobs is None:
                continue
            top = [TopLogprob(self._text(id_), logprob, self._bytes(id_)) for id_, logprob in delta.logprobs.top]
            told.append(
                ChatLogprob(self._text(delta.token_id), delta.logprobs.logprob, self._bytes(delta.token_id), top)
            )
        return ChatLogprobs(told)
