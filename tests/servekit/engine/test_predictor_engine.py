"""The engine of a predictor: what it admits, and what becomes of requests when workers, clients and time interfere."""

from __future__ import annotations

import asyncio
import base64
from array import array
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from servekit.config import ServeConfig
from servekit.engine.caller import Caller
from servekit.engine.prediction_state import PredictionState
from servekit.engine.predictor_engine import PredictorEngine
from servekit.errors import (
    ConfigError,
    DeadlineExceeded,
    InvalidRequest,
    QueueFull,
    RequestCrashesWorker,
    ServekitError,
    WorkerLost,
    WorkerNotReady,
)
from servekit.protocol.prediction import PredictorKind
from servekit.requests.prediction import ImageInput, Input, PredictionRequest
from tests.support.local_predictor import LocalExecutor, local_engine
from tests.support.predictor_checkpoints import TEXTS, make_embedder, make_image, make_image_classifier

Engine = tuple[PredictorEngine, LocalExecutor]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_embedder(tmp_path_factory.mktemp("embedder"))


@pytest.fixture
async def engine(checkpoint: Path) -> AsyncIterator[Engine]:
    async with local_engine(checkpoint, PredictorKind.EMBED, max_num_queued_reqs=20) as made:
        yield made


def request(*texts: str, **more: Any) -> PredictionRequest:
    return PredictionRequest(inputs=list(texts), param="input", **more)


async def failure_of(state: PredictionState) -> ServekitError:
    with pytest.raises(ServekitError) as raised:
        await asyncio.wait_for(state.results(), 30)
    return raised.value


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_results_come_in_the_order_of_the_inputs_whatever_the_batches(engine: Engine) -> None:
    predictor, _ = engine
    alone = [(await (await predictor.submit(request(text))).results())[0] for text in TEXTS]
    states = await asyncio.gather(*(predictor.submit(request(*TEXTS[start:])) for start in range(3)))
    for start, state in enumerate(states):
        for found, expected in zip(await state.results(), alone[start:], strict=True):
            pairs = zip(array("f", found), array("f", expected), strict=True)
            assert all(abs(first - second) < 1e-5 for first, second in pairs)
    assert predictor.stats().num_waiting == 0 and predictor._places.total == predictor._tokens.total == 0


async def test_one_callback_sends_one_batch(checkpoint: Path) -> None:
    """To plan and to encode several batches of images in one piece would hold the event loop for milliseconds."""
    async with local_engine(checkpoint, PredictorKind.EMBED, max_num_seqs=2, max_steps_in_flight=2) as made:
        predictor, executor = made
        executor.hold = True
        state = await predictor.submit(request(*TEXTS[:5]))
        num_sent = []
        for _ in range(3):
            num_sent.append(len(executor.sent))
            await asyncio.sleep(0)
        assert num_sent == [0, 1, 2]
        executor.release()
        assert len(await state.results()) == 5


