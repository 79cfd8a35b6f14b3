"""Claims about the KV connector between prefill and decode workers: what is sent is loaded as it was."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from servekit.engine.model_files import DEMO_MODEL_PATH
from servekit.protocol.block_ring import BlockRing
from servekit.protocol.messages import ScheduledChunk, SlotAssignment, StepPlan, TransferReport
from servekit.protocol.sampling_params import SamplingParams
from tests.support.inprocess import InProcessEngine, load
from tests.workers.kv_cache.test_kv_connector import KEYS, are_equal, contents, make_cache
from workers.kv_cache.kv_connector import block_bytes
from workers.kv_cache.pages import KVCache
from workers.kv_cache.transfer_connector import TransferConnector
from workers.loading.model_manager import LoadedModel
from workers.runner.interface import OutOfMemory
from workers.speculation.ngram import NgramDrafter

LAYOUT = b"a layout, 16 byt"
NOTHING = TransferReport()


@pytest.fixture
def fd() -> Iterator[int]:
    fd = os.memfd_create("test")
    os.ftruncate(fd, 2**17)
    yield fd
    os.close(fd)


def sender(fd: int, cache: KVCache) -> TransferConnector:
    ring = BlockRing(fd, block_bytes(cache), LAYOUT, is_writer=True)
    return TransferConnector(cache, [ring], ring)


def receiver(cache: KVCache, *fds: int) -> TransferConnector:
    return TransferConnector(cache, [BlockRing(fd, block_bytes(cache), LAYOUT) for fd in fds])


def sends(*blocks: int) -> StepPlan:
    """Each block is sent with the key of its number."""
    return StepPlan(0, 0, (), (), sends=tuple((block, KEYS[block]) for block in blocks))


def loads(*loads: tuple[int, int]) -> StepPlan:
    """(number of the key, block)"""
    return StepPlan(0, 0, (), (), loads=tuple((KEYS[key], block) for key, block in loads))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_a_block_of_one_worker_is_loaded_by_another_one(fd: int, dtype: torch.dtype) -> None:
    source, target = make_cache(dtype), make_cache(dtype)
    prefill, decode = sender(fd, source), receiver(target, fd)
    assert prefill.send(sends(5, 2, 7), NOTHING).num_sent == 3
    before = [contents(target, block) for block in range(8)]
    for pages in (*target.keys, *target.values):
        pages.zero_()
    report = decode.transfer(loads((2, 0), (7, 3)))
    assert report.num_received == 2 and not report.failed_loads
    assert are_equal(contents(target, 0), contents(source, 2)) and are_equal(contents(target, 3), contents(source, 7))
    assert are_equal(contents(source, 2), before[2])
    assert decode.keys() == prefill.keys() == [KEYS[5], KEYS[2], KEYS[7]]


def test_a_block_comes_from_whichever_prefill_worker_has_sent_it(fd: int) -> None:
    other_fd = os.memfd_create("test")
    os.ftruncate(other_fd, 2**17)
    first, second, target = make_cache(), make_cache(), make_cache()
    for pages in (*second.keys, *second.values):
        pages.neg_()
    sender(fd, first).send(sends(1), NOTHING)
    sender(other_fd, second).send(sends(2), NOTHING)
    decode = receiver(target, fd, other_fd)
    assert decode.transfer(loads((1, 4), (2, 5), (3, 6))).failed_loads == (2,)
    assert are_equal(contents(target, 4), contents(first, 1)) and are_equal(contents(target, 5), contents(second, 2))
    os.close(other_fd)


def test_a_worker_that_joined_sends_to_its_outbox_and_loads_from_the_inbox_that_its_agent_fills(fd: int) -> None:
    inbox_fd = os.memfd_create("test")
    os.ftruncate(inbox_fd, 2**17)
    cache, other = make_cache(), make_cache()
    for pages in (*other.keys, *other.values):
        pages.neg_()
    outbox, inbox = (BlockRing(each, block_bytes(cache), LAYOUT, is_writer=True) for each in (fd, inbox_fd))
    worker = TransferConnector(cache, [outbox, inbox], outbox)
    assert worker.send(sends(1), NOTHING).num_sent == 1 and worker.num_transfer_blocks == outbox.max_readable
    sender(inbox_fd, other).send(sends(2), NOTHING)  # as the agent does
    assert not worker.transfer(loads((2, 5))).failed_loads
    assert are_equal(contents(cache, 5), contents(other, 2))
    assert set(worker.keys()) == {KEYS[1], KEYS[2]} and outbox.list_keys() == [KEYS[1]]
    os.close(inbox_fd)


def test_what_was_overwritten_is_reported_once_and_its_load_fails(fd: int) -> None:
    source, target = make_cache(), make_cache()
    prefill, decode = sender(fd, source), receiver(target, fd)
    prefill.send(sends(0), NOTHING)
    assert decode.transfer(loads((0, 0))).dropped_keys == ()
    ring = prefill._rings[0]
    reported = NOTHING
    for number in range(ring.num_blocks):
        key = number.to_bytes(16, "big")
        reported = prefill.send(StepPlan(0, 0, (), (), sends=((1, key),)), NOTHING)
        if KEYS[0] in prefill.transfer(StepPlan(0, 0, (), ())).dropped_keys:
            break
    assert reported.num_sent == 1
    report = decode.transfer(loads((0, 0)))
    assert report.failed_loads == (0,) and report.dropped_keys == (KEYS[0],)
    assert decode.transfer(loads()).dropped_keys == ()


def test_a_damaged_block_is_not_taken_for_a_right_one(fd: int) -> None:
    source, target = make_cache(), make_cache()
    prefill, decode = sender(fd, source), receiver(target, fd)
    prefill.send(sends(0, 1), NOTHING)
    prefill._rings[0].rows[1, 9] ^= 1
    report = decode.transfer(loads((0, 0), (1, 1)))
    assert report.failed_loads == (1,) and report.num_received == 1


def test_after_an_adapter_has_failed_nothing_is_sent_and_the_manager_and_the_log_say_so(
    fd: int, caplog: pytest.LogCaptureFixture
) -> None:
    prefill, decode = sender(fd, make_cache()), receiver(make_cache(), fd)
    for connector in (decode, prefill, prefill):
        connector.stop_writing()
    (record,) = caplog.records
    assert "a LoRA adapter has failed" in record.message
    report = prefill.send(sends(3), NOTHING)
    assert report.num_sent == 0 and report.dropped_keys == (KEYS[3],) and prefill.keys() == []


# -- in a runner -------------------------------------------------------------------------------------------------------

PROMPT = tuple(range(3, 12))
STEP = StepPlan(
    0,
    0,
    (SlotAssignment(0, SamplingParams(max_tokens=4, temperature=0.0), len(PROMPT)),),
    (ScheduledChunk(0, 0, len(PROMPT), PROMPT, (5, 2, 7), samples=True),),
    sends=((5, KEYS[5]), (2, KEYS[2])),
)


@pytest.fixture(scope="module")
def demo() -> LoadedModel:
    return load(DEMO_MODEL_PATH)


@pytest.mark.parametrize("max_drafts", [0, 3])
def test_a_runner_sends_what_its_step_computes_with_and_without_a_drafter(
    demo: LoadedModel, fd: int, max_drafts: int
) -> None:
    os.ftruncate(fd, 2**24)
    drafter = NgramDrafter() if max_drafts else None
    engine = InProcessEngine(
        demo, max_drafts=max_drafts, drafter=drafter, make_connector=lambda cache: sender(fd, cache)
    )
    cache = engine.runner.cache
    transfers = engine.runner.execute(STEP).transfers
    assert transfers is not None and transfers.num_sent == 2
    ring = BlockRing(fd, block_bytes(cache), LAYOUT)
    assert ring.list_keys() == [KEYS[5], KEYS[2]]
    target = TransferConnector(cache, [ring])
    before = contents(cache, 5)
    assert target.transfer(loads((5, 30))).num_received == 1
    assert are_equal(contents(cache, 30), before) and before[0].any(), "what the step has computed"


def test_a_runner_without_memory_to_send_blocks_does_not_fail_in_another_way_than_its_step(
    demo: LoadedModel, fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> TransferReport:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    os.ftruncate(fd, 2**24)
    engine = InProcessEngine(demo, make_connector=lambda cache: sender(fd, cache))
    monkeypatch.setattr(engine.runner.connector, "send", refuse)
    with pytest.raises(OutOfMemory, match="CUDA out of memory"):
        engine.runner.execute(STEP)
