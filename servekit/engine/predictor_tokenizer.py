"""Turn texts and pairs of texts into token ids for a predictor, in threads; cut or refuse those that are too long."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from tokenizers import Encoding
from tokenizers import Tokenizer as HuggingFaceTokenizer

from servekit.aio.pause_tolerant_timer import pause_tolerant_timeout
from servekit.aio.round_robin_executor import ExecutorShutDown, RoundRobinExecutor
from servekit.errors import ConfigError, ContextTooLong, InvalidRequest, QueueFull, shutting_down
from servekit.protocol.prediction import PredictorInfo, TextItem
from servekit.requests.prediction import Input, PredictionRequest

SHORT_REQUEST = 2**9  # characters of one text that is encoded on the event loop; to change threads takes longer
LONG_REQUEST = 2**15  # characters; requests of this length and more are encoded in threads of their own
CHARACTERS_PER_TOKEN = 32  # characters of a long text that are first encoded for each token that it may have
SLICE_CHARACTERS = 2**18  # encoded at a time: an encoding takes some 150 bytes a token, until only its ids are kept
MAX_CHARACTERS = 2**23  # that are encoded for a request; those of its query count once for each document
SPARE_TOKENS = 64  # encoded beyond those that are kept: a cut in the text moves the borders of the tokens near it
TIMEOUT_S = 60.0  # including the wait for others


class _Part(NamedTuple):
    """A text, or one of the two of a pair, as it is encoded."""

    text: str
    num_tokens: int = 0  # of the whole text, if this is only its beginning


_Parts = list[_Part]


class PredictorTokenizer:
    """The tokenizer of one predictor. The Rust library releases the interpreter's lock while it encodes."""

    def __init__(self, tokenizer: HuggingFaceTokenizer, info: PredictorInfo) -> None:
        # The file may contain these settings from training.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._info = info
        self._is_closed = False
        self._threads = RoundRobinExecutor("tokenizer", num_threads=2, max_submitted=8, max_per_tenant=7)
        self._threads_for_long = RoundRobinExecutor("tokenizer-long", num_threads=2, max_submitted=2, max_per_tenant=1)

    async def encode(self, request: PredictionRequest, tenant: str) -> list[TextItem]:
        """Return the items of a request's texts. Raises ContextTooLong, InvalidRequest, or QueueFull if it is slow."""
        num_characters = sum(map(_num_characters, request.inputs))
        if len(request.inputs) == 1 and 0 < num_characters <= SHORT_REQUEST and not self._is_closed:
            return self.encode_blocking(request)
        threads = self._threads if num_characters < LONG_REQUEST else self._threads_for_long
        is_abandoned = threading.Event()
        try:
            async with pause_tolerant_timeout(TIMEOUT_S):
                return await threads.run(tenant, lambda: self.encode_blocking(request, is_abandoned.is_set))
        except ExecutorShutDown:
            raise shutting_down() from None
        except TimeoutError:
            raise QueueFull(
                f"the texts were not encoded within {TIMEOUT_S:g} s, because others were encoded before them; try "
                "again later, or send shorter texts",
                retry_after_s=5,
            ) from None
        finally:
            is_abandoned.set()  # a thread cannot be cancelled: it checks this before each input

    def encode_blocking(
        self, request: PredictionRequest, is_abandoned: Callable[[], bool] = lambda: False
    ) -> list[TextItem]:
        """Like `encode`, but in the calling thread. Returns an empty list as soon as `is_abandoned` returns true."""
        prompt, limit = self._prompt(request), self._limit(request)
        num_unpooled = 0 if self._info.pools_prompts or not prompt else self._num_prompt_tokens(prompt)
        items: dict[int, TextItem] = {}
        short: dict[int, _Parts] = {}
        num_short_characters = 0
        all_parts = self._parts_of(request, prompt, limit, is_abandoned)

        def encode_short() -> None:
            for (index, parts), encoding in zip(short.items(), self._encode_all(list(short.values())), strict=True):
                items[index] = self._item(encoding, parts, request, index, limit, num_unpooled)
            short.clear()

        for index, value in enumerate(request.inputs):
            if is_abandoned():  # before `all_parts` is read, which is empty if `_parts_of` saw this, too
                return []
            if isinstance(value, list | array):
                items[index] = self._of_token_ids(value, request, index, limit)
                continue
            parts = all_parts[index]
            num_characters = sum(len(part.text) for part in parts)
            if num_characters <= CHARACTERS_PER_TOKEN * limit:
                short[index] = parts
                num_short_characters += num_characters
                if num_short_characters >= SLICE_CHARACTERS:
                    encode_short()
                    num_short_characters = 0
            else:
                items[index] = self._item(self._encode_long(parts, limit), parts, request, index, limit, num_unpooled)
        encode_short()
        return [items[index] for index in range(len(request.inputs))]

    def _parts_of(
        self, request: PredictionRequest, prompt: str, limit: int, is_abandoned: Callable[[], bool]
    ) -> list[_Parts]:
        """Return the texts that are encoded for each input; none for token ids. Raises InvalidRequest for too much.

        The limit of a body does not bound them, because a prompt is encoded with each input, and the query of a
        reranker with each document. A long query is cut to what the model can use before it is counted. Otherwise a
        request of a few kilobytes would take many seconds.
        """
        found: list[_Parts] = []
        first_parts: dict[str, _Part] = {}  # by the first text of a pair
        num_characters = 0
        for value in request.inputs:
            if is_abandoned():
                return []
            parts: _Parts = []
            if isinstance(value, str):
                parts = [_Part(self._prepared(prompt + value))]
            elif isinstance(value, tuple):
                if value[0] not in first_parts:
                    first_parts[value[0]] = self._beginning(self._prepared(prompt + value[0]), limit)
                parts = [first_parts[value[0]], _Part(self._prepared(value[1]))]
            num_characters += sum(len(part.text) for part in parts)
            if num_characters > MAX_CHARACTERS:
                raise InvalidRequest(
                    f"the first {len(found) + 1} of {len(request.inputs)} inputs have {num_characters} characters to "
                    "encode, because a query counts with each document and a prompt with each input; the limit is "
                    f"{MAX_CHARACTERS} for one request; send fewer or shorter ones",
                    param=request.param,
                )
            found.append(parts)
        return found

    def close(self) -> None:
        self._is_closed = True
        self._threads.shutdown()
        self._threads_for_long.shutdown()

    # -- prompts and limits -------------------------------------------------------------------------------------------

    def _prompt(self, request: PredictionRequest) -> str:
        """Return the text that comes before each input. Raises InvalidRequest for a name that the model has not."""
        prompts, name = self._info.prompts, request.prompt_name or self._info.default_prompt
        if name is None:
            return ""
        if name not in prompts:
            known = ", ".join(sorted(prompts)) or "none"
            raise InvalidRequest(
                f"prompt_name = {name[:60]!r}: the model has no prompt of that name; it has {known}",
                param="prompt_name",
            )
        return prompts[name]

    def _limit(self, request: PredictionRequest) -> int:
        most = self._info.max_model_len
        if request.max_tokens is None:
            return most
        num_special = self._tokenizer.num_special_tokens_to_add(is_pair=isinstance(request.inputs[0], tuple))
        if request.max_tokens <= num_special:
            raise InvalidRequest(
                f"inputs cannot be cut to {request.max_tokens} tokens: {num_special} special tokens are among them",
                param="truncate_prompt_tokens",
            )
        return min(most, request.max_tokens)

    def _num_prompt_tokens(self, prompt: str) -> int:
        """Return how many of the first tokens are those of the prompt, the start token included."""
        encoding = self._tokenizer.encode(prompt)
        return len(encoding) - encoding.special_tokens_mask[-1]

    def _prepared(self, text: str) -> str:
        """Return the text as it is encoded."""
        return text.lower() if self._info.lowercases else text

    # -- encodings ----------------------------------------------------------------------------------------------------

    def _beginning(self, text: str, limit: int) -> _Part:
        """Return the text without what is certainly cut off: it keeps some tokens more than `limit`, if it has them."""
        num_kept = limit + SPARE_TOKENS
        if len(text) <= num_kept:
            return _Part(text)
        encoding = self._encode_beginning(text, limit)
        if len(encoding) <= num_kept:
            return _Part(text)
        first_left_out, _ = encoding.offsets[num_kept]
        return _Part(text[:first_left_out], len(encoding))

    def _encode_long(self, parts: _Parts, limit: int) -> Encoding:
        """Encode a beginning of the text that has more tokens than are kept. The whole may take seconds."""
        num_characters = CHARACTERS_PER_TOKEN * limit
        while True:
            encoding = self._encode([_Part(part.text[:num_characters]) for part in parts])
            has_all = all(len(part.text) <= num_characters for part in parts)
            # Of a pair, the longer part is cut. It has enough tokens if it alone has more than are kept.
            if has_all or len(encoding) > len(parts) * (limit + SPARE_TOKENS):
                return encoding
            num_characters *= 4

    def _encode_all(self, texts: list[_Parts]) -> list[Encoding]:
        if len(texts) < 2:  # a batch is divided among the library's threads
            return list(map(self._encode, texts))
        return self._tokenizer.encode_batch(
            [parts[0].text if len(parts) == 1 else (parts[0].text, parts[1].text) for parts in texts]
        )

    def _encode(self, parts: _Parts) -> Encoding:
        return self._tokenizer.encode(parts[0].text, parts[1].text if len(parts) == 2 else None)

    def _item(
        self,
        encoding: Encoding,
        parts: _Parts,
        request: PredictionRequest,
        index: int,
        limit: int,
        num_unpooled: int,
    ) -> TextItem:
        if len(encoding) > limit:
            if not request.truncates:
                raise _too_long(request, index, len(encoding), limit)
            encoding = self._cut(parts, limit)
        types = encoding.type_ids
        num_first = types.index(1) if 1 in types else 0
        num_unpooled = min(num_unpooled, len(encoding) - 1)
        return TextItem(tuple(encoding.ids), num_first, num_unpooled, request.dimensions)

    def _cut(self, parts: _Parts, limit: int) -> Encoding:
        """Encode a text that is too long, without its last tokens; of a pair, the longer one loses them first."""
        encoded = [self._encode_beginning(part.text, limit) for part in parts]
        room = limit - self._tokenizer.num_special_tokens_to_add(is_pair=len(parts) == 2)
        lengths = [part.num_tokens or len(encoding) for part, encoding in zip(parts, encoded, strict=True)]
        for encoding, length in zip(encoded, kept_lengths(lengths, room), strict=True):
            encoding.truncate(length)
        return self._tokenizer.post_process(encoded[0], encoded[1] if len(encoded) == 2 else None)

    def _encode_beginning(self, text: str, limit: int) -> Encoding:
        """Encode a beginning of one text that has more tokens than are kept, without special tokens."""
        num_characters = CHARACTERS_PER_TOKEN * 4 * limit
        encoding = self._tokenizer.encode(text[:num_characters], add_special_tokens=False)
        if len(encoding) < limit + SPARE_TOKENS and len(text) > num_characters:  # with many spaces, for example
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return encoding

    def _of_token_ids(self, token_ids: Sequence[int], request: PredictionRequest, index: int, limit: int) -> TextItem:
        if len(token_ids) > limit:  # first: to look for the largest of millions holds the interpreter's lock
            if not request.truncates:
                raise _too_long(request, index, len(token_ids), limit)
            token_ids = token_ids[:limit]
        if max(token_ids) >= self._info.vocab_size:
            raise InvalidRequest(
                f"{request.param} has token id {max(token_ids)}; the model's are below {self._info.vocab_size}",
                param=request.param,
            )
        return TextItem(tuple(token_ids), dimensions=request.dimensions)


