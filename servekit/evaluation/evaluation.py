"""Evaluate one server, or compare two: read the files, ask the servers, and judge the answers."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from msgspec import Struct
from tokenizers import Tokenizer

from servekit.client.served_model import served
from servekit.errors import ConfigError
from servekit.evaluation.comparison import compare
from servekit.evaluation.judge import MAX_TOKENS, Judgement, Verdict, judgement, messages, verdict
from servekit.evaluation.measurement import Answer, Measurement, summarise
from servekit.evaluation.model_client import ModelClient, in_order
from servekit.evaluation.perplexity import TextScore, TokenScore, Window, parse_documents, windows
from servekit.evaluation.questions import Question, as_chats, evenly, parse_questions
from servekit.evaluation.report import Report
from servekit.evaluation.statistics import MIN_BLOCKS

DEMO = "demo"
DEMO_QUESTIONS = Path(__file__).parents[1] / "assets" / "demo_model" / "questions.jsonl"


class EvaluationSettings(Struct, kw_only=True):
    """The flags of `servekit eval`."""

    url: str | None = None
    model: str | None = None  # to serve for the evaluation, in the place of `url`
    quantization: str | None = None  # of that server; without `against`, the baseline is the model without it
    against: str | None = None
    served_model_name: str | None = None  # of several at `url`; None: the one that the server lists first
    # The model's name at `against`; if `against` is not given, this model at `url` is the baseline.
    against_model_name: str | None = None
    api_key: str | None = None
    text: str | None = None
    questions: list[str] = []  # files, or `demo` for the demo model's
    chat: bool = False
    limit: int | None = None
    tokenizer: str | None = None
    window: int = 1024  # tokens
    stride: int | None = None  # tokens; None: half a window
    concurrency: int = 8
    max_drop: float = 0.01
    max_perplexity_increase: float = 0.02
    judge_url: str | None = None
    judge_model: str | None = None
    judge_api_key: str | None = None

    def check(self) -> None:
        """Raise ConfigError for flags that contradict each other, or lack one."""
        if (self.url is None) == (self.model is None):
            raise ConfigError("give either --url, the address of a server, or a MODEL to serve for the evaluation")
        if self.quantization is not None and self.model is None:
            raise ConfigError("--quantization needs a MODEL to serve; the server at --url has its own weights")
        if self.model is not None and self.served_model_name is not None:
            raise ConfigError("--served-model-name is for a server at --url; MODEL is served under its own name")
        if self.against_model_name is not None and self.url is None and self.against is None:
            raise ConfigError("--against-model-name needs --against, or --url for another model of the same server")
        if self.text is None and not self.questions:
            raise ConfigError("there is nothing to evaluate; give --text FILE, --questions FILE, or --questions demo")
        if self.stride is not None and self.stride > self.window:
            raise ConfigError(f"--stride {self.stride} is more than --window {self.window}: it would skip tokens")
        if (self.judge_url is None) != (self.judge_model is None):
            raise ConfigError("a judge needs both --judge-url and --judge-model")
        if self.judge_url is not None and (not self.compares or not self.questions):
            raise ConfigError("a judge compares the answers of two servers; give --against and --questions")

    @property
    def compares(self) -> bool:
        """Whether there is a second server."""
        return any(each is not None for each in (self.against, self.quantization, self.against_model_name))


class EncodedText(Struct):
    """The tokens of the text's documents."""

    prefix: list[int]  # special tokens that the model expects before a text, such as BOS
    documents: list[list[int]]
    num_bytes: int

    @property
    def num_scored(self) -> int:
        """The number of tokens that have something before them."""
        return sum(max(0, len(token_ids) - (not self.prefix)) for token_ids in self.documents)


def evaluate(settings: EvaluationSettings) -> Report:
    """Evaluate a server, or compare two. Raises ConfigError, and RequestFailed of servekit.client."""
    settings.check()
    documents = None
    if settings.text is not None:
        documents = evenly(parse_documents(_read(settings.text), settings.text), settings.limit)
    questions = [question for name in settings.questions for question in _read_questions(name, settings.limit)]
    if settings.chat:
        questions = as_chats(questions)
    tokenizer = None if settings.tokenizer is None else _read_tokenizer(settings.tokenizer)
    return asyncio.run(_evaluate(settings, documents, questions, tokenizer))


async def _evaluate(
    settings: EvaluationSettings, documents: list[str] | None, questions: list[Question], tokenizer: Tokenizer | None
) -> Report:
    async with AsyncExitStack() as stack:
        clients = []
        urls = [await _server(settings, stack), *await _baseline(settings, stack)]
        for url, name in zip(urls, (settings.served_model_name, settings.against_model_name), strict=False):
            client = ModelClient(
                url, settings.api_key, concurrency=settings.concurrency, model=name or "", tokenizer=tokenizer
            )
            clients.append(await stack.enter_async_context(client))
            await client.find_model()
        encoded = None if documents is None else await _encode_alike(clients, documents)
        measurements = [await _measure(client, settings, encoded, questions) for client in clients]
    summaries = [summarise(questions, measurement) for measurement in measurements]
    if len(measurements) == 1:
        return Report(summaries, None, [])
    first, second = measurements
    comparison = compare(questions, first, second, await _judge(settings, questions, first, second))
    return Report(summaries, comparison, comparison.losses(settings.max_drop, settings.max_perplexity_increase))


# -- files -------------------------------------------------------------------------------------------------------------


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None


