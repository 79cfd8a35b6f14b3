"""Tests of what is refused before a process renders it, and of what long prompts leave to the event loop."""

from __future__ import annotations

import asyncio
import gc
from array import array
from collections.abc import Awaitable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
from msgspec.structs import replace

from servekit.config import ServeConfig
from servekit.engine.input_processor import MAX_PREDICTION_TOKENS, TOKENS_PER_SLICE, InputProcessor
from servekit.engine.model_files import DEMO_MODEL_PATH, find_chat_template
from servekit.engine.tokenizer import load_tokenizer
from servekit.errors import ContextTooLong, InvalidRequest
from servekit.requests.generation import GenerationRequest, Prompt, Sampling
from servekit.sandbox.jobs import RenderChat
from servekit.scheduler.commands import AddSequence
from servekit.scheduler.scheduler_config import SchedulerConfig
from servekit.scheduler.workload_manager import WorkloadManager

Result = TypeVar("Result")

MAX_TOTAL_TOKENS = 100


class RecordingSandbox:
    """Takes the place of the sandbox, and renders nothing."""

    def __init__(self) -> None:
        self.jobs: list[RenderChat] = []

    async def run(self, job: RenderChat, param: str, tenant: str) -> str:
        self.jobs.append(job)
        return "rendered"


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> InputProcessor:
    model: Any = SimpleNamespace(
        eos_token_ids=[2], vocab_size=2048, default_temperature=0.0, default_top_k=0, default_top_p=1.0
    )
    limits = SchedulerConfig(
        num_blocks=64, block_size=16, max_model_len=MAX_TOTAL_TOKENS, max_num_seqs=1, max_num_batched_tokens=64
    )
    tokenizer, template = load_tokenizer(DEMO_MODEL_PATH), find_chat_template(DEMO_MODEL_PATH)
    config = ServeConfig(trust_request_chat_template=True)
    made = InputProcessor(config, DEMO_MODEL_PATH, tokenizer, template, model, lambda: limits)
    monkeypatch.setattr(made, "_sandbox", RecordingSandbox())
    return made


async def num_turns_of(awaitable: Awaitable[Result]) -> tuple[Result, int]:
    """Return the result, and how often the event loop ran something else meanwhile."""
    num_turns = 0

    async def count() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    try:
        return await awaitable, num_turns
    finally:
        counting.cancel()