def kept_lengths(lengths: Sequence[int], room: int) -> list[int]:
    """Return how many tokens are kept of each part, so that they fit: the longest part loses tokens first.

    This is how transformers' tokenizers cut pairs by the strategy longest_first.
    """
    if len(lengths) == 1:
        return [min(lengths[0], room)]
    first, second = lengths
    if first + second <= room:
        return [first, second]
    shorter = min(first, second)
    if shorter <= room // 2:
        return [first, room - first] if first <= second else [room - second, second]
    return [room // 2, room - room // 2] if first <= second else [room - room // 2, room // 2]


def load_predictor_tokenizer(path: Path, info: PredictorInfo) -> PredictorTokenizer:
    """Load the tokenizer from a model's directory. Raises ConfigError."""
    file = path / "tokenizer.json"
    if not file.exists():
        raise ConfigError(
            f"{path} has no tokenizer.json; copy the model's file there, or convert the model's tokenizer with "
            "transformers' AutoTokenizer"
        )
    try:
        return PredictorTokenizer(HuggingFaceTokenizer.from_file(str(file)), info)
    except Exception as error:  # the Rust library raises plain exceptions
        raise ConfigError(f"{file}: {error}") from None


def _num_characters(value: Input) -> int:
    if isinstance(value, str):
        return len(value)
    return sum(map(len, value)) if isinstance(value, tuple) else 0


def _too_long(request: PredictionRequest, index: int, num_tokens: int, limit: int) -> ContextTooLong:
    param = request.param if len(request.inputs) == 1 else f"{request.param}[{index}]"
    return ContextTooLong(
        f"This model's maximum context length is {limit} tokens. However, {param} has {num_tokens} or more. Please "
        "reduce its length, or let it be cut (truncate_prompt_tokens: -1).",
        param=param,
    )
