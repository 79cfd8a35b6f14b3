"""Tests of tokens and text, against the decoding of the tokenizers library."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as HuggingFaceTokenizer

from servekit.engine.detokenizer import Detokenizer
from servekit.engine.tokenizer import LONG_TEXT, MAX_INLINE_CHARS, MAX_LONG_WAITING, Tokenizer, load_tokenizer
from servekit.errors import ConfigError, QueueFull, WorkerNotReady

TEXT = ["hello world", "grüße aus Köln", "日本語 テスト", "naïve café 🦊🦊", "the cat sat on the mat"] * 3


def byte_level() -> HuggingFaceTokenizer:
    tokenizer = HuggingFaceTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def byte_fallback() -> HuggingFaceTokenizer:
    vocabulary = {"<s>": 0, "</s>": 1} | {f"<0x{byte:02X}>": 2 + byte for byte in range(256)}
    vocabulary |= {token: 258 + i for i, token in enumerate(["▁", "a", "b", "▁a", "é"])}
    tokenizer = HuggingFaceTokenizer(models.BPE(vocabulary, [("▁", "a")], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def save(tokenizer: HuggingFaceTokenizer, directory: Path) -> Path:
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def decode(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    detokenizer = Detokenizer(tokenizer.token_bytes)
    return "".join(detokenizer.feed(token_id) for token_id in token_ids) + detokenizer.finish()


BYTE_LEVEL = byte_level()


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() - 1), max_size=40))
def test_streamed_text_equals_the_librarys_decoding(token_ids: list[int]) -> None:
    ours = Tokenizer(BYTE_LEVEL, {"type": "ByteLevel"})
    assert decode(ours, token_ids) == BYTE_LEVEL.decode(token_ids)


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_encoding_and_decoding_returns_the_text(text: str) -> None:
    text = text.encode("utf-8", "ignore").decode()
    ours = Tokenizer(BYTE_LEVEL, {"type": "ByteLevel"})
    (token_ids,) = ours.encode_blocking([text])
    assert decode(ours, token_ids) == text.replace("<s>", "").replace("</s>", "")


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() + 5), max_size=40), st.booleans())
def test_decode_equals_streaming_and_the_librarys_decoding(token_ids: list[int], skip: bool) -> None:
    ours = Tokenizer(BYTE_LEVEL, {"type": "ByteLevel"})
    detokenizer = Detokenizer(ours.token_bytes if skip else ours.token_bytes_with_special)
    streamed = "".join(map(detokenizer.feed, token_ids)) + detokenizer.finish()
    assert ours.decode(token_ids, skip_special_tokens=skip) == streamed
    normal = [
        token_id for token_id in token_ids if token_id > 1
    ]  # the library cuts a broken character at a special one
    assert ours.decode(normal) == BYTE_LEVEL.decode(normal, skip_special_tokens=skip)


def test_special_tokens_are_text_on_request() -> None:
    ours = Tokenizer(BYTE_LEVEL, {"type": "ByteLevel"})
    assert [ours.token_bytes_with_special(token_id) for token_id in (0, 1, 10**6)] == [b"<s>", b"</s>", b""]
    hello = ours.encode_blocking(["hello"])[0]
    assert (ours.decode(hello), ours.decode(hello, skip_special_tokens=True)) == ("<s>hello", "hello")


async def test_spans_cover_the_characters_of_each_token() -> None:
    ours = Tokenizer(BYTE_LEVEL, {"type": "ByteLevel"})
    for text in ("hello world", "grüße 🦊", ""):
        (token_ids,) = ours.encode_blocking([text])
        (_, *spans), without = await ours.spans("", text, True), await ours.spans("", text, False)
        assert spans == without
        assert [0, *(token_id for token_id, _, _ in spans)] == token_ids.tolist()
        assert all(0 <= start < stop <= len(text) for _, start, stop in spans)
        assert {place for _, start, stop in spans for place in range(start, stop)} == set(range(len(text)))
    assert [text[start:stop] for text in ["hello the"] for _, start, stop in await ours.spans("", text, False)] == [
        ours.decode([token_id]) for token_id in ours.encode_blocking(["hello the"], add_special_tokens=False)[0]
    ]
    ours.close()


def test_byte_fallback_tokens_join_to_characters(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save(byte_fallback(), tmp_path))
    fox = [2 + byte for byte in "🦊".encode()]
    token_ids = [0, 261, *fox, 262, 258, 259, 1]
    assert decode(tokenizer, token_ids) == " a🦊é a" == byte_fallback().decode(token_ids)


def test_a_rendered_prompt_does_not_get_a_second_start_token(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save(BYTE_LEVEL, tmp_path))
    plain, rendered = tokenizer.encode_blocking(["hello", "<s>hello"])
    assert plain[0] == 0
    assert plain == rendered


def test_truncation_and_padding_in_the_file_are_ignored(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(pad_id=0, pad_token="<s>")
    short, long = load_tokenizer(save(tokenizer, tmp_path)).encode_blocking(["a", "a b c d e f g h"])
    assert len(short) == 2
    assert len(long) > 5


def test_added_tokens_are_text_and_special_tokens_are_not() -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("⟨tool⟩", special=False)])
    ours = Tokenizer(tokenizer, {"type": "ByteLevel"})
    token_id = tokenizer.token_to_id("⟨tool⟩")
    assert ours.token_bytes(token_id) == "⟨tool⟩".encode()
    assert ours.token_bytes(0) == b""
    assert ours.is_special(0) and not ours.is_special(token_id)
    assert ours.token_bytes(10**6) == b"", "models have more logits than their tokenizer has tokens"


def test_a_tokenizer_that_cannot_be_streamed_exactly_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)
    tokenizer = HuggingFaceTokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(ConfigError, match="WordPiece"):
        load_tokenizer(save(tokenizer, tmp_path))


async def test_encoding_in_threads_keeps_the_order(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save(BYTE_LEVEL, tmp_path))
    texts = [random.Random(i).choice(TEXT) * (i % 5) for i in range(50)]
    assert [decode(tokenizer, token_ids) for token_ids in await tokenizer.encode("", texts)] == texts
    tokenizer.close()


async def test_only_one_short_text_is_encoded_without_a_thread(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer
) -> None:
    encode, threads = tokenizer.encode_blocking, list[bool]()

    def watched(*arguments: Any) -> Any:
        threads.append(threading.current_thread() is threading.main_thread())
        return encode(*arguments)

    monkeypatch.setattr(tokenizer, "encode_blocking", watched)
    short, longer = "a" * MAX_INLINE_CHARS, "a" * (MAX_INLINE_CHARS + 1)
    for texts in ([short], [longer], ["a", "b"]):
        assert [decode(tokenizer, token_ids) for token_ids in await tokenizer.encode("", texts)] == texts
    assert threads == [True, False, False]
    tokenizer.close()
    with pytest.raises(WorkerNotReady):
        await tokenizer.encode("", [short])


class GatedEncoder:
    """Takes the place of the library. It encodes a text when the test says so, and records what is encoded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer) -> None:
        self.begun, self.ended = asyncio.Queue[str](), list[str]()
        self._gates = dict[str, threading.Event]()
        self._loop = asyncio.get_running_loop()
        monkeypatch.setattr(tokenizer, "encode_blocking", self._encode)

    def let_end(self, name: str) -> None:
        self._gates[name].set()

    def text(self, name: str) -> str:
        self._gates[name] = threading.Event()
        return name.ljust(LONG_TEXT)

    def _encode(self, texts: list[str], *_: object) -> list[list[int]]:
        name = texts[0].strip()
        self._loop.call_soon_threadsafe(self.begun.put_nowait, name)
        assert self._gates[name].wait(60)
        self.ended.append(name)
        return [[0]]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Iterator[Tokenizer]:
    tokenizer = load_tokenizer(save(byte_level(), tmp_path))
    yield tokenizer
    tokenizer.close()