async def test_long_prompt_is_checked_and_hashed_in_slices(processor: InputProcessor) -> None:
    limits = SchedulerConfig(
        num_blocks=2**15, block_size=16, max_model_len=2**18, max_num_seqs=1, max_num_batched_tokens=64
    )
    processor._limits = lambda: limits
    token_ids = array("i", range(2048)) * 100
    wanted = GenerationRequest(prompts=[Prompt(token_ids, "prompt")], sampling=Sampling())
    (prepared,), num_turns = await num_turns_of(processor.prepare(wanted, "org"))
    assert num_turns >= 2 * (len(token_ids) // TOKENS_PER_SLICE)
    command = AddSequence(sequence_id=0, prompt_token_ids=token_ids, sampling=prepared.sampling[0], tenant="org")
    assert prepared.block_hashes == [
        *WorkloadManager(limits).add(command).kv.hashes,
        prepared.block_hashes[-1],  # of the block with the last token, which the manager hashes later
    ]
    token_ids[-1] = 2048
    with pytest.raises(InvalidRequest, match="prompt contains token 2048"):
        await processor.prepare(wanted, "org")


async def test_garbage_collector_does_not_look_at_token_ids(processor: InputProcessor) -> None:
    limits = SchedulerConfig(num_blocks=64, block_size=16, max_model_len=512, max_num_seqs=1, max_num_batched_tokens=64)
    processor._limits = lambda: limits
    wanted = GenerationRequest(prompts=[Prompt("a b c", "prompt")], sampling=Sampling())
    (of_text,) = await processor.prepare(wanted, "")
    command = AddSequence(sequence_id=0, prompt_token_ids=of_text.token_ids, sampling=of_text.sampling[0])
    sequence = WorkloadManager(limits).add(command)
    assert gc.get_referents(of_text.token_ids) == gc.get_referents(sequence.token_ids) == [array]
    assert sequence.token_ids == of_text.token_ids and sequence.token_ids is not of_text.token_ids


def turns(role: str, num_characters: int) -> list[dict[str, Any]]:
    return [{"role": role, "content": "x" * (num_characters // 10)} for _ in range(10)]


async def test_a_conversation_that_cannot_fit_is_refused_before_it_is_rendered(processor: InputProcessor) -> None:
    fits = MAX_TOTAL_TOKENS * processor._tokenizer.max_token_bytes
    with pytest.raises(ContextTooLong) as refusal:
        await processor.render_chat("", turns("user", 2 * fits))
    assert refusal.value.param == "messages"
    assert await processor.render_chat("", turns("user", fits)) == "rendered"
    # A template may leave out what the assistant thought, and one of the request's may leave out anything.
    assert await processor.render_chat("", turns("assistant", 2 * fits)) == "rendered"
    assert await processor.render_chat("", turns("user", 2 * fits), "{{ 1 }}") == "rendered"


async def test_an_answer_may_be_as_long_as_the_present_limits_allow(processor: InputProcessor) -> None:
    """The replica with the most KV blocks may be lost for good, and a larger one may join."""
    wanted = GenerationRequest(prompts=[Prompt([1, 2, 3], "prompt")], sampling=Sampling())
    for max_model_len in (50, 20, 500):
        limits = SchedulerConfig(
            num_blocks=64, block_size=16, max_model_len=max_model_len, max_num_seqs=1, max_num_batched_tokens=64
        )
        processor._limits = lambda limits=limits: limits
        (prepared,) = await processor.prepare(wanted, "")
        assert prepared.sampling[0].max_tokens == max_model_len - 3
        too_long = GenerationRequest(prompts=wanted.prompts, sampling=Sampling(), max_tokens=max_model_len - 2)
        with pytest.raises(ContextTooLong, match=f"maximum context length is {max_model_len} tokens"):
            await processor.prepare(too_long, "")


async def test_the_beginning_of_a_prediction_is_encoded_if_drafts_can_be_looked_up_in_it(
    processor: InputProcessor,
) -> None:
    text = "a b " * 9999
    wanted = GenerationRequest(prompts=[Prompt("a", "prompt")], sampling=Sampling(), max_tokens=1, prediction=text)

    async def prediction(request: GenerationRequest) -> tuple[int, ...]:
        (prepared,) = await processor.prepare(request, "")
        return prepared.sampling[0].prediction

    assert await prediction(wanted) == (), "the server makes no drafts"
    limits = processor._limits()
    processor._limits = lambda: replace(limits, max_drafts=4)
    (encoded,) = await processor._tokenizer.encode("", [text], add_special_tokens=False)
    assert await prediction(wanted) == tuple(encoded[:MAX_PREDICTION_TOKENS])
    assert await prediction(replace(wanted, max_drafts=0)) == ()
    assert await prediction(replace(wanted, prediction=None)) == ()


MARKS = {"<|system|>": "<fim_prefix>", "<|user|>": "<fim_suffix>", "<|assistant|>": "<fim_middle>", "<pad>": "<EOT>"}


async def test_a_suffix_becomes_part_of_the_prompt_with_the_marks_of_the_model(
    processor: InputProcessor, tmp_path: Path
) -> None:
    text = (DEMO_MODEL_PATH / "tokenizer.json").read_text()
    for special, mark in MARKS.items():
        text = text.replace(special, mark)
    (tmp_path / "tokenizer.json").write_text(text)
    tokenizer = load_tokenizer(tmp_path)
    model, limits = processor._model, processor._limits
    filling = InputProcessor(processor._config, tmp_path, tokenizer, processor._template, model, limits)
    request = GenerationRequest(
        prompts=[Prompt("one", "prompt")], sampling=Sampling(stop_token_ids=[9]), suffix="three", max_tokens=1
    )
    (prepared,) = await filling.prepare(request, "")
    one, three = tokenizer.encode_blocking(["one", "three"], add_special_tokens=False)
    assert list(prepared.token_ids) == [1, 3, *one, 4, *three, 5]
    assert prepared.sampling[0].stop_token_ids == (9, 0), "the client's, and the end of the middle"
    with pytest.raises(InvalidRequest, match="it has token ids"):
        await filling.prepare(replace(request, prompts=[Prompt([5], "prompt")]), "")
    with pytest.raises(InvalidRequest, match="no tokens for filling in text"):
        await processor.prepare(request, "")
    tokenizer.close()