def _read_questions(name: str, limit: int | None) -> list[Question]:
    path = str(DEMO_QUESTIONS) if name == DEMO else name
    return evenly(parse_questions(_read(path), name), limit)


def _read_tokenizer(path: str) -> Tokenizer:
    try:
        return Tokenizer.from_buffer(_read(path))
    except ValueError as error:
        raise ConfigError(f"{path} is not a tokenizer.json: {error}") from None


# -- servers -----------------------------------------------------------------------------------------------------------


async def _server(settings: EvaluationSettings, stack: AsyncExitStack) -> str:
    """Return the address of the server under test; start it, if there is none."""
    if settings.url is not None:
        return settings.url
    assert settings.model is not None
    return await stack.enter_async_context(served(settings.model, settings.quantization))


async def _baseline(settings: EvaluationSettings, stack: AsyncExitStack) -> list[str]:
    """Return the address of the server to compare with, if there is one."""
    if settings.against is not None:
        return [settings.against]
    if settings.against_model_name is not None and settings.url is not None:
        return [settings.url]
    if settings.quantization is None:
        return []
    assert settings.model is not None
    return [await stack.enter_async_context(served(settings.model, None))]


# -- one server --------------------------------------------------------------------------------------------------------


async def _measure(
    client: ModelClient, settings: EvaluationSettings, encoded: EncodedText | None, questions: list[Question]
) -> Measurement:
    text = None if encoded is None else await _score(client, settings, encoded)
    answers: list[Answer] = await in_order("questions", client.answer, questions)
    return Measurement(client.url, client.model, text, answers)


async def _encode_alike(clients: list[ModelClient], documents: list[str]) -> EncodedText:
    """Return the tokens of the text, which must be the same for all servers. Raises ConfigError."""
    encoded = [await _encode(client, documents) for client in clients]
    if encoded[0] != encoded[-1]:
        raise ConfigError(
            "the tokenizers of the two servers differ, so their perplexities are of different tokens; evaluate each of "
            "them alone and compare the bits per byte, or leave out --text"
        )
    if encoded[0].num_scored < MIN_BLOCKS:
        raise ConfigError(
            f"the text has {encoded[0].num_scored} tokens that can be scored; a perplexity needs {MIN_BLOCKS}: give a "
            "longer text"
        )
    return encoded[0]


async def _encode(client: ModelClient, documents: list[str]) -> EncodedText:
    encoded = await in_order("tokens of the text", partial(client.encode, special=False), documents)
    prefix: list[int] = []
    if documents:
        with_special, plain = await client.encode(documents[0], special=True), encoded[0]
        # Tokenizers that change a text when they add special tokens, if there are any, get no prefix.
        starts = range(len(with_special) - len(plain) + 1)
        found = [start for start in starts if with_special[start : start + len(plain)] == plain]
        prefix = with_special[: found[0]] if found else []
    return EncodedText(prefix, encoded, sum(len(text.encode()) for text in documents))


async def _score(client: ModelClient, settings: EvaluationSettings, encoded: EncodedText) -> TextScore:
    """Score the documents in windows, each of which begins with the prefix."""
    longest = settings.window
    if client.max_model_len is not None:
        longest = min(longest, client.max_model_len - 1)  # one token is generated
    length = longest - len(encoded.prefix)
    stride = settings.stride or max(1, longest // 2)
    if not encoded.prefix:
        stride = min(stride, length - 1)  # a window's first token has no logprob, so the window before counts it
    if stride > length or stride < 1:
        raise ConfigError(f"windows of {longest} tokens are too short for a stride of {stride}; raise --window")

    async def one(part: tuple[list[int], Window]) -> list[TokenScore]:
        token_ids, window = part
        prompt = encoded.prefix + token_ids[window.begin : window.end]
        scored_from = max(1, len(encoded.prefix) + window.scored_from - window.begin)
        return await client.score(prompt, scored_from) if scored_from < len(prompt) else []

    parts = [
        (token_ids, window) for token_ids in encoded.documents for window in windows(len(token_ids), length, stride)
    ]
    scores = await in_order("windows of the text", one, parts)
    token_ids = [token_id for document in encoded.documents for token_id in document]
    return TextScore(token_ids, [score for window in scores for score in window], encoded.num_bytes)


# -- the judge ---------------------------------------------------------------------------------------------------------


async def _judge(
    settings: EvaluationSettings, questions: list[Question], first: Measurement, second: Measurement
) -> Judgement | None:
    """Let the judge read each pair of answers that differ, in both orders."""
    if settings.judge_url is None or settings.judge_model is None:
        return None
    async with ModelClient(
        settings.judge_url, settings.judge_api_key, concurrency=settings.concurrency, model=settings.judge_model
    ) as judge:

        async def one(pair: tuple[Question, str, str]) -> Verdict:
            question, ours, theirs = pair
            if ours == theirs:
                return Verdict.TIE
            reply = await judge.chat(messages(question, ours, theirs), MAX_TOKENS, returns_tokens=False)
            swapped = await judge.chat(messages(question, theirs, ours), MAX_TOKENS, returns_tokens=False)
            return verdict(reply.text, swapped.text)

        answers = zip(questions, first.answers, second.answers, strict=True)
        pairs = [(question, a.text, b.text) for question, a, b in answers if not question.is_choice]
        return judgement(settings.judge_model, await in_order("pairs of answers", one, pairs))