async def test_images_are_batched_by_their_pixels(tmp_path: Path) -> None:
    """Files of a few kB took a worker a third of a second each, and a batch had 85 of them."""
    make_image_classifier(tmp_path)
    async with local_engine(tmp_path, PredictorKind.CLASSIFY, max_image_pixels=10_000) as (predictor, executor):
        small, large, unknown = make_image(10, 10), make_image(100, 99), make_image(100, 100)[:15]
        encoded = base64.b64encode(make_image(50, 100, "JPEG"))
        files = [(small, False), (large, False), (encoded, True), (encoded, True), (unknown, False), (small, False)]
        inputs: list[Input] = [ImageInput(memoryview(data), is_base64) for data, is_base64 in files]
        executor.hold = True
        state = await predictor.submit(PredictionRequest(inputs=inputs, param="image"))
        await settle()
        assert [[item.num_pixels for item in batch.items] for batch in executor.sent] == [[100, 9900]]
        executor.release()
        assert "cannot be decoded" in (await failure_of(state)).message  # the unknown one
        sent = [[item.num_pixels for item in batch.items] for batch in executor.sent]
        assert sent == [[100, 9900], [5000, 5000], [10_000]]
        assert executor.sizes == [16 + 9900 // 4096, 16 + 2 * (5000 // 4096), 8 + 10_000 // 4096]


async def test_a_request_has_a_bounded_number_of_pixels(tmp_path: Path) -> None:
    make_image_classifier(tmp_path)
    async with local_engine(tmp_path, PredictorKind.CLASSIFY, max_image_pixels=1000) as (predictor, _):
        image: Input = ImageInput(memoryview(make_image(100, 10)), False)
        state = await predictor.submit(PredictionRequest(inputs=[image] * 4, param="image"))
        assert len(await state.results()) == 4
        with pytest.raises(InvalidRequest, match=r"have 5000 pixels in all.* the limit is 4000, .*send fewer"):
            await predictor.submit(PredictionRequest(inputs=[image] * 5, param="image"))
        assert predictor._places.total == predictor._pixels.total == 0


async def test_the_images_of_one_tenant_leave_room_for_those_of_others(tmp_path: Path) -> None:
    """Before, a tenant could queue a thousand images, which the worker decoded for minutes."""
    make_image_classifier(tmp_path)
    async with local_engine(tmp_path, PredictorKind.CLASSIFY, max_image_pixels=1000) as (predictor, executor):
        image: Input = ImageInput(memoryview(make_image(100, 10)), False)
        four = PredictionRequest(inputs=[image] * 4, param="image")
        executor.hold = True
        greedy, modest = Caller(tenant="greedy"), Caller(tenant="modest")
        states = [await predictor.submit(four, greedy) for _ in range(4)]
        with pytest.raises(QueueFull) as refused:
            await predictor.submit(four, greedy)
        assert "16000 pixels of images are queued" in refused.value.message
        assert "the limit is 32000 (32 times max_image_pixels)" in refused.value.message
        states.append(await predictor.submit(four, modest))
        for state in states[:2]:
            state.abort()
        states.append(await predictor.submit(four, greedy))
        executor.release()
        for state in states[2:]:
            assert len(await state.results()) == 4
        assert predictor._places.total == predictor._pixels.total == 0


async def test_requests_that_come_all_the_time_do_not_put_off_the_next_batch(engine: Engine) -> None:
    predictor, executor = engine
    executor.hold, loop, num_left = True, asyncio.get_running_loop(), 20

    def come() -> None:
        nonlocal num_left
        num_left -= 1
        if num_left:
            loop.call_soon(come)  # before what this one schedules
        predictor._pump_soon()

    state = await predictor.submit(request(*TEXTS[:2]))
    come()
    for _ in range(4):
        await asyncio.sleep(0)
    assert num_left and len(executor.sent) == 1
    executor.release()
    assert len(await state.results()) == 2


async def test_what_a_lost_worker_had_is_computed_again(engine: Engine) -> None:
    predictor, executor = engine
    executor.hold = True
    states = [await predictor.submit(request(text)) for text in TEXTS]
    await settle()
    executor.lose()
    executor.hold = False
    assert all(len(each) == 1 for each in await asyncio.gather(*(state.results() for state in states)))
    assert predictor.state == "ready" and predictor.stats().num_stale_results == 0


async def test_only_the_request_that_loses_three_workers_fails(engine: Engine) -> None:
    predictor, executor = engine
    executor.hold = True
    deadly = await predictor.submit(request("cats and dogs"))
    other = await predictor.submit(request("fish"))
    for _ in range(3):
        await settle()
        assert executor.sent
        executor.lose()
    executor.hold = False
    assert isinstance(await failure_of(deadly), RequestCrashesWorker)
    assert len(await other.results()) == 1


async def test_without_a_replacement_all_requests_fail_and_the_engine_ends(engine: Engine) -> None:
    predictor, executor = engine
    executor.hold, executor.start_failure = True, WorkerLost("no replacement")
    state = await predictor.submit(request("a"))
    await settle()
    executor.lose()
    assert (await failure_of(state)).message == "no replacement"
    await predictor.wait_until_failed()
    assert predictor.state == "failed" and not predictor.is_healthy
    with pytest.raises(WorkerLost):
        await predictor.submit(request("a"))


async def test_a_deadline_ends_a_request_and_frees_its_places(engine: Engine) -> None:
    predictor, executor = engine
    executor.hold = True
    state = await predictor.submit(request("a", "b", deadline_ms=50))
    assert isinstance(await failure_of(state), DeadlineExceeded)
    assert predictor._places.total == 0
    executor.release()
    await settle()
    assert predictor.batcher.num_in_flight == 0


async def test_a_client_that_leaves_frees_its_places(engine: Engine) -> None:
    predictor, executor = engine
    executor.hold = True
    state = await predictor.submit(request("a", "b"))
    state.abort()
    state.abort()
    assert predictor._places.total == predictor._tokens.total == 0
    assert await predictor.abort_request("", "x") == 0
    other = await predictor.submit(request("a", "b"), Caller(tenant="t", request_id="x"))
    assert await predictor.abort_request("other", "x") == 0
    assert await predictor.abort_request("t", "x") == 2
    assert (await failure_of(other)).answer_code == "aborted"


async def test_a_full_queue_is_refused_and_a_tenant_may_have_half_of_it(engine: Engine) -> None:
    predictor, executor = engine
    executor.hold = True
    await predictor.submit(request(*["a"] * 6), Caller(tenant="t"))
    with pytest.raises(QueueFull, match="the queue is full: 6 inputs are queued, 6 of them for your API key") as raised:
        await predictor.submit(request(*["a"] * 5), Caller(tenant="t"))
    assert raised.value.retry_after_s is not None and raised.value.retry_after_s >= 1
    await predictor.submit(request(*["a"] * 5), Caller(tenant="u"))
    with pytest.raises(InvalidRequest, match="the queue holds 10 of one tenant"):
        await predictor.submit(request(*["a"] * 11), Caller(tenant="t"))


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (request("a", dimensions=33), "dimensions = 33; the model's embeddings have 32"),
        (
            PredictionRequest(inputs=[ImageInput(memoryview(b""), False)], param="image"),
            "takes texts, and image has images",
        ),
        (request(*["a"] * 1025), r"has 1025 inputs; the limit is 1024 \(max_client_batch_size\)"),
        (request("a", prompt_name="query"), "it has none"),
    ],
)
async def test_what_the_model_cannot_compute_is_refused(engine: Engine, wanted: PredictionRequest, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        await engine[0].submit(wanted)
    assert engine[0]._places.total == 0


async def test_a_draining_engine_answers_what_it_has_and_admits_no_more(engine: Engine) -> None:
    predictor, executor = engine
    executor.hold = True
    state = await predictor.submit(request("a"))
    predictor.drain()
    assert predictor.state == "draining"
    with pytest.raises(WorkerNotReady, match="shutting down"):
        await predictor.submit(request("a"))
    executor.release()
    assert len(await state.results()) == 1


async def test_readiness_is_proved_by_an_item_when_no_batch_came_lately(engine: Engine) -> None:
    predictor, executor = engine
    predictor._probe._proven_s = None
    assert await predictor.probe_readiness()
    assert [len(batch.items) for batch in executor.sent] == [1]


@pytest.mark.parametrize(
    "settings",
    [
        {"api_processes": 2},
        {"speculative": "ngram"},
        {"data_parallel_size": 2},
        {"lora": "a=b"},
        {"enable_lora": True},
    ],
)
def test_settings_that_a_predictor_cannot_have_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"leave out --{next(iter(settings)).replace('_', '-')}"):
        PredictorEngine(ServeConfig(**settings), PredictorKind.EMBED)
