"""Claims about the files of offloaded blocks: what is read is what was written, or nothing."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from servekit.errors import ConfigError
from workers.kv_cache import disk_tier
from workers.kv_cache.disk_tier import DiskTier

BLOCK_BYTES = 100
KEYS = [bytes([number]) * 16 for number in range(8)]
BLOCKS = {key: bytes([key[0] + 100]) * BLOCK_BYTES for key in KEYS}


def make_tier(folder: Path, identity: str = "model", max_bytes: int = 10**6) -> DiskTier:
    return DiskTier(folder, identity, max_bytes, BLOCK_BYTES)


def until_written(tier: DiskTier, *keys: bytes) -> None:
    deadline_s = time.monotonic() + 60
    while not set(keys) <= set(tier.keys()):
        assert time.monotonic() < deadline_s, "not written in a minute"
        time.sleep(0.001)


def write(tier: DiskTier, *keys: bytes) -> None:
    for key in keys:
        tier.write(key, BLOCKS[key])
        until_written(tier, key)


def read(tier: DiskTier, keys: list[bytes]) -> dict[bytes, bytes]:
    """The blocks that were read. The rows of the others may have anything in them."""
    rows = [np.zeros(BLOCK_BYTES, dtype=np.uint8) for _ in keys]
    were_read = tier.read(keys, rows, list(range(len(keys))))
    return {key: row.tobytes() for key, row, was_read in zip(keys, rows, were_read, strict=True) if was_read}


def only_folder(folder: Path, number: int = 0) -> Path:
    (of_model,) = folder.iterdir()
    return of_model / str(number)


def file_of(folder: Path, key: bytes) -> Path:
    return only_folder(folder) / f"{key.hex()}.block"


def test_a_block_is_read_while_it_waits_for_the_disk_and_after_it_was_written(tmp_path: Path) -> None:
    tier = make_tier(tmp_path)
    tier.write(KEYS[0], BLOCKS[KEYS[0]])
    assert KEYS[0] in tier and read(tier, KEYS[:2]) == {KEYS[0]: BLOCKS[KEYS[0]]}
    until_written(tier, KEYS[0])
    assert read(tier, KEYS[:2]) == {KEYS[0]: BLOCKS[KEYS[0]]} and len(tier) == 1


def test_a_block_that_was_read_ahead_of_need_is_not_read_again(tmp_path: Path) -> None:
    tier = make_tier(tmp_path)
    write(tier, *KEYS[:3])
    tier.prefetch([KEYS[0], KEYS[1], KEYS[7]])
    tier.prefetch([KEYS[0]])
    assert list(tier._prefetched) == KEYS[:2], "one of them is not there"
    for _, reading in tier._prefetched.values():
        reading.result()
    for key in KEYS[:3]:
        file_of(tmp_path, key).unlink()
    assert read(tier, KEYS[:3]) == {key: BLOCKS[key] for key in KEYS[:2]}
    assert not tier._prefetched and read(tier, [KEYS[0]]) == {}, "it is kept until it is used"


def test_what_was_read_ahead_takes_the_place_of_a_row_that_it_may_replace(tmp_path: Path) -> None:
    tier = make_tier(tmp_path)
    write(tier, *KEYS[:3])
    tier.prefetch([KEYS[0], KEYS[7]])
    ahead = tier._prefetched[KEYS[0]][1].result()
    old = [np.zeros(BLOCK_BYTES, dtype=np.uint8) for _ in range(4)]
    memory = list(old)
    assert tier.read([KEYS[0], KEYS[1], KEYS[7]], memory, [3, 0, 1], may_replace=True) == [True, True, False]
    assert memory[3] is ahead and not old[3].any() and memory[3].tobytes() == BLOCKS[KEYS[0]]
    assert memory[0] is old[0] and memory[0].tobytes() == BLOCKS[KEYS[1]]
    tier.prefetch([KEYS[2]])
    assert tier._prefetched[KEYS[2]][1].result() is old[3], "the next one is read to where the row was"
    assert memory[3].tobytes() == BLOCKS[KEYS[0]]


def test_what_was_read_ahead_of_need_has_a_bound_and_those_that_came_first_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_tier, "MAX_PREFETCHED_BYTES", 500)
    tier = make_tier(tmp_path)
    write(tier, *KEYS)
    tier.prefetch(KEYS[:5])
    tier.prefetch(KEYS[5:])
    assert list(tier._prefetched) == KEYS[:3], "the sequence that waits longest is admitted next"
    assert read(tier, KEYS) == BLOCKS and not tier._prefetched


def test_what_was_read_ahead_of_need_and_not_used_makes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_tier, "MAX_PREFETCHED_BYTES", 500)
    tier = make_tier(tmp_path)
    write(tier, *KEYS)
    tier.prefetch(KEYS[:5])
    monkeypatch.setattr(disk_tier, "MAX_PREFETCHED_S", 0.0)
    tier.prefetch(KEYS[5:])
    assert list(tier._prefetched) == KEYS[5:]
    assert read(tier, KEYS) == BLOCKS


def test_what_is_read_ahead_goes_where_a_block_was_that_is_not_needed_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_tier, "MAX_PREFETCHED_BYTES", 500)
    tier = make_tier(tmp_path)
    write(tier, *KEYS)

    kept: list[NDArray[np.uint8]] = []  # otherwise what was freed might be allocated again in the same place

    def places_of(*keys: bytes) -> set[int]:
        tier.prefetch(list(keys))
        blocks = [block for key in keys if (block := tier._prefetched[key][1].result()) is not None]
        assert [block.tobytes() for block in blocks] == [BLOCKS[key] for key in keys]
        kept.extend(blocks)
        return {block.ctypes.data for block in blocks}

    places = places_of(*KEYS[:3])
    assert len(places) == 3, "each has its own"
    assert read(tier, KEYS[:3]) == {key: BLOCKS[key] for key in KEYS[:3]}
    assert places_of(*KEYS[3:6]) == places
    monkeypatch.setattr(disk_tier, "MAX_PREFETCHED_S", 0.0)
    assert places_of(*KEYS[5:]) == places, "two of them were not needed for too long"


def test_blocks_are_used_while_others_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = make_tier(tmp_path)
    write(tier, *KEYS)
    file_of(tmp_path, KEYS[1]).write_bytes(b"damaged")
    is_used, read_one, used, reader = threading.Event(), tier._read, list[int](), threading.current_thread()

    def help_behind_first_use(key: bytes, row: NDArray[np.uint8]) -> bool:
        assert threading.current_thread() is reader or is_used.wait(timeout=60)
        return read_one(key, row)

    def use(indices: list[int]) -> None:
        assert all(rows[index].tobytes() == BLOCKS[KEYS[index]] for index in indices)
        assert threading.current_thread() is reader, "copies to a GPU belong to the stream of this thread"
        assert len(indices) >= 2 or len(used) == 6, "two at least at a time, but for the last ones"
        used.extend(indices)
        is_used.set()

    monkeypatch.setattr(tier, "_read", help_behind_first_use)
    rows = [np.zeros(BLOCK_BYTES, dtype=np.uint8) for _ in KEYS]
    assert tier.read(KEYS, rows, list(range(8)), use, num_used_at_once=2) == [index != 1 for index in range(8)]
    assert sorted(used) == [0, 2, 3, 4, 5, 6, 7]


def test_rows_are_not_written_to_after_the_use_of_blocks_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = make_tier(tmp_path)
    write(tier, *KEYS)
    has_begun, has_failed, read_one = threading.Event(), threading.Event(), tier._read
    reader, helped = threading.current_thread(), list[bytes]()

    def help_behind_failure(key: bytes, row: NDArray[np.uint8]) -> bool:
        if threading.current_thread() is reader:
            assert has_begun.wait(timeout=60)
        else:
            has_begun.set()
            assert has_failed.wait(timeout=60)
            time.sleep(0.05)
            helped.append(key)
        return read_one(key, row)

    def fail(indices: list[int]) -> None:
        has_failed.set()
        raise MemoryError

    monkeypatch.setattr(tier, "_read", help_behind_failure)
    rows = [np.zeros(BLOCK_BYTES, dtype=np.uint8) for _ in KEYS]
    with pytest.raises(MemoryError):
        tier.read(KEYS, rows, list(range(8)), fail)
    assert all(rows[KEYS.index(key)].tobytes() == BLOCKS[key] for key in helped)
    assert 0 < len(helped) <= disk_tier.NUM_READERS, "no other one is read"


def test_a_block_that_was_damaged_ahead_of_need_is_read_if_it_has_been_written_again(tmp_path: Path) -> None:
    tier = make_tier(tmp_path)
    write(tier, KEYS[0])
    file_of(tmp_path, KEYS[0]).write_bytes(b"damaged")
    tier.prefetch(KEYS[:1])
    assert tier._prefetched[KEYS[0]][1].result() is None and KEYS[0] not in tier
    write(tier, KEYS[0])
    assert read(tier, KEYS[:1]) == {KEYS[0]: BLOCKS[KEYS[0]]}


# It runs in a process of its own, because the folder stays locked as long as its worker's process.
WRITER = """
import sys, time
from pathlib import Path
from workers.kv_cache.disk_tier import DiskTier
tier = DiskTier(Path(sys.argv[1]), "model", 10**6, 100)
for number in (2, 0, 1):
    tier.write(bytes([number]) * 16, bytes([number + 100]) * 100)
