"""All that happens to a request between its body and its sequences: rendering, encoding, compiling, checking.

Everything slow is awaited here, off the event loop or out of the process; what comes out can be admitted at once.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from servekit.config import ServeConfig
from servekit.errors import ContextTooLong, InvalidRequest
from servekit.generation_request import GenerationRequest, Grammar, Prompt, Sampling
from servekit.messages import ModelInfo
from servekit.model_files import ChatTemplate
from servekit.sampling_params import SamplingParams
from servekit.sandbox import Sandbox
from servekit.sandbox_jobs import CompileGrammar, RenderChat
from servekit.tokenizer import Tokenizer
from servekit.workload_manager import WorkloadManager

MAX_GRAMMARS_KEPT = 256
MAX_BAD_WORD_TOKENS = 1024
MAX_LOGPROBS_TOLD = 2**23  # values in the answers to one request; each takes some hundred bytes
# What a chat template is told by us, by fields of their own or not at all: no variables of a request.
NO_TEMPLATE_VARIABLES = {
    *("add_generation_prompt", "continue_final_message", "conversations", "messages"),
    *("chat_template", "return_assistant_tokens_mask", "tokenize", "tools"),
}
MAX_GRAMMAR_CHARACTERS = 2**16  # it travels to the worker within a step's plan

Value = TypeVar("Value")


class PreparedPrompt(Struct, frozen=True):
    """One prompt that nothing speaks against, and how each of its answers is sampled: one entry for each answer."""

    token_ids: list[int]
    sampling: list[SamplingParams]


class Intake:
    """Prepares requests for one model."""

    def __init__(
        self,
        config: ServeConfig,
        path: Path,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        model: ModelInfo,
        manager: WorkloadManager,
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._template = template
        self._model = model
        self._manager = manager
        file = str(path / "tokenizer.json")
        limits = (config.sandbox_timeout, config.sandbox_memory_bytes)
        eos = map(str, model.eos_token_ids)
        # One process for each kind, so that a grammar that takes its time does not hold up conversations.
        self._chats = Sandbox([], *limits)
        self._compiler = Sandbox(
            ["--tokenizer", file, "--vocab-size", str(model.vocab_size), "--eos-token-ids", *eos], *limits
        )
        self._grammars: OrderedDict[tuple[str, str], str] = OrderedDict()  # compiled lately
        self._starting: asyncio.Future[Any]

    def start(self) -> None:
        """Start what takes a second to start, and do not wait for it: most requests need none of it."""
        self._starting = asyncio.gather(self._chats.start(), self._compiler.start(), return_exceptions=True)

    def give_up(self) -> None:
        """Whoever is being made ready is told that the server is going down."""
        self._chats.give_up()
        self._compiler.give_up()

    async def stop(self) -> None:
        self._starting.cancel()
        await asyncio.gather(self._starting, return_exceptions=True)
        await asyncio.gather(self._chats.stop(), self._compiler.stop())

    # -- conversations ------------------------------------------------------------------------------------------------

    async def render_chat(
        self,
        messages: list[dict[str, Any]],
        template: str | None = None,
        variables: dict[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """The conversation as text. `template` is the request's own. Raises InvalidRequest."""
        if template is not None and not self._config.trust_request_chat_template:
            raise InvalidRequest(
                "this server takes no chat_template from a request (--trust-request-chat-template)",
                param="chat_template",
            )
        for name in NO_TEMPLATE_VARIABLES.intersection(variables or ()):
            raise InvalidRequest(
                f"chat_template_kwargs has {name!r}, which is no variable of a template; leave it out",
                param="chat_template_kwargs",
            )
        source = template or self._template.source
        if source is None:
            raise InvalidRequest(
                f"model {self._config.model_name!r} has no chat template; use /v1/completions, or start the server "
                "with --chat-template FILE",
                param="messages",
                code="chat_template_missing",
            )
        return await self._chats.run(
            RenderChat(
                source,
                messages,
                add_generation_prompt and not continue_final_message,
                continue_final_message,
                {**(variables or {}), **self._template.special_tokens},
            ),
            "messages" if template is None else "chat_template",
        )

    # -- generation ---------------------------------------------------------------------------------------------------

    async def prepare(self, request: GenerationRequest) -> list[PreparedPrompt]:
        """Its prompts, ready to run. Raises InvalidRequest or ContextTooLong."""
        self._check_options(request)
        prompts = await self._encode(request)
        grammar = None if request.grammar is None else await self._compile(request.grammar)
        bad_words = await self._encode_bad_words(request.sampling.bad_words or [])
        return [
            self._prepare(request, prompt, token_ids, grammar, bad_words)
            for prompt, token_ids in zip(request.prompts, prompts, strict=True)
        ]

    def _check_options(self, request: GenerationRequest) -> None:
        vocab_size, sampling = self._model.vocab_size, request.sampling
        for param, token_ids in (
            ("logit_bias", sampling.logit_bias or ()),
            ("allowed_token_ids", sampling.allowed_token_ids or ()),
        ):
            for token_id in token_ids:
                if token_id >= vocab_size:
                    raise InvalidRequest(f"{param} names token {token_id}; the model has {vocab_size}", param=param)
        policy = self._config.scheduling_policy
        if request.priority and policy != "priority":
            raise InvalidRequest(
                f"priority {request.priority} would have no effect: the server's scheduling_policy is {policy!r}; "
                "leave it out, or start the server with --scheduling-policy priority",
                param="priority",
            )

    async def _encode(self, request: GenerationRequest) -> list[list[int]]:
        """Token ids of every prompt."""
        for prompt in request.prompts:
            self._check_length(prompt, request.truncate)
        texts = [
            self._end_of(prompt.content, request.truncate)
            for prompt in request.prompts
            if isinstance(prompt.content, str)
        ]
        special = all(prompt.add_special_tokens for prompt in request.prompts)
        encoded = iter(await self._tokenizer.encode(texts, special) if texts else [])
        prompts = [next(encoded) if isinstance(prompt.content, str) else prompt.content for prompt in request.prompts]
        return [token_ids[-request.truncate :] for token_ids in prompts] if request.truncate else prompts

    def _end_of(self, text: str, truncate: int | None) -> str:
        """As much of a text as its last `truncate` tokens can be, and as much again, for a cut moves tokens."""
        return text if truncate is None else text[-2 * truncate * self._tokenizer.max_token_bytes - 64 :]

    def check_text(self, text: str, param: str) -> None:
        """Raise ContextTooLong for a text that nobody can use here, before a thread spends seconds on encoding it."""
        self._check_length(Prompt(text, param), None)

    def _check_length(self, prompt: Prompt, truncate: int | None) -> None:
        """Refuse what is too long whatever its tokens are, before a thread spends seconds on encoding it."""
        limit, content = self._manager.config.max_total_tokens, prompt.content
        num_tokens = len(content) // (self._tokenizer.max_token_bytes if isinstance(content, str) else 1)  # at least
        if num_tokens > limit and truncate is None:
            raise ContextTooLong(
                f"This model's maximum context length is {limit} tokens. However, your prompt has at least "
                f"{num_tokens}. Please reduce the length of the prompt (context_length_exceeded).",
                param=prompt.param,
            )

    async def _encode_bad_words(self, words: list[str]) -> tuple[tuple[int, ...], ...]:
        """Each word as it begins a text and as it goes on with one, which are different tokens."""
        if not words:
            return ()
        variants = [variant for word in words for variant in (word, " " + word.lstrip())]
        encoded = await self._tokenizer.encode(variants, add_special_tokens=False)
        num_tokens = sum(map(len, encoded))
        if num_tokens > MAX_BAD_WORD_TOKENS:
            raise InvalidRequest(
                f"bad_words are {num_tokens} tokens, each word with and without a space before it; at most "
                f"{MAX_BAD_WORD_TOKENS} are taken",
                param="bad_words",
            )
        return tuple(dict.fromkeys(tuple(token_ids) for token_ids in encoded if token_ids))

    async def _compile(self, grammar: Grammar) -> str:
        """The grammar as the worker takes it; one that came lately is not compiled again."""
        if not self._model.eos_token_ids:
            raise InvalidRequest(f"{grammar.param}: this model has no token that ends an answer", param=grammar.param)
        if len(grammar.text) > MAX_GRAMMAR_CHARACTERS:
            raise InvalidRequest(
                f"{grammar.param} has {len(grammar.text)} characters; at most {MAX_GRAMMAR_CHARACTERS} are taken",
                param=grammar.param,
            )
        key = (str(grammar.kind), grammar.text)
        if key not in self._grammars:
            self._grammars[key] = await self._compiler.run(CompileGrammar(grammar.kind, grammar.text), grammar.param)
        self._grammars.move_to_end(key)
        while len(self._grammars) > MAX_GRAMMARS_KEPT:
            self._grammars.popitem(last=False)
        return self._grammars[key]

    def _prepare(
        self,
        request: GenerationRequest,
        prompt: Prompt,
        token_ids: list[int],
        grammar: str | None,
        bad_words: tuple[tuple[int, ...], ...],
    ) -> PreparedPrompt:
        param = prompt.param
        if not token_ids:
            raise InvalidRequest(f"{param} is empty, and this model needs at least one token", param=param)
        vocab_size = self._model.vocab_size
        if max(token_ids) >= vocab_size:
            raise InvalidRequest(
                f"{param} has token {max(token_ids)}, for which the model, with {vocab_size}, has no embedding",
                param=param,
            )
        room = self._manager.config.max_total_tokens - len(token_ids)
        sampling = self._resolve(request, room, grammar, bad_words)
        if sampling.min_tokens > sampling.max_tokens:
            raise InvalidRequest(
                f"min_tokens = {sampling.min_tokens} is more than max_tokens = {sampling.max_tokens}",
                param="min_tokens",
            )
        try:
            self._manager.config.check_fits(len(token_ids), sampling.max_tokens)
        except ContextTooLong as error:
            error.param = param if room < 1 else "max_tokens"
            raise
        self._check_logprobs(request, len(token_ids), sampling.max_tokens)
        # Each answer has a seed of its own; the prompt's logprobs are computed once.
        others = [
            msgspec.structs.replace(sampling, seed=sampling.seed + number, prompt_logprobs=None)
            for number in range(1, request.best_of)
        ]
        return PreparedPrompt(token_ids, [sampling, *others])

    def _check_logprobs(self, request: GenerationRequest, prompt_length: int, max_tokens: int) -> None:
        """Refuse what would take gigabytes to tell, should all answers become as long as they may."""
        num_told = 0
        if request.prompt_logprobs is not None:
            num_told += len(request.prompts) * prompt_length * (1 + request.prompt_logprobs)
        if request.logprobs is not None:
            num_told += request.num_sequences * max_tokens * (1 + request.logprobs)
        if num_told > MAX_LOGPROBS_TOLD:
            raise InvalidRequest(
                f"up to {num_told} logprobs are asked for, in all answers together; at most {MAX_LOGPROBS_TOLD} are "
                "told: lower max_tokens, or ask for fewer of them",
                param="logprobs",
            )

    def _resolve(
        self, request: GenerationRequest, room: int, grammar: str | None, bad_words: tuple[tuple[int, ...], ...]
    ) -> SamplingParams:
        """What the client left open: the model's own defaults, as much output as fits, a seed of our own."""
        said, model = request.sampling, self._model
        stop = (said.stop,) if isinstance(said.stop, str) else tuple(said.stop or ())
        return SamplingParams(
            max_tokens=max(room, 1) if request.max_tokens is None else request.max_tokens,
            temperature=self._temperature(said),
            top_k=max(_or(said.top_k, model.default_top_k), 0),
            top_p=_or(said.top_p, model.default_top_p),
            min_p=_or(said.min_p, 0.0),
            typical_p=_or(said.typical_p, 1.0),
            repetition_penalty=_or(said.repetition_penalty, 1.0),
            presence_penalty=_or(said.presence_penalty, 0.0),
            frequency_penalty=_or(said.frequency_penalty, 0.0),
            logit_bias=tuple((said.logit_bias or {}).items()),
            allowed_token_ids=tuple(said.allowed_token_ids or ()),
            bad_words=bad_words,
            grammar=grammar,
            min_tokens=_or(said.min_tokens, 0),
            seed=_or(said.seed, secrets.randbits(63)),
            stop=stop,
            stop_token_ids=tuple(said.stop_token_ids or ()),
            include_stop=_or(said.include_stop_str_in_output, False),
            ignore_eos=_or(said.ignore_eos, False),
            skip_special_tokens=_or(said.skip_special_tokens, True),
            logprobs=request.wanted_logprobs,
            prompt_logprobs=request.prompt_logprobs,
        )

    def _temperature(self, said: Sampling) -> float:
        if said.do_sample is False:
            return 0.0
        default = self._model.default_temperature
        return _or(said.temperature, 1.0 if said.do_sample and default == 0.0 else default)


def _or(said: Value | None, default: Value) -> Value:
    return default if said is None else said