async def test_a_long_text_does_not_wait_for_those_of_another_tenant(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer
) -> None:
    encoder = GatedEncoder(monkeypatch, tokenizer)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        names = [f"a{number}" for number in range(4)]
        for name in names:
            tasks.create_task(tokenizer.encode("a", [encoder.text(name)]))
        assert await encoder.begun.get() == "a0"
        of_b = tasks.create_task(tokenizer.encode("b", [encoder.text("b")]))
        assert await encoder.begun.get() == "b"
        encoder.let_end("b")
        await of_b
        assert encoder.ended == ["b"]
        for name in names:
            encoder.let_end(name)
    assert encoder.ended == ["b", *names], "the texts of one tenant are encoded in order"


async def test_a_cancelled_text_gives_its_place_back_when_its_thread_is_free(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer
) -> None:
    encoder = GatedEncoder(monkeypatch, tokenizer)
    async with asyncio.timeout(60):
        texts = [asyncio.create_task(tokenizer.encode("a", [encoder.text(f"a{number}")])) for number in range(3)]
        assert await encoder.begun.get() == "a0"
        for task in texts[:2]:
            task.cancel()
        await asyncio.wait(texts[:2])
        assert encoder.begun.empty(), "the first text cannot be stopped"
        encoder.let_end("a0")
        assert await encoder.begun.get() == "a2"
        encoder.let_end("a2")
        await texts[2]


async def test_a_tenant_has_a_bounded_number_of_long_texts_waiting(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer
) -> None:
    encoder = GatedEncoder(monkeypatch, tokenizer)
    names = [f"a{number}" for number in range(1 + MAX_LONG_WAITING)]
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        for name in names:
            text = encoder.text(name)
            tokenizer.check_queue("a", text)
            tasks.create_task(tokenizer.encode("a", [text]))
            await asyncio.sleep(0)
        with pytest.raises(QueueFull, match=str(MAX_LONG_WAITING)):
            tokenizer.check_queue("a", text)
        tokenizer.check_queue("a", "a short text")
        tokenizer.check_queue("b", text)
        for name in names:
            encoder.let_end(name)


async def test_a_text_that_waits_is_answered_when_the_server_stops(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer
) -> None:
    encoder = GatedEncoder(monkeypatch, tokenizer)
    async with asyncio.timeout(60):
        first, second = (asyncio.create_task(tokenizer.encode("a", [encoder.text(name)])) for name in ("a0", "a1"))
        assert await encoder.begun.get() == "a0"
        tokenizer.close()
        encoder.let_end("a0")
        assert await first == [[0]]
        with pytest.raises(WorkerNotReady):
            await second
