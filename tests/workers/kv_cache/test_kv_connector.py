"""Claims about the KV connector: blocks come back as they were, and answers are the same with and without it."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from msgspec.structs import replace

from servekit.engine.model_files import DEMO_MODEL_PATH
from servekit.protocol.messages import StepPlan
from tests.support.inprocess import InProcessEngine, load
from tests.workers.kv_cache.test_disk_tier import until_written
from workers.device.memory import is_out_of_memory
from workers.kv_cache import kv_connector
from workers.kv_cache.disk_tier import DiskTier
from workers.kv_cache.kv_connector import KVConnector, OffloadingConnector, block_bytes
from workers.kv_cache.pages import KVCache, LayerShape
from workers.loading.model_manager import LoadedModel

KEYS = [bytes([number]) * 16 for number in range(8)]


def make_cache(dtype: torch.dtype = torch.float32) -> KVCache:
    layers = [LayerShape(2, 8, 4), LayerShape(1, 6, 6)]

    def shapes(layer: LayerShape, block_size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        heads = layer.num_kv_heads
        return (heads, block_size, layer.key_dim), (heads, layer.value_dim, block_size)

    cache = KVCache(layers, shapes, num_blocks=8, block_size=4, dtype=dtype, device=torch.device("cpu"))
    for number, pages in enumerate((*cache.keys, *cache.values)):
        pages.copy_((torch.arange(pages.numel()) * (number + 3) % 250).view(pages.shape))
    return cache


def contents(cache: KVCache, block: int) -> list[torch.Tensor]:
    return [pages[block].clone() for pages in (*cache.keys, *cache.values)]


def are_equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, one, other))


def plan(stores: tuple[tuple[int, int], ...] = (), loads: tuple[tuple[int, int], ...] = ()) -> StepPlan:
    """Stores are (block, number of the key), and loads are (number of the key, block)."""
    return StepPlan(
        0,
        0,
        (),
        (),
        stores=tuple((block, KEYS[key]) for block, key in stores),
        loads=tuple((KEYS[key], block) for key, block in loads),
    )


def with_files(
    folder: Path, num_rows: int, num_files: int, dtype: torch.dtype = torch.float32
) -> tuple[KVCache, DiskTier, OffloadingConnector]:
    """Return a cache whose first `num_files` blocks were stored in turn, the tier of their files, and the connector."""
    cache = make_cache(dtype)
    disk = DiskTier(folder, "model", 10**6, block_bytes(cache))
    connector = OffloadingConnector(cache, num_rows, disk)
    for number in range(num_files):
        connector.transfer(plan(stores=((number, number),)))
    until_written(disk, *KEYS[:num_files])
    return cache, disk, connector


@pytest.fixture
def with_page_cache(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], None]:
    """Return a function that sets how many bytes of each file are in the page cache; None stands for all.

    It replaces the kernel's answer, because not every file system can tell.
    """
    read = os.preadv

    def let_it_have(num_bytes: int | None) -> None:
        def preadv(fd: int, parts: list[memoryview], offset: int, flags: int = 0) -> int:
            if num_bytes is None or not flags & os.RWF_NOWAIT:
                return read(fd, parts, offset)
            if not num_bytes:
                raise BlockingIOError
            found = os.pread(fd, num_bytes, offset)
            for part in map(memoryview, parts):
                some, found = found[: part.nbytes], found[part.nbytes :]
                part.cast("B")[: len(some)] = some
            return num_bytes

        monkeypatch.setattr(os, "preadv", preadv)

    let_it_have(None)
    return let_it_have


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_a_block_comes_back_as_it_was_into_another_one(dtype: torch.dtype) -> None:
    cache = make_cache(dtype)
    connector = OffloadingConnector(cache, num_blocks=8)
    before = [contents(cache, block) for block in range(8)]
    report = connector.transfer(plan(stores=((1, 1), (5, 5))))
    assert (report.num_stored, report.num_in_memory, report.block_bytes) == (2, 2, block_bytes(cache))
    for pages in (*cache.keys, *cache.values):
        pages.zero_()
    report = connector.transfer(plan(loads=((5, 0), (1, 7), (3, 2))))
    assert report.failed_loads == (2,) and report.num_loaded_from_memory == 2
    assert are_equal(contents(cache, 0), before[5]) and are_equal(contents(cache, 7), before[1])
    assert not any(part.any() for part in contents(cache, 2))


def test_stores_come_before_loads_into_the_same_blocks() -> None:
    cache = make_cache()
    connector = OffloadingConnector(cache, num_blocks=8)
    before = [contents(cache, block) for block in range(8)]
    connector.transfer(plan(stores=((0, 0),)))
    connector.transfer(plan(stores=((1, 1),), loads=((0, 1),)))
    assert are_equal(contents(cache, 1), before[0])
    connector.transfer(plan(loads=((1, 6),)))
    assert are_equal(contents(cache, 6), before[1])


@pytest.mark.parametrize("block", [8, -1])
def test_a_block_that_does_not_exist_is_neither_read_nor_written(block: int) -> None:
    connector = OffloadingConnector(make_cache(), num_blocks=8)
    connector.transfer(plan(stores=((0, 0),)))
    for wrong in (plan(stores=((1, 1), (block, 2))), plan(loads=((0, 1), (0, block)))):
        with pytest.raises(IndexError):
            connector.transfer(wrong)
    assert connector.keys() == [KEYS[0]]


def test_memory_keeps_the_blocks_that_were_used_last_and_reports_the_others() -> None:
    connector = OffloadingConnector(make_cache(), num_blocks=3)
    connector.transfer(plan(stores=((0, 0), (1, 1), (2, 2))))
    assert connector.transfer(plan(stores=((0, 0),))).num_stored == 0, "it is there already"
    report = connector.transfer(plan(stores=((3, 3),), loads=((1, 7),)))
    assert report.dropped_keys == (KEYS[2],) and not report.failed_loads
    assert connector.keys() == [KEYS[0], KEYS[1], KEYS[3]]
    report = connector.transfer(plan(stores=((0, 4), (1, 5), (2, 6), (3, 7))))
    assert sorted(report.dropped_keys) == [KEYS[0], KEYS[1], KEYS[3], KEYS[4]] and report.num_in_memory == 3


def test_a_store_that_fails_for_want_of_memory_keeps_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make_cache()
    connector = OffloadingConnector(cache, num_blocks=2)
    # Copies of a device take memory; those in the host's memory take none.
    connector._copies = kv_connector._DeviceCopies([*cache.keys, *cache.values], connector._buffer)
    before = contents(cache, 2)

    def refuse(*_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "index_select", refuse)
        with pytest.raises(torch.OutOfMemoryError):
            connector.transfer(plan(stores=((1, 1), (2, 2))))
    assert connector.keys() == []
    assert connector.transfer(plan(stores=((2, 2), (3, 3)), loads=((2, 5),))).num_in_memory == 2
    assert are_equal(contents(cache, 5), before)
    assert connector.transfer(plan(loads=((1, 6),))).failed_loads == (0,)


def test_a_block_that_left_memory_is_read_from_the_disk(
    tmp_path: Path, with_page_cache: Callable[[int | None], None]
) -> None:
    with_page_cache(0)
    cache = make_cache()
    disk = DiskTier(tmp_path, "model", 10**6, block_bytes(cache))
    connector = OffloadingConnector(cache, 1, disk)
    before = [contents(cache, block) for block in range(8)]
    assert connector.transfer(plan(stores=((0, 0), (1, 1)))).dropped_keys == (KEYS[0],), "more than there is room for"
    assert connector.transfer(plan(stores=((2, 2),))).dropped_keys == ()
    until_written(disk, KEYS[1], KEYS[2])
    report = connector.transfer(plan(loads=((1, 5), (2, 6))))
    assert (report.num_loaded_from_memory, report.num_loaded_from_disk, report.num_on_disk) == (1, 1, 2)
    assert are_equal(contents(cache, 5), before[1]) and are_equal(contents(cache, 6), before[2])
    assert set(connector.keys()) == {KEYS[1], KEYS[2]}
    connector.stop_writing()
    assert connector.transfer(plan(stores=((3, 3),))).num_stored == 1 and KEYS[3] not in disk
    assert KEYS[3] in connector.transfer(plan(loads=((1, 5),))).dropped_keys
    (path,) = tmp_path.glob(f"*/0/{KEYS[2].hex()}.block")
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    report = connector.transfer(plan(loads=((2, 3), (1, 4))))
    assert report.failed_loads == (0,) and report.num_loaded_from_memory == 1


def test_blocks_that_cannot_be_read_leave_the_others_whole_and_their_memory_free(
    tmp_path: Path, with_page_cache: Callable[[int | None], None]
) -> None:
    with_page_cache(0)
    cache, _, connector = with_files(tmp_path, num_rows=3, num_files=6)
    before = [contents(cache, block) for block in range(8)]
    for number in (0, 2):
        (path,) = tmp_path.glob(f"*/0/{KEYS[number].hex()}.block")
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    report = connector.transfer(plan(loads=((0, 5), (1, 6), (2, 7))))
    assert report.failed_loads == (0, 2) and report.num_loaded_from_disk == 1
    assert report.num_in_memory == 1 and sorted(connector._free_rows + list(connector._rows.values())) == [0, 1, 2]
    assert are_equal(contents(cache, 6), before[1])
    assert are_equal(contents(cache, 5), before[5]) and are_equal(contents(cache, 7), before[7]), "they are not written"
    assert connector.transfer(plan(loads=((3, 0), (4, 2), (1, 5)))).num_loaded_from_memory == 1
    assert [are_equal(contents(cache, block), before[key]) for key, block in ((3, 0), (4, 2), (1, 5))] == [True] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.usefixtures("with_page_cache")
def test_a_block_whose_file_is_in_the_page_cache_is_read_directly_into_the_pages(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    cache, disk, connector = with_files(tmp_path, num_rows=2, num_files=4, dtype=dtype)
    before = [contents(cache, block) for block in range(8)]
    report = connector.transfer(plan(loads=((0, 5), (3, 6), (1, 7))))
    assert (report.num_loaded_from_disk, report.num_loaded_from_memory, report.num_in_memory) == (2, 1, 2)
    assert not report.failed_loads and not report.dropped_keys
    assert [are_equal(contents(cache, block), before[key]) for key, block in ((0, 5), (3, 6), (1, 7))] == [True] * 3
    assert all(are_equal(contents(cache, block), before[block]) for block in range(5)), "no other one is written"
    assert list(connector._rows) == [KEYS[2], KEYS[3]], "memory has what it had; the one that was used there comes last"
    assert disk.keys() == [KEYS[2], KEYS[3], KEYS[0], KEYS[1]], "the files that were used last come last"


@pytest.mark.usefixtures("with_page_cache")
def test_a_block_that_was_read_to_the_pages_is_not_copied_to_memory_unless_its_file_is_gone(tmp_path: Path) -> None:
    cache, disk, connector = with_files(tmp_path, num_rows=2, num_files=5)
    before = [contents(cache, block) for block in range(8)]
    connector.transfer(plan(loads=((0, 5), (1, 6), (2, 7))))
    disk._keys.pop(KEYS[1])  # as if the folder had been full
    report = connector.transfer(plan(stores=((5, 0), (6, 1))))
    assert report.num_stored == 1 and list(connector._rows) == [KEYS[4], KEYS[1]]
    until_written(disk, KEYS[1])
    report = connector.transfer(plan(stores=((5, 2), (7, 3))))
    assert report.num_stored == 2, "other blocks may be in the same place of the pages by then"
    assert connector.transfer(plan(loads=((0, 3), (1, 4)))).num_loaded_from_disk == 2
    assert are_equal(contents(cache, 3), before[0]) and are_equal(contents(cache, 4), before[1])


@pytest.mark.parametrize("num_bytes", [0, 10, 200, None])
def test_a_block_that_is_only_partly_in_the_page_cache_is_read_all_the_same(
    tmp_path: Path, with_page_cache: Callable[[int | None], None], num_bytes: int | None
) -> None:
    cache, _, connector = with_files(tmp_path, num_rows=1, num_files=3)
    before = contents(cache, 0)
    with_page_cache(num_bytes)
    assert connector.transfer(plan(loads=((0, 5),))).num_loaded_from_disk == 1
    assert are_equal(contents(cache, 5), before)
    assert list(connector._rows) == ([KEYS[2]] if num_bytes is None else [KEYS[0]])


@pytest.mark.parametrize("what", ["header", "first", "last", "short", "long", "empty", "gone", "link", "other key"])
@pytest.mark.usefixtures("with_page_cache")
def test_a_file_in_the_page_cache_that_is_not_what_was_written_is_not_served(tmp_path: Path, what: str) -> None:
    cache, disk, connector = with_files(tmp_path, num_rows=1, num_files=3)
    before = contents(cache, 1)
    path, other = (next(tmp_path.glob(f"*/0/{key.hex()}.block")) for key in KEYS[:2])
    written = path.read_bytes()
    header, block = written[: -block_bytes(cache)], written[-block_bytes(cache) :]
    not_numbers = b"\xff" * len(block)
    damaged = {
        "header": bytes([header[0] ^ 1]) + header[1:] + block,
        "first": header + not_numbers[:8] + block[8:],
        "last": header + block[:-8] + not_numbers[:8],
        "short": header + not_numbers[:-1],
        "long": written + b"x",
        "empty": b"",
        "other key": other.read_bytes(),
    }
    path.unlink()
    if what in damaged:
        path.write_bytes(damaged[what])
    elif what == "link":
        path.symlink_to(other)
    report = connector.transfer(plan(loads=((0, 5), (1, 6))))
    assert report.failed_loads == (0,) and report.num_loaded_from_disk == 1
    assert are_equal(contents(cache, 6), before)
    assert all(part.isfinite().all() for part in contents(cache, 5)), "attention multiplies other cells by zero"
    assert not path.exists() and KEYS[0] not in disk and set(connector.keys()) == {KEYS[1], KEYS[2]}


def test_a_block_on_the_disk_is_not_copied_to_memory_that_the_same_step_needs_for_its_loads(
    tmp_path: Path, with_page_cache: Callable[[int | None], None]
) -> None:
    with_page_cache(0)
    cache, disk, connector = with_files(tmp_path, num_rows=3, num_files=7)
    before = [contents(cache, block) for block in range(8)]
    # Key 7 is nowhere else; of the others, memory has room for one besides the two that are loaded.
    report = connector.transfer(plan(stores=((7, 7), (1, 1), (2, 2)), loads=((0, 1), (3, 2))))
    assert report.num_stored == 3 - 1 and not report.dropped_keys
    assert set(connector._rows) == {KEYS[2], KEYS[0], KEYS[3]}
    until_written(disk, KEYS[7])
    connector.transfer(plan(loads=((1, 4), (2, 5), (7, 6))))
    assert [are_equal(contents(cache, block), before[key]) for key, block in ((1, 4), (2, 5), (7, 6))] == [True] * 3


def test_blocks_of_waiting_sequences_are_read_ahead_unless_they_are_in_memory(tmp_path: Path) -> None:
    cache, disk, connector = with_files(tmp_path, num_rows=1, num_files=3)
    before = contents(cache, 1)
    connector.transfer(replace(plan(), prefetches=(KEYS[1], KEYS[2], KEYS[3])))
    assert list(disk._prefetched) == [KEYS[1]]
    disk._prefetched[KEYS[1]][1].result()
    (path,) = tmp_path.glob(f"*/0/{KEYS[1].hex()}.block")
    path.unlink()
    assert connector.transfer(plan(loads=((1, 5),))).num_loaded_from_disk == 1
    assert are_equal(contents(cache, 5), before)
    connector.transfer(replace(plan(), prefetches=(KEYS[2],)))
    disk._prefetched[KEYS[2]][1].result()
    assert connector.transfer(plan(loads=((1, 6),))).num_loaded_from_memory == 1
    assert are_equal(contents(cache, 6), before), "memory that holds a block is not used to read ahead"


@pytest.mark.usefixtures("with_page_cache")
def test_what_the_same_step_loads_is_not_read_ahead(tmp_path: Path) -> None:
    _, disk, connector = with_files(tmp_path, num_rows=1, num_files=4)
    connector.transfer(replace(plan(loads=((0, 5), (1, 6))), prefetches=(KEYS[0], KEYS[1], KEYS[2])))
    assert list(disk._prefetched) == [KEYS[2]], "a sequence may be admitted in the step in which it arrives"


def test_the_copies_before_one_that_fails_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make_cache()
    pages = [*cache.keys, *cache.values]
    monkeypatch.setattr(kv_connector, "STAGED_BYTES", 1)  # a block at a time
    stage = kv_connector._DeviceCopies._stage
    waits: list[str] = []

    def stage_once(copies: kv_connector._DeviceCopies, blocks: list[int]) -> object:
        if blocks == [2]:
            raise torch.OutOfMemoryError
        return stage(copies, blocks)

    monkeypatch.setattr(kv_connector._DeviceCopies, "_stage", stage_once)
    monkeypatch.setattr(kv_connector, "DeviceEvent", lambda _: SimpleNamespace(wait=lambda: waits.append("event")))
    for copy in ("store", "load"):
        copies = kv_connector._DeviceCopies(pages, torch.zeros(8, block_bytes(cache), dtype=torch.uint8))
        with pytest.raises(torch.OutOfMemoryError):
            getattr(copies, copy)([1, 2], [1, 2])
        copies.wait()
    assert waits == ["event"] * 2


class CudaRuntime:
    """Registers memory, or returns an error."""

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.registered: set[int] = set()

    def cudaHostRegister(self, address: int, *_: int) -> int:  # noqa: N802 - CUDA's name
        self.registered |= set() if self.error else {address}
        return self.error

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 - CUDA's name
        self.registered.remove(address)
        return 0


def test_memory_is_pinned_as_long_as_a_buffer_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = CudaRuntime()
    pinned_at_waits: list[int] = []
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: pinned_at_waits.append(len(runtime.registered)))
    buffer = kv_connector._make_buffer(3, 64, torch.device("cuda"))
    row = buffer[1]
    assert runtime.registered == {buffer.data_ptr()}
    del buffer
    gc.collect()
    assert len(runtime.registered) == 1, "a view is left"
    del row
    gc.collect()
    assert not runtime.registered and pinned_at_waits == [1], "after the copies that are under way"


@pytest.mark.parametrize(("error", "is_too_much"), [(2, True), (304, True), (1, False), (801, False)])
def test_only_too_much_memory_to_pin_is_reported_as_too_much(
    error: int, is_too_much: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: CudaRuntime(error))
    with pytest.raises(RuntimeError, match=rf"pinned \(cudaHostRegister returned {error}\)") as raised:
        kv_connector._make_buffer(3, 64, torch.device("cuda"))
    assert is_out_of_memory(raised.value) == is_too_much


# -- answers -----------------------------------------------------------------------------------------------------------

PROMPTS = [[number % 90 + 3 + index for index in range(30)] for number in (1, 20, 40, 60)]


@pytest.fixture(scope="module")
def demo() -> LoadedModel:
    return load(DEMO_MODEL_PATH)


def answers(engine: InProcessEngine, between: Callable[[], None] = lambda: None) -> list[list[int]]:
    """The answers to each prompt, one after the other, twice; what was said the first time is part of the second."""
    found: list[list[int]] = []
    for turn in range(2):
        for number, prompt in enumerate(PROMPTS):
            said = [*prompt, *found[number], 7] if turn else prompt
            sequence = engine.add(said, max_tokens=9, ignore_eos=True)
            engine.run()
            found.append(sequence.output_token_ids)
        between()
    return found


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_answers_are_the_same_with_offloaded_blocks(demo: LoadedModel, kv_cache_dtype: str) -> None:
    expected = answers(InProcessEngine(demo, num_blocks=64, kv_cache_dtype=kv_cache_dtype))
    engine = InProcessEngine(
        demo,
        num_blocks=14,  # for one conversation
        max_steps_in_flight=2,
        kv_cache_dtype=kv_cache_dtype,
        make_connector=lambda cache: OffloadingConnector(cache, 100),
    )
    assert answers(engine) == expected
    assert engine.manager.kv_connector.num_loaded_blocks > 20 and not engine.manager.kv_connector.num_failed_loads


def test_a_new_worker_loads_what_the_lost_one_wrote_and_computes_what_is_damaged(
    demo: LoadedModel, tmp_path: Path
) -> None:
    tiers: list[DiskTier] = []

    def make_connector(cache: KVCache) -> KVConnector:
        if tiers:  # in service, the lock ends with the worker's process
            (lock,) = tmp_path.glob("*/0/lock")
            lock.unlink()
        tiers.append(DiskTier(tmp_path, "demo", 10**9, block_bytes(cache)))
        return OffloadingConnector(cache, 100, tiers[-1])

    engine = InProcessEngine(demo, num_blocks=14, make_connector=make_connector)

    def lose() -> None:
        if len(tiers) > 1:
            return
        until_written(tiers[0], *(key for key in engine.manager.kv_connector._keys if key in tiers[0]))
        for number, path in enumerate(sorted(tmp_path.glob("*/0/*.block"))):
            if number % 5 == 0:
                path.write_bytes(path.read_bytes()[::-1])
        engine.lose_worker()

    assert answers(engine, lose) == answers(InProcessEngine(demo, num_blocks=64))
    connector = engine.manager.kv_connector
    assert 0 < connector.num_failed_loads < connector.num_loaded_blocks
