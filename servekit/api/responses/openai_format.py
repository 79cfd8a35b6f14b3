"""Write answers in OpenAI's wire format: completions and chat completions, whole and in chunks."""

from __future__ import annotations

import time
from array import array
from codecs import getincrementaldecoder
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from msgspec import UNSET, UnsetType

from servekit.api.responses.chat_message import ChatMessageAnswer, ChatMessageReader, new_call_id
from servekit.api.responses.collect import Answer, explanation_of
from servekit.api.responses.long_json import ItemList
from servekit.api.responses.sse import SERVER_SENT_EVENTS, event
from servekit.api.schemas.openai import (
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
    CompletionTokensDetails,
    FunctionCallDelta,
    OpenAIFields,
    OpenAIUsage,
    PromptLogprob,
    PromptTokensDetails,
    ToolCallDelta,
    TopLogprob,
    finish_reason,
)
from servekit.engine.client_queue import TokenDelta
from servekit.engine.request_state import RequestState
from servekit.engine.tokenizer import Tokenizer
from servekit.parsing.answer_events import AnswerEvent, CallArguments, CallBegins, Content, Reasoning
from servekit.parsing.chat_format import AnswerFormat
from servekit.protocol.messages import TokenLogprobs
from servekit.scheduler.sequence import FinishReason

PromptLogprobs = list[dict[int, PromptLogprob] | None]


class _Common:
    """What both builders share: the head of each object, usage, and the tokens of the prompts."""

    needs_tokens: bool  # whether single tokens are described, so that they must be kept
    framing = SERVER_SENT_EVENTS
    end_of_stream = b"data: [DONE]\n\n"  # after an error, too

    def __init__(
        self, body: OpenAIFields, state: RequestState, tokenizer: Tokenizer, answer_id: str, model: str
    ) -> None:
        self._state = state
        self._tokenizer = tokenizer
        self._head = (answer_id, int(time.time()), model)
        self._sends_usage = body.sends_usage
        self._sends_usage_always = body.sends_usage_always
        self._has_last_chunk = body.sends_usage or bool(body.explain)
        self._returns_ids = bool(body.return_token_ids)
        self._names_by_id = bool(body.return_tokens_as_token_ids)
        self._num_tokens = 0  # sent so far
        self._begun: set[int] = set()  # choices whose first chunk was sent

    def make_answer(self, index: int) -> Answer:
        return Answer(index, self.needs_tokens)

    def headers(self, _: list[list[Answer]]) -> dict[str, str]:
        return {}

    def _usage(self, completion_tokens: int, reasoning_tokens: int | None = None) -> OpenAIUsage:
        prompt_tokens = self._state.num_prompt_tokens
        completion_tokens = self._state.num_answer_tokens(completion_tokens)
        details = PromptTokensDetails(self._state.num_cached_tokens)
        usage = OpenAIUsage(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens, details)
        details_of_answers = CompletionTokensDetails()
        if num_drafted := self._state.num_drafted_tokens:
            num_accepted = self._state.num_accepted_tokens
            details_of_answers.accepted_prediction_tokens = num_accepted
            details_of_answers.rejected_prediction_tokens = num_drafted - num_accepted
        if reasoning_tokens is not None:
            details_of_answers.reasoning_tokens = reasoning_tokens
        if details_of_answers != CompletionTokensDetails():
            usage.completion_tokens_details = details_of_answers
        return usage

    def _usage_so_far(self) -> OpenAIUsage:
        """Return the usage of the part of a stream that was sent."""
        return self._usage(self._num_tokens)

    def _usage_of_chunk(self) -> OpenAIUsage | UnsetType | None:
        """Return `usage` for every chunk but the last: the usage so far, null if the last chunk has it, or absent."""
        if self._sends_usage_always:
            return self._usage_so_far()
        return None if self._sends_usage else UNSET

    def _begins(self, index: int) -> bool:
        """Return whether the next chunk is the first of its choice, and note that it was sent."""
        is_first = index not in self._begun
        self._begun.add(index)
        return is_first

    def _prompt_logprobs(self, index: int, items: ItemList = list) -> PromptLogprobs | UnsetType:
        """Return for each token of the prompt at `index` its logprob and the likeliest tokens; null for the first."""
        return UNSET if self._state.request.prompt_logprobs is None else items(self._written_prompt_logprobs(index))

    def _written_prompt_logprobs(self, index: int) -> Iterator[dict[int, PromptLogprob] | None]:
        yield None
        known = self._state.prompt_logprobs(index)
        for token_id, logprobs in zip(self._state.prompt_token_ids(index)[1:], known, strict=False):
            pairs = {**dict(logprobs.top), token_id: logprobs.logprob}
            yield {id_: PromptLogprob(value, self._text(id_)) for id_, value in pairs.items()}

    def _prompt_ids(self, index: int, items: ItemList = list) -> list[int] | UnsetType:
        return items(self._state.prompt_token_ids(index)) if self._returns_ids else UNSET

    def _ids(self, token_ids: Iterable[int | None], items: ItemList = list) -> list[int] | UnsetType:
        return items(id_ for id_ in token_ids if id_ is not None) if self._returns_ids else UNSET

    def _text(self, token_id: int) -> str:
        return self._tokenizer.decode([token_id])

    def _bytes(self, token_id: int) -> list[int]:
        return list(self._tokenizer.token_bytes_with_special(token_id))


