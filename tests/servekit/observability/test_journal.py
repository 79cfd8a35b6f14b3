"""Claims about the journal's files: complete, bounded, private, replayable one by one. They never stop the server."""

from __future__ import annotations

import io
import os
import re
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from servekit import __version__
from servekit.cli import main
from servekit.config import ServeConfig
from servekit.errors import ConfigError
from servekit.observability import journal as journal_module
from servekit.observability.journal import (
    FORMAT,
    LENGTH_BYTES,
    Journal,
    JournalCollector,
    open_journals,
    replay_journal,
)
from servekit.protocol.sampling_params import SamplingParams
from servekit.scheduler.block_pool import BlockPool
from servekit.scheduler.commands import AddSequence, Commit, Expire, Plan, Restart
from servekit.scheduler.recording import RecordedManager, RecordEncoder
from tests.support.scheduler import make_manager, make_prompt, make_worker

LIMITS = make_manager(num_blocks=24, max_num_batched_tokens=64, scheduling_policy="shortest").config


@pytest.fixture(autouse=True)
def flush_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "FLUSH_INTERVAL_S", 0.005)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal"


def start_journal(path: Path, max_bytes: int = 2**20, max_files: int = 4) -> tuple[Journal, RecordedManager]:
    journal = Journal(path, max_bytes, max_files)
    journal.open()
    return journal, journal.make_manager(LIMITS)


