"""Prepare requests for admission: render chats, encode prompts, compile grammars, and check limits.

Slow work runs in threads or in sandbox processes and is awaited here. A prepared request can be admitted without delay.
"""

from __future__ import annotations

import asyncio
import secrets
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from servekit.config import ServeConfig
from servekit.engine.model_files import ChatTemplate
from servekit.engine.tokenizer import Tokenizer, TooManyTokens
from servekit.errors import ContextTooLong, DeadlineExceeded, InvalidRequest, prompt_too_long
from servekit.parsing.chat_format import choose_chat_format
from servekit.parsing.fill_in_the_middle import choose_fill_format, end_token_ids
from servekit.protocol.lora import salted
from servekit.protocol.messages import ModelInfo
from servekit.protocol.sampling_params import SamplingParams
from servekit.requests.generation import GenerationRequest, Grammar, Prompt, Sampling
from servekit.requests.time_causes import TimeCause
from servekit.sandbox.client import Sandbox
from servekit.sandbox.jobs import CompileGrammar, RenderChat
from servekit.scheduler.prefix_cache import continue_chain
from servekit.scheduler.scheduler_config import SchedulerConfig

MAX_BAD_WORD_TOKENS = 1024
MAX_PREDICTION_TOKENS = 2**12  # sent to the worker within a step plan, for each answer; further ones are left out
MAX_PREDICTION_CHARACTERS = 8 * MAX_PREDICTION_TOKENS  # characters that are encoded to find these tokens
TOKENS_PER_SLICE = 2**14  # prompt tokens; checking them and hashing their blocks takes about a millisecond
TOKENS_PER_ANSWER = 2**8  # these take as long as preparing the parameters of one answer
MAX_LOGPROBS = 2**22  # values in the answers to one request; in JSON, each takes about 60 bytes
# Variables that the server sets, from fields of their own or not at all. A request's chat_template_kwargs may not.
RESERVED_TEMPLATE_VARIABLES = {
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "conversations",
    "messages",
    "return_assistant_tokens_mask",
    "tokenize",
    "tools",
}
MAX_GRAMMAR_CHARACTERS = 2**16  # a grammar is sent to the worker within a step plan

Value = TypeVar("Value")


class PreparedPrompt(Struct, frozen=True, gc=False):
    """One checked prompt, and the sampling parameters of each of its answers."""

    token_ids: array[int]
    sampling: list[SamplingParams]
    block_hashes: list[bytes] = []  # hashes of its full blocks, for the prefix cache