while len(tier) < 3:
    time.sleep(0.001)
import os; os._exit(9)
"""


def test_the_next_worker_finds_the_blocks_of_one_that_was_killed(tmp_path: Path) -> None:
    assert subprocess.run([sys.executable, "-c", WRITER, tmp_path], check=False, timeout=60).returncode == 9
    (only_folder(tmp_path) / "ab.unfinished").write_bytes(b"half")
    (only_folder(tmp_path) / "readme.block").write_bytes(b"not ours")
    tier = make_tier(tmp_path)
    assert sorted(tier.keys()) == KEYS[:3]
    assert read(tier, KEYS) == {key: BLOCKS[key] for key in KEYS[:3]}
    assert not (only_folder(tmp_path) / "ab.unfinished").exists()
    assert (only_folder(tmp_path) / "readme.block").exists()


@pytest.mark.parametrize("what", ["header", "contents", "short", "long", "empty", "gone", "link", "other key"])
def test_a_file_that_is_not_exactly_what_was_written_is_never_read(tmp_path: Path, what: str) -> None:
    tier = make_tier(tmp_path)
    write(tier, KEYS[0], KEYS[1])
    path = file_of(tmp_path, KEYS[0])
    contents = bytearray(path.read_bytes())
    if what == "header":
        contents[5] ^= 1
    elif what == "contents":
        contents[-7] ^= 1
    elif what == "short":
        del contents[-1]
    elif what == "long":
        contents += b"x"
    elif what == "empty":
        contents.clear()
    elif what == "other key":
        contents = bytearray(file_of(tmp_path, KEYS[1]).read_bytes())
    path.write_bytes(contents)
    if what in ("gone", "link"):
        path.unlink()
    if what == "link":
        path.symlink_to(file_of(tmp_path, KEYS[1]))
    assert read(tier, [KEYS[0]]) == {}
    assert not path.exists() and KEYS[0] not in tier
    write(tier, KEYS[0])
    assert read(tier, [KEYS[0]]) == {KEYS[0]: BLOCKS[KEYS[0]]}


def test_a_file_of_another_model_is_not_read(tmp_path: Path) -> None:
    one, other = make_tier(tmp_path / "a", "one"), make_tier(tmp_path / "b", "other")
    write(one, KEYS[0])
    write(other, KEYS[0])
    file_of(tmp_path / "b", KEYS[0]).write_bytes(file_of(tmp_path / "a", KEYS[0]).read_bytes())
    assert only_folder(tmp_path / "a").parent.name != only_folder(tmp_path / "b").parent.name
    assert read(other, [KEYS[0]]) == {}


def test_the_folder_is_bounded_and_loses_the_blocks_that_were_used_first(tmp_path: Path) -> None:
    tier = make_tier(tmp_path, max_bytes=3 * (disk_tier._HEADER.size + BLOCK_BYTES) + 5)
    write(tier, *KEYS[:3])
    read(tier, [KEYS[0]])
    write(tier, KEYS[3])
    deadline_s = time.monotonic() + 60
    while len(list(only_folder(tmp_path).glob("*.block"))) > 3 and time.monotonic() < deadline_s:
        time.sleep(0.001)
    assert tier.take_dropped() == [KEYS[1]] and not tier.take_dropped()
    assert sorted(tier.keys()) == [KEYS[0], KEYS[2], KEYS[3]] and not file_of(tmp_path, KEYS[1]).exists()


def test_each_worker_has_a_folder_of_its_own(tmp_path: Path) -> None:
    first, second = make_tier(tmp_path), make_tier(tmp_path)
    write(first, KEYS[0])
    assert KEYS[0] not in second
    write(second, KEYS[1])
    assert sorted(path.name for path in only_folder(tmp_path, 1).glob("*.block")) == [f"{KEYS[1].hex()}.block"]


def test_files_are_private(tmp_path: Path) -> None:
    tier = make_tier(tmp_path / "new")
    write(tier, KEYS[0])
    assert stat.S_IMODE(file_of(tmp_path / "new", KEYS[0]).stat().st_mode) == 0o600
    assert stat.S_IMODE(only_folder(tmp_path / "new").stat().st_mode) == 0o700


@pytest.mark.parametrize("depth", [0, 1])
def test_a_folder_that_others_can_use_is_refused(tmp_path: Path, depth: int) -> None:
    make_tier(tmp_path)
    folder = only_folder(tmp_path)
    (folder, folder.parent)[depth].chmod(0o750)
    with pytest.raises(ConfigError, match="not a folder of this user alone"):
        make_tier(tmp_path)


def test_blocks_are_left_out_if_the_disk_is_too_slow_or_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = make_tier(tmp_path)
    tier._max_waiting = 0
    tier.write(KEYS[0], BLOCKS[KEYS[0]])
    assert KEYS[0] not in tier and tier.take_num_unwritten() == 1 and tier.take_num_unwritten() == 0
    tier._max_waiting = 10

    def no_space(path: str, flags: int) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk_tier, "_private", no_space)
    tier.write(KEYS[1], BLOCKS[KEYS[1]])
    deadline_s = time.monotonic() + 60
    while KEYS[1] in tier and time.monotonic() < deadline_s:
        time.sleep(0.001)
    assert tier.take_dropped() == [KEYS[1]] and tier.take_num_unwritten() == 1


def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--kv-offload-dir .*file cannot be used"):
        make_tier(tmp_path / "file")
    with pytest.raises(ConfigError, match="--kv-offload-disk-bytes 9 holds no block"):
        make_tier(tmp_path, max_bytes=9)
    monkeypatch.setattr(disk_tier, "MAX_WORKERS", 1)
    first = make_tier(tmp_path / "shared")
    with pytest.raises(ConfigError, match="1 workers use it already"):
        make_tier(tmp_path / "shared")
    assert len(first) == 0 and os.listdir(only_folder(tmp_path / "shared")) == ["lock"]


def of_ended_worker(folder: Path) -> Path:
    """Return the folder of a worker that wrote `KEYS[:3]` and has ended."""
    assert subprocess.run([sys.executable, "-c", WRITER, folder], check=False, timeout=60).returncode == 9
    (written,) = {path.parent for path in folder.rglob(f"{KEYS[2].hex()}.block")}
    return written


def test_blocks_of_a_living_worker_are_kept_however_old_they_are(tmp_path: Path) -> None:
    living = make_tier(tmp_path, "old")
    write(living, KEYS[0])
    path = file_of(tmp_path, KEYS[0])
    os.utime(path, (0, 0))
    write(make_tier(tmp_path, "new"), KEYS[3])  # it deletes before it writes
    assert path.exists() and read(living, [KEYS[0]]) == {KEYS[0]: BLOCKS[KEYS[0]]}


@pytest.mark.parametrize("error", [FileNotFoundError(2, "it has vanished"), PermissionError(13, "Permission denied")])
def test_a_folder_that_cannot_be_read_does_not_keep_blocks_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: OSError
) -> None:
    old = of_ended_worker(tmp_path)
    for block in old.glob("*.block"):
        os.utime(block, (0, 0))
    odd = [tmp_path / "odd", old.parent / "odd"]
    for folder in odd:
        folder.mkdir(mode=0o700)
    iterate = Path.iterdir

    def odd_ones_first(folder: Path) -> Iterator[Path]:
        if folder in odd:
            raise error
        return iter(sorted(iterate(folder), key=lambda path: path.name != "odd"))

    monkeypatch.setattr(Path, "iterdir", odd_ones_first)
    write(make_tier(tmp_path, "new"), KEYS[3])
    assert [path.name for path in iterate(old)] == ["lock"]
    warned = [each.args[0] for each in caplog.records if isinstance(each.args, tuple)]
    assert warned == ([] if isinstance(error, FileNotFoundError) else odd)


def test_blocks_of_models_that_are_not_used_any_more_are_deleted_after_a_month(tmp_path: Path) -> None:
    month_s, others = 30 * 24 * 3600, tmp_path / "notes" / "0"
    others.mkdir(parents=True)
    for folder in (others.parent, others):
        folder.chmod(0o755)  # of somebody else: not a worker's
    (others / f"{KEYS[0].hex()}.block").write_bytes(b"")
    old = of_ended_worker(tmp_path)
    for key, days in ((KEYS[0], 31), (KEYS[1], 29)):
        used_s = time.time() - month_s - (days - 30) * 24 * 3600
        os.utime(old / f"{key.hex()}.block", (used_s, used_s))
    os.utime(others / f"{KEYS[0].hex()}.block", (0, 0))
    (old / "readme.block").write_text("not a block")
    os.utime(old / "readme.block", (0, 0))
    write(make_tier(tmp_path, "new"), KEYS[3])  # it deletes before it writes
    left = {path.name for path in old.iterdir()}
    assert left == {"lock", "readme.block", f"{KEYS[1].hex()}.block", f"{KEYS[2].hex()}.block"}
    assert len(list(others.iterdir())) == 1