def serve(manager: RecordedManager, num_sequences: int, first_id: int = 0) -> None:
    """Serve sequences in waves, with a worker that is lost once; slow enough for the journal to keep up."""
    worker, now_s = make_worker(manager), 0.0
    for sequence_id in range(first_id, first_id + num_sequences):
        sampling = SamplingParams(max_tokens=12, ignore_eos=True)
        prompt = tuple(make_prompt(sequence_id, 1 + sequence_id % 30))
        manager.apply(AddSequence(sequence_id=sequence_id, prompt_token_ids=prompt, sampling=sampling))
        if sequence_id % 4 < 3:
            continue
        while manager.has_work:
            now_s += 0.001
            manager.apply(Expire(now_s))
            plan = manager.apply(Plan(now_s))
            assert plan is not None
            if plan.step_id == 20:
                manager.apply(Restart())
                worker = make_worker(manager)
            else:
                manager.apply(Commit(worker.execute(plan), now_s))
        time.sleep(0.001)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def test_a_journal_is_replayed_by_the_command(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal, manager = start_journal(path)
    serve(manager, 40)
    journal.close()
    assert main(["replay", str(path)]) == 0
    output = capsys.readouterr()
    assert output.out.startswith(f"{path}: every decision is the same: ") and "40 sequences, 1 restarts" in output.out
    assert output.err == ""
    assert stat.S_IMODE(path.stat().st_mode) == 0o600, "readable by its owner only"
    assert journal.num_bytes == path.stat().st_size


def test_the_command_exits_with_1_at_the_first_difference(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, manager = start_journal(path)
    serve(manager, 40)
    journal.close()
    lease = BlockPool.lease
    monkeypatch.setattr(BlockPool, "lease", lambda *arguments: lease(*arguments)[::-1])
    assert main(["replay", str(path)]) == 1
    output = capsys.readouterr().out
    pattern = r"different after (\d+) steps, .*: step (\d+): chunks.new_block_ids: expected .*, got .*"
    found = re.search(pattern, output)
    assert found is not None and found[1] == found[2] > "0", output


def test_every_file_of_a_rotated_journal_is_replayed_by_itself(path: Path) -> None:
    journal, manager = start_journal(path, max_bytes=8_000, max_files=3)
    for wave in range(50):
        serve(manager, 4, first_id=4 * wave)
        wait_for(lambda: not journal._pending)
    journal.close()
    paths = [path, path.with_name("journal.1"), path.with_name("journal.2")]
    assert sorted(path.parent.iterdir()) == sorted(paths), "no more files than allowed"
    for each in paths:
        result = replay_journal(each)
        assert result.difference is None and not result.is_truncated
        assert each is path or (result.num_steps > 20 and 6_000 <= each.stat().st_size < 12_000)
    assert journal.num_bytes > 4 * 8_000


def test_under_steady_load_the_next_file_begins_at_the_size_limit(path: Path) -> None:
    """The manager is never idle; the checkpoint is taken between two steps."""
    journal, manager = start_journal(path, max_bytes=4_000, max_files=100)
    worker = make_worker(manager)
    for number in range(400):
        sampling = SamplingParams(max_tokens=12, ignore_eos=True)
        while manager.num_waiting < 2:
            sequence_id = 10 * number + manager.num_waiting
            manager.apply(AddSequence(sequence_id=sequence_id, prompt_token_ids=(number, 1), sampling=sampling))
        plan = manager.apply(Plan(float(number)))
        assert plan is not None
        manager.apply(Commit(worker.execute(plan), float(number)))
        if number % 20 == 0:
            wait_for(lambda: not journal._pending)
    journal.close()
    paths = sorted(path.parent.iterdir())
    assert len(paths) > 3 and manager.has_work
    assert sum(replay_journal(each).num_steps for each in paths) == 400
    assert all(replay_journal(each).difference is None for each in paths)


def test_the_journal_of_an_earlier_process_is_kept(path: Path) -> None:
    path.write_bytes(b"earlier")
    journal, _ = start_journal(path)
    journal.close()
    assert path.with_name("journal.1").read_bytes() == b"earlier" and path.read_bytes() != b"earlier"


class FullDisk(io.RawIOBase):
    """Takes some bytes, a part of each write, and then fails."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.content = b""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        if not self.room:
            raise OSError(28, "No space left on device")
        taken = bytes(data)[: min(7, self.room)]
        self.room -= len(taken)
        self.content += taken
        return len(taken)


def test_a_full_disk_stops_the_journal_and_nothing_else(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal = Journal(path, 2**20, 4)
    journal.open()
    disk = FullDisk(2_000)
    assert journal._file is not None
    journal._file.close()
    journal._file = disk  # type: ignore[assignment]
    manager = journal.make_manager(LIMITS)
    collector = JournalCollector([journal], "model")
    assert next(iter(collector.collect())).samples[0].value == 1.0
    serve(manager, 200)
    wait_for(lambda: not journal.is_recording)
    serve(manager, 8, first_id=1000)
    assert not manager.has_work
    assert f"journal {path} stopped: No space left on device; the server continues without a journal" in caplog.text
    assert next(iter(collector.collect())).samples[0].value == 0.0
    journal.close()
    assert not journal._pending
    path.write_bytes(disk.content)
    result = replay_journal(path)
    assert result.difference is None and result.is_truncated, "what is in the file can be replayed"


def test_a_writer_that_does_not_keep_up_stops_the_journal(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "MAX_PENDING_RECORDS", 30)
    monkeypatch.setattr(Journal, "_write_pending", lambda self: time.sleep(0.01))
    journal, manager = start_journal(path)
    serve(manager, 8)
    assert not journal.is_recording and not manager.has_work
    assert "stopped: writing does not keep up: 30 records are waiting" in caplog.text
    journal.close()


def test_a_record_that_cannot_be_made_stops_the_journal(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, manager = start_journal(path)
    monkeypatch.setattr(RecordEncoder, "encode", lambda *arguments: 1 / 0)
    serve(manager, 8)
    assert not journal.is_recording and not manager.has_work
    journal.close()
    assert "ZeroDivisionError" in caplog.text and "stopped: internal error" in caplog.text


def test_an_error_of_the_writer_stops_the_journal_and_is_logged(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Journal, "_write_pending", lambda self: 1 / 0)
    journal, _ = start_journal(path)
    wait_for(lambda: not journal.is_recording)
    journal.close()
    assert "ZeroDivisionError" in caplog.text and "stopped: internal error" in caplog.text


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.mkdir(), "exists and is not a regular file"),
        (lambda path: os.mkfifo(path), "exists and is not a regular file"),
        (lambda path: path.parent.rmdir(), "No such file or directory"),
        (lambda path: (path.parent.rmdir(), path.parent.touch()), "Not a directory"),
    ],
)
def test_a_journal_that_cannot_be_created_is_a_config_error(
    path: Path, make: Callable[[Path], None], message: str
) -> None:
    make(path)
    with pytest.raises(ConfigError, match=message):
        open_journals(ServeConfig(journal=str(path)), [0])


def test_a_directory_where_no_file_can_be_created_is_a_config_error() -> None:
    """The kernel refuses it in /proc to root, too, who may write in every directory of a disk."""
    with pytest.raises(ConfigError, match="/proc/journal"):
        open_journals(ServeConfig(journal="/proc/journal"), [0])


def test_without_the_setting_there_is_no_journal() -> None:
    assert open_journals(ServeConfig(), [0, 1]) == []


def test_a_journal_that_records_nothing_can_be_closed(path: Path) -> None:
    """The model could not be loaded."""
    (journal,) = open_journals(ServeConfig(journal=str(path)), [0])
    assert journal is not None
    journal.close()
    with pytest.raises(ConfigError, match="this is not a journal of servekit"):
        replay_journal(path)


# -- files that are no complete journals -------------------------------------------------------------------------------


@pytest.fixture
def recorded(path: Path) -> Path:
    journal, manager = start_journal(path)
    serve(manager, 8)
    wait_for(lambda: not journal._pending)
    serve(manager, 8, first_id=8)
    journal.close()
    return path


def test_a_file_that_ends_in_a_record_is_replayed_up_to_it(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded.write_bytes(recorded.read_bytes()[:-3])
    assert main(["replay", str(recorded)]) == 0
    assert "the last record is incomplete" in capsys.readouterr().out


def test_a_damaged_file_is_refused_with_the_place(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = recorded.read_bytes()
    header_bytes = int.from_bytes(content[:LENGTH_BYTES], "big")
    at = 2 * LENGTH_BYTES + header_bytes
    recorded.write_bytes(content[:at] + b"\xc1" + content[at + 1 :])
    assert main(["replay", str(recorded)]) == 2
    assert f"{recorded}: damaged before byte " in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xff\xff\xff....", bytes(100)])
def test_a_file_that_is_no_journal_is_refused(path: Path, content: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    path.write_bytes(content)
    assert main(["replay", str(path)]) == 2
    assert "this is not a journal of servekit" in capsys.readouterr().err
    assert main(["replay", str(path.with_name("missing"))]) == 2
    assert "No such file or directory" in capsys.readouterr().err


def test_a_journal_of_another_format_or_version_is_named(
    recorded: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("servekit.replaying.command.__version__", "99.0")
    assert main(["replay", str(recorded)]) == 0
    assert f"was recorded by servekit {__version__}" in capsys.readouterr().err
    header = msgspec.msgpack.encode({"format": "servekit-journal-99"})
    recorded.write_bytes(len(header).to_bytes(LENGTH_BYTES, "big") + header)
    assert main(["replay", str(recorded)]) == 2
    assert f"its format is 'servekit-journal-99', but this version reads {FORMAT!r}" in capsys.readouterr().err


def test_the_error_that_ended_a_server_is_repeated(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, manager = start_journal(path)
    manager.apply(AddSequence(sequence_id=0, prompt_token_ids=(1, 2), sampling=SamplingParams(max_tokens=3)))

    def allocate(*arguments: Any) -> None:
        raise AssertionError("a bug")

    monkeypatch.setattr("servekit.scheduler.kv_cache_manager.KVCacheManager.allocate", allocate)
    with pytest.raises(AssertionError):
        manager.apply(Plan(0.0))
    journal.close()
    assert main(["replay", str(path)]) == 0
    assert "ends with the same error as the server: AssertionError: a bug" in capsys.readouterr().out