class InputProcessor:
    """Prepares requests for one model, within the limits of its scheduler."""

    def __init__(
        self,
        config: ServeConfig,
        path: Path,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        model: ModelInfo,
        limits: Callable[[], SchedulerConfig],
    ) -> None:
        """`limits` returns the present limits of the scheduler. They change with the workers that there are."""
        self._config = config
        self._tokenizer = tokenizer
        self._template = template
        self._model = model
        self._limits = limits
        self.chat_format = choose_chat_format(
            template.text,
            config.reasoning_parser,
            config.tool_call_parser,
            tokenizer.added_token_id,
            model.eos_token_ids,
        )
        self.fill_format = choose_fill_format(tokenizer.added_token_id)  # None: the model cannot fill in text
        file = str(path / "tokenizer.json")
        timeout_s, memory_bytes = config.sandbox_timeout, config.sandbox_memory_bytes
        eos = map(str, model.eos_token_ids)
        arguments = ["--tokenizer", file, "--vocab-size", str(model.vocab_size), "--eos-token-ids", *eos]
        self._sandbox = Sandbox(arguments, timeout_s, memory_bytes)
        self._starting: asyncio.Future[Any]

    def start(self) -> None:
        """Start the sandbox processes in the background. This takes a second, and most requests do not need them."""
        self._starting = asyncio.gather(self._sandbox.start(), return_exceptions=True)

    def cancel_all(self) -> None:
        """Fail the requests that wait for a sandbox process: the server is shutting down."""
        self._sandbox.cancel_all()

    async def stop(self) -> None:
        """Stop the sandbox processes."""
        self._starting.cancel()
        await asyncio.gather(self._starting, return_exceptions=True)
        await self._sandbox.stop()

    @property
    def has_chat_template(self) -> bool:
        return self._template.source is not None

    # -- chats --------------------------------------------------------------------------------------------------------

    async def render_chat(
        self,
        tenant: str,
        messages: list[dict[str, Any]],
        template: str | None = None,
        variables: dict[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
    ) -> str:
        """Render a conversation as text. `template` is one that the request brought. Raises InvalidRequest.

        `tools` describes the functions that the model may call, as OpenAI's API writes them.
        """
        if template is not None and not self._config.trust_request_chat_template:
            raise InvalidRequest(
                "this server does not accept a chat_template in a request; it was started without "
                "--trust-request-chat-template",
                param="chat_template",
            )
        for name in sorted(RESERVED_TEMPLATE_VARIABLES.intersection(variables or ())):
            raise InvalidRequest(
                f"chat_template_kwargs must not contain {name!r}, which the server sets itself; leave it out",
                param="chat_template_kwargs",
            )
        source = template or (self._template.tool_use if tools else None) or self._template.source
        if source is None:
            raise InvalidRequest(
                f"model {self._config.model_name!r} has no chat template; use /v1/completions, or start the server "
                "with --chat-template FILE",
                param="messages",
                code="chat_template_missing",
            )
        if template is None:
            self._check_conversation(messages)
        return await self._sandbox.run(
            RenderChat(
                source,
                add_generation_prompt and not continue_final_message,
                continue_final_message,
                {**(variables or {}), **self._template.special_tokens, **({"tools": tools} if tools else {})},
                messages,
            ),
            "messages" if template is None else "chat_template",
            tenant,
        )

    def _check_conversation(self, messages: list[dict[str, Any]]) -> None:
        """Refuse a conversation that cannot fit before it is encoded and rendered. Raises ContextTooLong.

        Templates contain all text of users, tools and the system. The assistant's text is not counted, because many
        templates leave out its reasoning.
        """
        contents = [message["content"] for message in messages if message["role"] != "assistant"]
        min_tokens = sum(map(len, contents)) // self._tokenizer.max_token_bytes
        limit = self._limits().max_total_tokens
        if min_tokens > limit:
            raise prompt_too_long(limit, min_tokens, "messages")

    # -- generation ---------------------------------------------------------------------------------------------------

    async def prepare(self, request: GenerationRequest, tenant: str) -> list[PreparedPrompt]:
        """Prepare all prompts of a request. Raises InvalidRequest or ContextTooLong."""
        self._check_options(request)
        request = self._with_filled_prompts(request)
        limits = self._limits()  # for all of the request; the engine checks again when it is admitted
        prompts = await self._encode(request, tenant, limits)
        request.mark(TimeCause.TOKENIZING)
        grammar = None
        if request.grammar is not None:
            grammar = await self._compile(request.grammar, tenant)
            request.mark(TimeCause.GRAMMAR)
        bad_words = await self._encode_bad_words(request.sampling.bad_words or [], tenant)
        prediction = await self._encode_prediction(request, tenant) if limits.max_drafts else ()
        prepared, num_tokens = [], 0
        for prompt, encoded in zip(request.prompts, prompts, strict=True):
            token_ids = array("i", encoded) if isinstance(encoded, list) else encoded
            await self._check_vocabulary(token_ids, prompt.param)
            sampling = self._prepare(request, prompt, token_ids, grammar, bad_words, prediction, limits)
            hashes = await self._hash_blocks(token_ids, salted(tenant, request.adapter), limits)
            prepared.append(PreparedPrompt(token_ids, sampling, hashes))
            num_tokens += len(token_ids) + TOKENS_PER_ANSWER * request.best_of
            if num_tokens >= TOKENS_PER_SLICE:
                await asyncio.sleep(0)  # a thousand prompts take a tenth of a second
                num_tokens = 0
        _check_logprobs(num_logprobs(request, prepared))
        return prepared

    def _with_filled_prompts(self, request: GenerationRequest) -> GenerationRequest:
        """Return the request with the text that comes after the answers as a part of its prompts."""
        if request.suffix is None:
            return request
        fill_format, suffix = self.fill_format, request.suffix
        if fill_format is None:
            raise InvalidRequest(
                "suffix: this model's tokenizer has no tokens for filling in text, such as <|fim_prefix|>; leave it "
                "out, or serve a model that was trained for it",
                param="suffix",
            )
        prompts = []
        for prompt in request.prompts:
            if not isinstance(prompt.content, str):
                raise InvalidRequest("suffix needs a prompt of text; it has token ids", param="suffix")
            prompts.append(replace(prompt, content=fill_format.prompt(prompt.content, suffix)))
        ends = end_token_ids(self._tokenizer.added_token_id)
        sampling = replace(request.sampling, stop_token_ids=[*(request.sampling.stop_token_ids or ()), *ends])
        return replace(request, prompts=prompts, sampling=sampling)

    async def _check_vocabulary(self, token_ids: array[int], param: str) -> None:
        """Raise InvalidRequest for a token that the model does not have."""
        vocab_size = self._model.vocab_size
        for start in range(0, len(token_ids), TOKENS_PER_SLICE):
            if start:
                await asyncio.sleep(0)
            highest = max(token_ids[start : start + TOKENS_PER_SLICE])
            if highest >= vocab_size:
                raise InvalidRequest(
                    f"{param} contains token {highest}; the model's vocabulary has {vocab_size} tokens", param=param
                )

    async def _hash_blocks(self, token_ids: array[int], salt: str, limits: SchedulerConfig) -> list[bytes]:
        """Hash the full blocks of a prompt, as the workload manager would: but it could not pause."""
        hashes: list[bytes] = []
        if limits.enable_prefix_caching:
            block_size = limits.block_size
            num_blocks, step = len(token_ids) // block_size, -(-TOKENS_PER_SLICE // block_size)
            for start in range(0, num_blocks, step):
                if start:
                    await asyncio.sleep(0)
                continue_chain(hashes, salt, token_ids, min(start + step, num_blocks), block_size)
        return hashes

    def _check_options(self, request: GenerationRequest) -> None:
        vocab_size, sampling = self._model.vocab_size, request.sampling
        for param, token_ids in (
            ("logit_bias", sampling.logit_bias or ()),
            ("allowed_token_ids", sampling.allowed_token_ids or ()),
        ):
            for token_id in token_ids:
                if token_id >= vocab_size:
                    raise InvalidRequest(
                        f"{param} contains token {token_id}; the model's vocabulary has {vocab_size} tokens",
                        param=param,
                    )
        policy = self._config.scheduling_policy
        if request.priority and policy != "priority":
            raise InvalidRequest(
                f"priority {request.priority} has no effect with the server's scheduling_policy {policy!r}; leave it "
                "out, or start the server with --scheduling-policy priority",
                param="priority",
            )

    async def _encode(
        self, request: GenerationRequest, tenant: str, limits: SchedulerConfig
    ) -> list[list[int] | array[int]]:
        """Return the token ids of every prompt, truncated if the request asks for it."""
        limit, truncate = limits.max_total_tokens, request.truncate
        for prompt in request.prompts:
            self._check_length(prompt, truncate, limit)
        texts = [prompt.content for prompt in request.prompts if isinstance(prompt.content, str)]
        special = all(prompt.add_special_tokens for prompt in request.prompts)
        try:
            if truncate is None:
                encoded = iter(await self._tokenizer.encode(tenant, texts, special, limit) if texts else [])
            else:  # a prompt with one token more than the limit is refused below
                num_tokens = min(truncate, limit + 1)
                encoded = iter(await self._tokenizer.encode_tails(tenant, texts, special, num_tokens))
        except TooManyTokens as error:
            of_texts = [prompt for prompt in request.prompts if isinstance(prompt.content, str)]
            _check_fits(limits, error.num_tokens, request.max_tokens or 1, of_texts[error.index].param)
            raise AssertionError("a prompt with too many tokens fits") from None
        contents = (prompt.content for prompt in request.prompts)
        prompts = [next(encoded) if isinstance(content, str) else content for content in contents]
        return [token_ids[-truncate:] for token_ids in prompts] if truncate else prompts

    def check_text(self, text: str, param: str) -> None:
        """Raise ContextTooLong for a text that cannot fit, before a thread spends seconds on encoding it."""
        self._check_length(Prompt(text, param), None, self._limits().max_total_tokens)

    def _check_length(self, prompt: Prompt, truncate: int | None, limit: int) -> None:
        """Refuse a prompt that is too long for any tokenization, before a thread spends seconds on encoding it."""
        content = prompt.content
        min_tokens = len(content) // self._tokenizer.max_token_bytes if isinstance(content, str) else len(content)
        if min_tokens > limit and truncate is None:
            raise prompt_too_long(limit, min_tokens, prompt.param)

    async def _encode_bad_words(self, words: list[str], tenant: str) -> tuple[tuple[int, ...], ...]:
        """Token ids of each word at the start of a text, and after a space, which are different tokens."""
        if not words:
            return ()
        variants = [variant for word in words for variant in (word, " " + word.lstrip())]
        encoded = await self._tokenizer.encode(tenant, variants, add_special_tokens=False)
        num_tokens = sum(map(len, encoded))
        if num_tokens > MAX_BAD_WORD_TOKENS:
            raise InvalidRequest(
                f"bad_words has {num_tokens} tokens, counting each word with and without a space before it; the limit "
                f"is {MAX_BAD_WORD_TOKENS}",
                param="bad_words",
            )
        return tuple(dict.fromkeys(tuple(token_ids) for token_ids in encoded if token_ids))

    async def _encode_prediction(self, request: GenerationRequest, tenant: str) -> tuple[int, ...]:
        """Token ids of the beginning of the text that the answers may repeat."""
        text = (request.prediction or "")[:MAX_PREDICTION_CHARACTERS]
        if not text or request.max_drafts == 0:
            return ()
        (token_ids,) = await self._tokenizer.encode(tenant, [text], add_special_tokens=False)
        return tuple(token_ids[:MAX_PREDICTION_TOKENS])

    async def _compile(self, grammar: Grammar, tenant: str) -> str:
        """Compile a grammar to the form that the worker accepts."""
        if not self._model.eos_token_ids:
            raise InvalidRequest(
                f"{grammar.param}: this model has no end-of-sequence token, which grammars need", param=grammar.param
            )
        num_characters = len(grammar.text) + sum(len(part.text) for part in grammar.parts)
        if num_characters > MAX_GRAMMAR_CHARACTERS:
            raise InvalidRequest(
                f"{grammar.param} has {num_characters} characters; the limit is {MAX_GRAMMAR_CHARACTERS}",
                param=grammar.param,
            )
        return await self._sandbox.run(CompileGrammar(grammar.kind, grammar.text, grammar.parts), grammar.param, tenant)

    def _prepare(
        self,
        request: GenerationRequest,
        prompt: Prompt,
        token_ids: array[int],
        grammar: str | None,
        bad_words: tuple[tuple[int, ...], ...],
        prediction: tuple[int, ...],
        limits: SchedulerConfig,
    ) -> list[SamplingParams]:
        """Check one prompt, and return the sampling parameters of each answer to it."""
        param = prompt.param
        if not token_ids:
            raise InvalidRequest(f"{param} is empty; a prompt needs at least one token", param=param)
        room = limits.max_total_tokens - len(token_ids)
        sampling = self._resolve(request, room, grammar, bad_words, prediction)
        if sampling.min_tokens > sampling.max_tokens:
            raise InvalidRequest(
                f"min_tokens = {sampling.min_tokens} is more than max_tokens = {sampling.max_tokens}",
                param="min_tokens",
            )
        _check_fits(limits, len(token_ids), sampling.max_tokens, param)
        # Each answer has its own seed; the logprobs of the prompt are computed once.
        others = [
            msgspec.structs.replace(sampling, seed=sampling.seed + number, prompt_logprobs=None)
            for number in range(1, request.best_of)
        ]
        return [sampling, *others]

    def _resolve(
        self,
        request: GenerationRequest,
        room: int,
        grammar: str | None,
        bad_words: tuple[tuple[int, ...], ...],
        prediction: tuple[int, ...],
    ) -> SamplingParams:
        """Fill in what the client did not set: the model's defaults, as much output as fits, and a random seed."""
        wanted, model = request.sampling, self._model
        stop = (wanted.stop,) if isinstance(wanted.stop, str) else tuple(wanted.stop or ())
        return SamplingParams(
            max_tokens=max(room, 1) if request.max_tokens is None else request.max_tokens,
            temperature=self._temperature(wanted),
            top_k=max(_or(wanted.top_k, model.default_top_k), 0),
            top_p=_or(wanted.top_p, model.default_top_p),
            min_p=_or(wanted.min_p, 0.0),
            typical_p=_or(wanted.typical_p, 1.0),
            repetition_penalty=_or(wanted.repetition_penalty, 1.0),
            presence_penalty=_or(wanted.presence_penalty, 0.0),
            frequency_penalty=_or(wanted.frequency_penalty, 0.0),
            logit_bias=tuple((wanted.logit_bias or {}).items()),
            allowed_token_ids=tuple(wanted.allowed_token_ids or ()),
            bad_words=bad_words,
            grammar=grammar,
            min_tokens=_or(wanted.min_tokens, 0),
            seed=_or(wanted.seed, secrets.randbits(63)),
            stop=stop,
            stop_token_ids=tuple(wanted.stop_token_ids or ()),
            include_stop=_or(wanted.include_stop_str_in_output, False),
            ignore_eos=_or(wanted.ignore_eos, False),
            skip_special_tokens=_or(wanted.skip_special_tokens, True),
            visible_token_ids=self._ids_of(request.markers),
            logprobs=request.wanted_logprobs,
            prompt_logprobs=request.prompt_logprobs,
            prediction=prediction,
        )

    def _ids_of(self, markers: tuple[str, ...]) -> tuple[int, ...]:
        ids = (self._tokenizer.added_token_id(text) for text in markers)
        return tuple(token_id for token_id in ids if token_id is not None)

    def _temperature(self, wanted: Sampling) -> float:
        if wanted.do_sample is False:
            return 0.0
        default = self._model.default_temperature
        return _or(wanted.temperature, 1.0 if wanted.do_sample and default == 0.0 else default)


def _check_fits(limits: SchedulerConfig, prompt_length: int, max_tokens: int, param: str) -> None:
    try:
        limits.check_fits(prompt_length, max_tokens)
    except ContextTooLong as error:
        error.param = param if prompt_length >= limits.max_total_tokens else "max_tokens"
        raise


async def prepare_in_time(
    processor: InputProcessor, request: GenerationRequest, tenant: str, arrival_s: float, now_s: float
) -> list[PreparedPrompt]:
    """Prepare a request that arrived at `arrival_s`. Raises DeadlineExceeded when one of its deadlines passes."""
    deadlines = [each for each in (request.ttft_ms, request.deadline_ms) if each is not None]
    time_left_s = max(0.0, arrival_s + min(deadlines) / 1e3 - now_s) if deadlines else None
    try:
        async with asyncio.timeout(time_left_s):
            return await processor.prepare(request, tenant)
    except TimeoutError:
        raise DeadlineExceeded("the deadline passed while the prompt or the grammar was prepared") from None


def num_logprobs(request: GenerationRequest, prepared: list[PreparedPrompt]) -> int:
    """Return how many logprobs the result has, if all answers become as long as they may."""
    of_prompts = 0 if request.prompt_logprobs is None else 1 + request.prompt_logprobs
    of_answers = 0 if request.logprobs is None else 1 + request.logprobs
    if not of_prompts and not of_answers:
        return 0
    return sum(
        len(prompt.token_ids) * of_prompts + len(prompt.sampling) * prompt.sampling[0].max_tokens * of_answers
        for prompt in prepared
    )


def _check_logprobs(num_values: int) -> None:
    """Refuse a result that could take gigabytes."""
    if num_values > MAX_LOGPROBS:
        raise InvalidRequest(
            f"the request asks for up to {num_values} logprobs, over all its answers; the limit is {MAX_LOGPROBS}: "
            "lower max_tokens, or ask for fewer logprobs",
            param="logprobs",
        )


def _or(wanted: Value | None, default: Value) -> Value:
    return default if wanted is None else wanted