class _Position:
    """The position that a choice's text has reached."""

    def __init__(self) -> None:
        self.num_characters = 0
        self.text = ""  # of the prompt, with `echo`
        self.decode = getincrementaldecoder("utf-8")("replace").decode


class CompletionResponseBuilder(_Common):
    """Write one request's answer for /v1/completions."""

    def __init__(
        self, body: CompletionRequest, state: RequestState, tokenizer: Tokenizer, answer_id: str, model: str
    ) -> None:
        super().__init__(body, state, tokenizer, answer_id, model)
        self._returns_prompt_only = body.max_tokens == 0
        self.needs_tokens = body.logprobs is not None
        self._returns_prompt_logprobs = body.prompt_logprobs is not None
        self._echo = bool(body.echo)
        self._skips_special = body.skip_special_tokens is not False
        self._positions: defaultdict[int, _Position] = defaultdict(_Position)

    def response(self, prompts: list[list[Answer]], items: ItemList) -> CompletionResponse:
        choices = items(self._choices(prompts, items))
        num_tokens = 0 if self._returns_prompt_only else sum(a.num_tokens for answers in prompts for a in answers)
        return CompletionResponse(*self._head, choices, self._usage(num_tokens), explanation_of(self._state))

    def _choices(self, prompts: list[list[Answer]], items: ItemList) -> Iterator[CompletionChoice]:
        for number, answers in enumerate(prompts):
            for place, answer in enumerate(answers[: self._state.request.n]):
                index = number * self._state.request.n + place
                choice = self._choice(index, answer.index, answer.text, answer.tokens, begins=True, items=items)
                self._finish(choice, answer.finish_reason, answer.stop_reason)
                if self._returns_prompt_logprobs:
                    choice.prompt_logprobs = self._prompt_logprobs(number, items)
                choice.token_ids = self._ids(() if self._returns_prompt_only else answer.token_ids, items)
                choice.prompt_token_ids = self._prompt_ids(number, items)
                yield choice

    def events(self, deltas: list[TokenDelta]) -> bytes:
        return b"".join(map(event, self._chunks(deltas)))

    def last_events(self) -> bytes:
        return b"".join(map(event, self._last_chunks()))

    def _chunks(self, deltas: list[TokenDelta]) -> Iterator[CompletionResponse]:
        index = deltas[0].index
        begins = self._begins(index)
        self._num_tokens += 0 if self._returns_prompt_only else sum(delta.token_id is not None for delta in deltas)
        text = "".join(delta.text for delta in deltas)
        choice = self._choice(index, index, text, [delta for delta in deltas if delta.token_id is not None], begins)
        if (reason := deltas[-1].finish_reason) is not None:
            self._finish(choice, reason, deltas[-1].stop_reason)
        if begins:
            number = index // self._state.request.best_of
            choice.prompt_token_ids = self._prompt_ids(number)
            if self._returns_prompt_logprobs:
                choice.prompt_logprobs = self._prompt_logprobs(number)
        choice.token_ids = self._ids(() if self._returns_prompt_only else (delta.token_id for delta in deltas))
        parts = (choice.text, choice.logprobs, choice.finish_reason, choice.token_ids or None)
        if any(parts) or choice.prompt_logprobs is not UNSET:
            yield CompletionResponse(*self._head, [choice], self._usage_of_chunk())

    def _last_chunks(self) -> Iterator[CompletionResponse]:
        if self._has_last_chunk:
            usage = self._usage_so_far() if self._sends_usage else UNSET
            yield CompletionResponse(*self._head, [], usage, explanation_of(self._state))

    def _choice(
        self,
        index: int,
        sequence: int,
        text: str,
        deltas: list[TokenDelta],
        begins: bool,
        items: ItemList = list,
    ) -> CompletionChoice:
        """Return a choice with these tokens. With `echo`, the first one of an answer begins with the prompt."""
        if self._returns_prompt_only:
            text, deltas = "", []
        tokens: list[tuple[int, TokenLogprobs | None]] = [(delta.token_id or 0, delta.logprobs) for delta in deltas]
        if begins and self._echo:
            number = sequence // self._state.request.best_of
            token_ids = self._state.prompt_token_ids(number)
            position = self._positions[sequence]
            position.text = prompt = self._prompt_text(number, token_ids)
            text = prompt + text
            if self.needs_tokens:
                known = [None, *self._state.prompt_logprobs(number)]
                tokens = [*zip(token_ids, known, strict=False), *tokens]
        choice = CompletionChoice(index, text)
        if self.needs_tokens:
            choice.logprobs = self._logprobs(sequence, tokens, items)
        return choice

    def _finish(self, choice: CompletionChoice, reason: FinishReason, stop_reason: str | int | None) -> None:
        """Set why the answer ended. If only the prompt is returned, that is its length."""
        if self._returns_prompt_only:
            choice.finish_reason, choice.stop_reason = "length", None
        else:
            choice.finish_reason, choice.stop_reason = finish_reason(reason, stop_reason)

    def _logprobs(
        self, sequence: int, tokens: Sequence[tuple[int, TokenLogprobs | None]], items: ItemList
    ) -> CompletionLogprobs:
        return CompletionLogprobs(
            items(self._name(token_id) for token_id, _ in tokens),
            items(None if known is None else known.logprob for _, known in tokens),
            items(self._top(token_id, known) for token_id, known in tokens),
            items(self._next_offset(sequence, token_id) for token_id, _ in tokens),
        )

    def _prompt_text(self, number: int, token_ids: array[int]) -> str:
        """Return the prompt as it was sent; one of token ids, or one that was truncated, as it was computed."""
        request = self._state.request
        content = request.prompts[number].content
        if isinstance(content, str) and request.truncate is None:
            return content
        return self._tokenizer.decode(token_ids, self._skips_special)

    def _next_offset(self, sequence: int, token_id: int) -> int:
        """Return where a token begins in its choice's text. A part of a character begins where the character does."""
        position = self._positions[sequence]
        begins = position.num_characters
        own = self._tokenizer.token_bytes_with_special(token_id)
        if self._tokenizer.is_special(token_id):
            # A special token written in the prompt is part of the text; one that the tokenizer added around it is not.
            in_prompt = begins < len(position.text)
            is_in_text = position.text.startswith(own.decode(), begins) if in_prompt else not self._skips_special
            own = own if is_in_text else b""
        position.num_characters += len(position.decode(own))
        try:
            return position.num_characters - len(own.decode())  # incomplete bytes before it count as well
        except UnicodeDecodeError:
            return begins

    def _top(self, token_id: int, known: TokenLogprobs | None) -> dict[str, float] | None:
        """Return logprobs by the tokens' texts: first the token itself, as vLLM does, and then the likeliest ones."""
        if known is None:
            return None
        top = {self._name(token_id): known.logprob}
        for likely, logprob in known.top:
            top.setdefault(self._name(likely), logprob)
        return top

    def _name(self, token_id: int) -> str:
        """Return a token's text; for a part of a character its bytes, as OpenAI writes them. Or its id, if asked."""
        if self._names_by_id:
            return f"token_id:{token_id}"
        own = self._tokenizer.token_bytes_with_special(token_id)
        try:
            return own.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in own)


