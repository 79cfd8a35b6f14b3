"""Convert text to token ids and back, outside the event loop's thread.

The `tokenizers` library encodes. Decoding maps each token to its bytes, because only a mapping without context gives
streamed pieces that add up to the whole text.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from tokenizers import Encoding
from tokenizers import Tokenizer as HuggingFaceTokenizer

from servekit.aio.round_robin_executor import ExecutorShutDown, RoundRobinExecutor
from servekit.engine.detokenizer import Detokenizer
from servekit.errors import ConfigError, QueueFull, shutting_down
from servekit.protocol.sampling_params import SamplingParams

# The space character of SentencePiece vocabularies.
_METASPACE = "▁"

Result = TypeVar("Result")

MAX_INLINE_CHARS = 2**9  # of one text that is encoded on the event loop; a change of threads would take longer
LONG_TEXT = 2**15  # characters; texts of this length and more are encoded in threads of their own
MAX_LONG_WAITING = 16  # long texts of one tenant; `check_queue` refuses more
CLOSE_TIMEOUT_S = 1.0  # for threads to end; only a text of megabytes takes longer
TOKENS_PER_SLICE = 2**15
MAX_SPANS = 2**17  # tokens with positions; making more of them holds the interpreter's lock for long


class TooManyTokens(Exception):
    """A text has more tokens than the caller accepts. They were counted, and not converted to Python's integers."""

    def __init__(self, index: int, num_tokens: int) -> None:
        super().__init__(index, num_tokens)
        self.index = index  # index of the text
        self.num_tokens = num_tokens


class _TokenizerFile(msgspec.Struct):
    """The part of tokenizer.json that specifies how tokens become text."""

    decoder: dict[str, Any] | None = None


