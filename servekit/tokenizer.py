"""Text to token ids and back, off the event loop.

Encoding is the `tokenizers` library's. Decoding is done token by token from the bytes that each one stands for:
only a mapping without context gives a stream whose pieces add up to the whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Encoding
from tokenizers import Tokenizer as HuggingFaceTokenizer

from servekit.detokenizer import Detokenizer
from servekit.errors import ConfigError
from servekit.sampling_params import SamplingParams

# The word boundary of SentencePiece vocabularies.
_METASPACE = "▁"


class _TokenizerFile(msgspec.Struct):
    """The part of tokenizer.json that says how tokens become text."""

    decoder: dict[str, Any] | None = None


class Tokenizer:
    """One model's tokenizer. Encoding runs in threads, beside which the Rust library lets Python go on."""

    def __init__(self, tokenizer: HuggingFaceTokenizer, decoder: dict[str, Any] | None) -> None:
        # The file may carry these from its training; here a prompt is served whole, or refused.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._bytes_of = _token_to_bytes(decoder)
        self._special = frozenset(
            token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        )
        self._added = frozenset(tokenizer.get_added_tokens_decoder())
        self._first_ids = tuple(tokenizer.encode("").ids)  # what every prompt begins with, if anything
        # Several threads, so that a long prompt does not hold up the short ones.
        self._threads = ThreadPoolExecutor(max_workers=4, thread_name_prefix="tokenizer")
        self.token_bytes = lru_cache(maxsize=None)(self._token_bytes)  # at most the vocabulary
        self.token_bytes_with_special = lru_cache(maxsize=None)(self._token_bytes_with_special)
        self.max_token_bytes = max((len(token.encode()) for token in tokenizer.get_vocab()), default=1)

    async def encode(self, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of each text, with the special tokens that the model expects around it."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self.encode_now, texts, add_special_tokens)

    def encode_now(self, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        """The same, at once and in this thread."""
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return [self._without_doubled_start(encoding.ids) for encoding in encodings]

    async def spans(self, text: str, add_special_tokens: bool) -> list[tuple[int, int, int]]:
        """(token id, start, stop) of each token of the text, in characters."""

        def encode() -> Encoding:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

        encoding = await asyncio.get_running_loop().run_in_executor(self._threads, encode)
        num_doubled = len(encoding.ids) - len(self._without_doubled_start(encoding.ids))
        tokens = zip(encoding.ids, encoding.offsets, strict=True)
        return [(token_id, *span) for token_id, span in islice(tokens, num_doubled, None)]

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """Their text, as a stream of them would give it."""
        token_bytes = self.token_bytes if skip_special_tokens else self.token_bytes_with_special
        return b"".join(map(token_bytes, token_ids)).decode("utf-8", "replace")

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    def make_detokenizer(self, sampling: SamplingParams) -> Detokenizer:
        """For one answer."""
        token_bytes = self.token_bytes if sampling.skip_special_tokens else self.token_bytes_with_special
        return Detokenizer(token_bytes, sampling.stop, sampling.include_stop, sampling.min_tokens)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _without_doubled_start(self, token_ids: list[int]) -> list[int]:
        """A prompt that was rendered by a chat template brings its start token along; one is enough."""
        start = self._first_ids[:1]
        return token_ids[1:] if start and token_ids[:2] == [*start, *start] else token_ids

    def _token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token contributes to the text; none for special tokens and ids without a token."""
        return b"" if token_id in self._special else self._token_bytes_with_special(token_id)

    def _token_bytes_with_special(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        return token.encode() if token_id in self._added else bytes(self._bytes_of(token))


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer in a model's directory. Raises ConfigError for what cannot be streamed exactly."""
    file = path / "tokenizer.json"
    if not file.exists():
        raise ConfigError(
            f"{path} has no tokenizer.json; copy the model's, or convert its tokenizer with transformers' AutoTokenizer"
        )
    try:
        decoder = msgspec.json.decode(file.read_bytes(), type=_TokenizerFile).decoder
        return Tokenizer(HuggingFaceTokenizer.from_file(str(file)), decoder)
    except ConfigError:
        raise
    except Exception as error:  # the Rust library raises plain Exception
        raise ConfigError(f"{file}: {error}") from None


# -- what a token's name says of its bytes ----------------------------------------------------------------------------


def _token_to_bytes(decoder: dict[str, Any] | None) -> Any:
    """How this vocabulary spells bytes, from the decoder that its tokenizer.json declares."""
    kinds = _decoder_kinds(decoder)
    if "ByteLevel" in kinds:
        return _bytes_of_byte_level_token
    if kinds & {"ByteFallback", "Metaspace"}:
        return _bytes_of_sentencepiece_token
    raise ConfigError(
        f"the tokenizer's decoder {sorted(kinds) or None} is not supported: ByteLevel, ByteFallback and Metaspace are"
    )


def _decoder_kinds(decoder: dict[str, Any] | None) -> set[str]:
    if decoder is None:
        return set()
    return {decoder["type"]}.union(*(_decoder_kinds(part) for part in decoder.get("decoders", [])))


def byte_level_alphabet() -> dict[str, int]:
    """The printable stand-ins for the 256 bytes (Radford et al., GPT-2, 2019, section 2.2)."""
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