class ChatResponseBuilder(_Common):
    """Write one request's answer for /v1/chat/completions."""

    def __init__(
        self,
        body: ChatCompletionRequest,
        state: RequestState,
        tokenizer: Tokenizer,
        answer_id: str,
        model: str,
        answer_format: AnswerFormat,
    ) -> None:
        super().__init__(body, state, tokenizer, answer_id, model)
        self.needs_tokens = bool(body.logprobs)
        self._format = answer_format
        self._returns_reasoning = body.include_reasoning is not False
        self._readers: dict[int, ChatMessageReader] = {}  # by sequence; none if answers are content only

    def make_answer(self, index: int) -> Answer:
        if not self._format.is_parsed:
            return super().make_answer(index)
        return ChatMessageAnswer(index, self.needs_tokens, self._reader(index), self._format.call_id_length)

    def _reader(self, index: int) -> ChatMessageReader:
        if index not in self._readers:
            self._readers[index] = ChatMessageReader(self._format.make_parser())
        return self._readers[index]

    def _usage_of_chat(self, completion_tokens: int) -> OpenAIUsage:
        num_reasoning_tokens = sum(reader.num_reasoning_tokens for reader in self._readers.values())
        return self._usage(completion_tokens, num_reasoning_tokens if self._format.has_reasoning else None)

    def _usage_so_far(self) -> OpenAIUsage:
        return self._usage_of_chat(self._num_tokens)

    def _finish_reason(
        self, index: int, reason: FinishReason, stop_reason: str | int | None
    ) -> tuple[str, str | int | None]:
        """Return OpenAI's name of the reason why the answer ended, and the stop reason."""
        if reason is FinishReason.STOP and self._format.is_parsed and self._reader(index).num_calls:
            return "tool_calls", stop_reason
        return finish_reason(reason, stop_reason)

    # -- one JSON answer ----------------------------------------------------------------------------------------------

    def response(self, prompts: list[list[Answer]], items: ItemList) -> ChatCompletionResponse:
        (answers,) = prompts
        choices = items(self._choice(answer, items) for answer in answers)
        usage = self._usage_of_chat(sum(answer.num_tokens for answer in answers))
        response = ChatCompletionResponse(*self._head, choices, usage, explanation_of(self._state))
        response.prompt_logprobs = self._prompt_logprobs(0, items)
        response.prompt_token_ids = self._prompt_ids(0, items)
        return response

    def _choice(self, answer: Answer, items: ItemList) -> ChatChoice:
        reason, stop_reason = self._finish_reason(answer.index, answer.finish_reason, answer.stop_reason)
        logprobs, token_ids = self._logprobs(answer.tokens, items), self._ids(answer.token_ids, items)
        return ChatChoice(answer.index, self._message(answer), logprobs, reason, stop_reason, token_ids)

    def _message(self, answer: Answer) -> ChatAnswer:
        if not isinstance(answer, ChatMessageAnswer):
            return ChatAnswer(answer.text)
        message = ChatAnswer(answer.content)
        if answer.reasoning and self._returns_reasoning:
            message.reasoning_content = answer.reasoning
        if calls := answer.tool_calls():
            message.tool_calls = calls
            message.content = message.content or None
        return message

    # -- a stream -----------------------------------------------------------------------------------------------------

    def events(self, deltas: list[TokenDelta]) -> bytes:
        return b"".join(map(event, self._chunks(deltas)))

    def last_events(self) -> bytes:
        return b"".join(map(event, self._last_chunks()))

    def _chunks(self, deltas: list[TokenDelta]) -> Iterator[ChatCompletionChunk]:
        index = deltas[0].index
        if self._begins(index):
            first = ChatCompletionChunk(
                *self._head, [ChatChunkChoice(index, ChatDelta("assistant", ""))], self._usage_of_chunk()
            )
            if len(self._begun) == 1:
                first.prompt_logprobs = self._prompt_logprobs(0)
                first.prompt_token_ids = self._prompt_ids(0)
            yield first
        self._num_tokens += sum(delta.token_id is not None for delta in deltas)
        if self._format.is_parsed:
            delta = self._parsed_delta(self._reader(index).read(deltas))
        else:
            text = "".join(delta.text for delta in deltas)
            delta = ChatDelta(content=text) if text else ChatDelta()
        choice = ChatChunkChoice(index, delta, self._logprobs(deltas))
        choice.token_ids = self._ids(each.token_id for each in deltas)
        if (reason := deltas[-1].finish_reason) is not None:
            choice.finish_reason, choice.stop_reason = self._finish_reason(index, reason, deltas[-1].stop_reason)
        if choice.delta != ChatDelta() or choice.logprobs or choice.finish_reason or choice.token_ids:
            yield ChatCompletionChunk(*self._head, [choice], self._usage_of_chunk())

    def _parsed_delta(self, events: list[AnswerEvent]) -> ChatDelta:
        """Return what the events add to the message."""
        content, reasoning = [], []
        calls: dict[int, ToolCallDelta] = {}
        for each in events:
            match each:
                case Content():
                    content.append(each.text)
                case Reasoning():
                    reasoning.append(each.text)
                case CallBegins():
                    call_id = new_call_id(self._format.call_id_length)
                    calls[each.index] = ToolCallDelta(each.index, call_id, "function", FunctionCallDelta(each.name))
                case CallArguments():
                    calls.setdefault(each.index, ToolCallDelta(each.index)).function.arguments += each.text
        delta = ChatDelta()
        if content:
            delta.content = "".join(content)
        if reasoning and self._returns_reasoning:
            delta.reasoning_content = "".join(reasoning)
        if calls:
            delta.tool_calls = list(calls.values())
        return delta

    def _last_chunks(self) -> Iterator[ChatCompletionChunk]:
        if self._has_last_chunk:
            usage = self._usage_so_far() if self._sends_usage else UNSET
            yield ChatCompletionChunk(*self._head, [], usage, explanation_of(self._state))

    def _logprobs(self, deltas: list[TokenDelta], items: ItemList = list) -> ChatLogprobs | None:
        return ChatLogprobs(items(self._written_logprobs(deltas))) if self.needs_tokens else None

    def _written_logprobs(self, deltas: list[TokenDelta]) -> Iterator[ChatLogprob]:
        for delta in deltas:
            if delta.token_id is None or delta.logprobs is None:
                continue
            top = [TopLogprob(self._name(id_), logprob, self._bytes(id_)) for id_, logprob in delta.logprobs.top]
            yield ChatLogprob(self._name(delta.token_id), delta.logprobs.logprob, self._bytes(delta.token_id), top)

    def _name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._names_by_id else self._text(token_id)