class Tokenizer:
    """The tokenizer of one model. It encodes in threads, except single short texts.

    The Rust library releases the interpreter lock.

    It does not release it while it makes a list of token ids: a million takes ten milliseconds, during which the event
    loop waits. So callers say how many they accept.
    """

    def __init__(self, tokenizer: HuggingFaceTokenizer, decoder: dict[str, Any] | None) -> None:
        # The file may contain these settings from training. A prompt must be neither cut nor padded.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._bytes_of = _token_to_bytes(decoder)
        self._special = frozenset(
            token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        )
        # Whether a token id is that of a special token. It is asked once for each token, so it is no method in Python.
        self.is_special: Callable[[int], bool] = self._special.__contains__
        self._added = frozenset(tokenizer.get_added_tokens_decoder())
        self._ids_of_added = {token.content: id_ for id_, token in tokenizer.get_added_tokens_decoder().items()}
        self._first_ids = tuple(tokenizer.encode("").ids)  # special tokens that every prompt begins with
        # A long text takes seconds. So that it does not delay short ones, they have threads of their own. And a tenant
        # has one long text encoded at a time, so that a thread is left for another tenant. Trade-off: a tenant alone
        # uses one of these threads, and without API keys all clients are one tenant.
        self._is_closed = False
        self._threads = RoundRobinExecutor("tokenizer", num_threads=2, max_submitted=8, max_per_tenant=7)
        self._threads_for_long = RoundRobinExecutor("tokenizer-long", num_threads=2, max_submitted=2, max_per_tenant=1)
        self.token_bytes = lru_cache(maxsize=None)(self._token_bytes)  # bounded by the vocabulary
        self.token_bytes_with_special = lru_cache(maxsize=None)(self._token_bytes_with_special)
        self.max_token_bytes = max((len(token.encode()) for token in tokenizer.get_vocab()), default=1)

    async def encode(
        self, tenant: str, texts: list[str], add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> list[array[int]]:
        """Return the token ids of each text, with the special tokens that the model expects around it.

        Raises TooManyTokens for a text with more than `max_tokens`.
        """
        arguments = texts, add_special_tokens, max_tokens
        if len(texts) == 1 and len(texts[0]) <= MAX_INLINE_CHARS and not self._is_closed:
            return self.encode_blocking(*arguments)
        return await self._in_thread(tenant, sum(map(len, texts)), lambda: self.encode_blocking(*arguments))

    def encode_blocking(
        self, texts: list[str], add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> list[array[int]]:
        """Like `encode`, but in the calling thread."""
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        if max_tokens is not None:
            for index, encoding in enumerate(encodings):
                _check_length(encoding, index, max_tokens)
        return [_as_array(self._without_doubled_start(encoding.ids)) for encoding in encodings]

    async def encode_tails(
        self, tenant: str, texts: list[str], add_special_tokens: bool, num_tokens: int
    ) -> list[array[int]]:
        """Return the last `num_tokens` token ids of each text."""
        return [(await self._encode_tail(tenant, text, add_special_tokens, num_tokens))[-num_tokens:] for text in texts]

    async def _encode_tail(self, tenant: str, text: str, add_special_tokens: bool, num_tokens: int) -> array[int]:
        """Encode an end of the text that has twice the tokens, because a cut in the text moves the borders of tokens.

        The whole text could have a million times as many tokens.
        """
        num_characters = 4 * num_tokens + 64
        while True:
            (token_ids,) = await self.encode(tenant, [text[-num_characters:]], add_special_tokens)
            if len(token_ids) >= 2 * num_tokens + 64 or num_characters >= len(text):
                return token_ids
            num_characters *= 4

    async def spans(self, tenant: str, text: str, add_special_tokens: bool) -> list[tuple[int, int, int]]:
        """(token id, start, stop) of each token of the text. Positions count characters.

        Raises TooManyTokens for a text with more than MAX_SPANS.
        """

        def encode() -> list[tuple[int, int, int]]:
            encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
            _check_length(encoding, 0, MAX_SPANS)
            token_ids = encoding.ids
            num_doubled = len(token_ids) - len(self._without_doubled_start(token_ids))
            tokens = zip(token_ids, encoding.offsets, strict=True)
            return [(token_id, *span) for token_id, span in islice(tokens, num_doubled, None)]

        return await self._in_thread(tenant, len(text), encode)

    def check_queue(self, tenant: str, text: str) -> None:
        """Raise QueueFull for a long text of a tenant that has too many waiting.

        For callers without a queue of their own. The number of prompts that wait is bounded before they are encoded.
        """
        num_waiting = self._threads_for_long.num_waiting(tenant)
        if len(text) >= LONG_TEXT and num_waiting >= MAX_LONG_WAITING:
            raise QueueFull(
                f"{num_waiting} texts of {LONG_TEXT} and more characters wait for the tokenizer; the limit is "
                f"{MAX_LONG_WAITING} for each tenant. Please try again later.",
                retry_after_s=5,
            )

    async def _in_thread(self, tenant: str, num_characters: int, work: Callable[[], Result]) -> Result:
        threads = self._threads if num_characters < LONG_TEXT else self._threads_for_long
        try:
            return await threads.run(tenant, work)
        except ExecutorShutDown:
            raise shutting_down() from None

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """The text of tokens. It equals the concatenated text of a stream of them."""
        return b"".join(map(self.token_bytes_of(skip_special_tokens), token_ids)).decode("utf-8", "replace")

    def token_bytes_of(self, skip_special_tokens: bool) -> Callable[[int], bytes]:
        """The function that returns a token's bytes in the text."""
        return self.token_bytes if skip_special_tokens else self.token_bytes_with_special

    def added_token_id(self, text: str) -> int | None:
        """The id of the token that was added to the vocabulary with this text; None if there is none."""
        return self._ids_of_added.get(text)

    def make_detokenizer(self, sampling: SamplingParams) -> Detokenizer:
        """A detokenizer for one answer."""
        token_bytes = self.token_bytes_of(sampling.skip_special_tokens)
        if sampling.visible_token_ids and sampling.skip_special_tokens:
            token_bytes = self._showing(frozenset(sampling.visible_token_ids))
        return Detokenizer(token_bytes, sampling.stop, sampling.include_stop, sampling.min_tokens)

    def _showing(self, visible: frozenset[int]) -> Callable[[int], bytes]:
        """The function that returns a token's bytes in a text that shows these special tokens only."""
        return lambda token_id: (self.token_bytes_with_special if token_id in visible else self.token_bytes)(token_id)

    def close(self) -> None:
        self._is_closed = True
        self._threads.shutdown()
        self._threads_for_long.shutdown()

    async def wait_closed(self) -> None:
        """Wait, after `close`, until its threads have ended; for a moment only, if they work on a long text."""
        for threads in (self._threads, self._threads_for_long):
            await threads.wait_ended(CLOSE_TIMEOUT_S)

    def _without_doubled_start(self, token_ids: list[int]) -> list[int]:
        """Drop a repeated start token: a prompt that a chat template rendered contains one already."""
        start = self._first_ids[:1]
        return token_ids[1:] if start and token_ids[:2] == [*start, *start] else token_ids

    def _token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token in the text; b"" for special tokens and for ids without a token."""
        return b"" if token_id in self._special else self._token_bytes_with_special(token_id)

    def _token_bytes_with_special(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        return token.encode() if token_id in self._added else bytes(self._bytes_of(token))


def _check_length(encoding: Encoding, index: int, max_tokens: int) -> None:
    if len(encoding) > max_tokens:
        raise TooManyTokens(index, len(encoding))


def _as_array(token_ids: list[int]) -> array[int]:
    """Convert a list, and empty it. Each call that does a part of it holds the interpreter's lock for a millisecond."""
    converted = array("i")
    for start in range(0, len(token_ids), TOKENS_PER_SLICE):
        converted.fromlist(token_ids[start : start + TOKENS_PER_SLICE])
    while token_ids:
        del token_ids[-TOKENS_PER_SLICE:]
    return converted


def load_tokenizer(path: Path) -> Tokenizer:
    """Load the tokenizer from a model's directory. Raises ConfigError if it cannot be streamed exactly."""
    file = path / "tokenizer.json"
    if not file.exists():
        raise ConfigError(
            f"{path} has no tokenizer.json; copy the model's file there, or convert the model's tokenizer with "
            "transformers' AutoTokenizer"
        )
    try:
        decoder = msgspec.json.decode(file.read_bytes(), type=_TokenizerFile).decoder
        return Tokenizer(HuggingFaceTokenizer.from_file(str(file)), decoder)
    except ConfigError:
        raise
    except Exception as error:  # the Rust library raises plain exceptions
        raise ConfigError(f"{file}: {error}") from None


# -- the bytes of a token ---------------------------------------------------------------------------------------------


def _token_to_bytes(decoder: dict[str, Any] | None) -> Any:
    """The function that maps a token's name to its bytes, chosen by the decoder in tokenizer.json."""
    kinds = _decoder_kinds(decoder)
    if "ByteLevel" in kinds:
        return _bytes_of_byte_level_token
    if kinds & {"ByteFallback", "Metaspace"}:
        return _bytes_of_sentencepiece_token
    raise ConfigError(
        f"the tokenizer's decoder {sorted(kinds) or None} is not supported; supported are ByteLevel, ByteFallback and "
        "Metaspace"
    )


def _decoder_kinds(decoder: dict[str, Any] | None) -> set[str]:
    if decoder is None:
        return set()
    return {decoder["type"]}.union(*(_decoder_kinds(part) for part in decoder.get("decoders", [])))


def byte_level_alphabet() -> dict[str, int]:
    """The printable characters that represent the 256 bytes (Radford et al., GPT-2, 2019, section 2.2)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_ALPHABET = byte_level_alphabet()


def _bytes_of_byte_level_token(token: str) -> bytes:
    if all(character in _ALPHABET for character in token):
        return bytes(_ALPHABET[character] for character in token)
    return token.encode()


def _bytes_of_sentencepiece_token(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes.fromhex(token[3:5])
    return token.replace(_METASPACE, " ").encode()
