"""Claims about running batches, with an application that answers as each test wants it, and no engine."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from starlette.types import Receive, Scope, Send

from servekit.api import batch_runner
from servekit.api.auth.keys import Key, Keyring
from servekit.api.batch_runner import BatchRunner
from servekit.api.batch_storage import BatchStorage
from servekit.batches.lines import LineReader, check_lines
from servekit.batches.records import BatchRecord, FileRecord
from servekit.config import ServeConfig
from servekit.engine.caller import Caller
from servekit.errors import StorageFailed

TIMEOUT_S = 60
Answer = tuple[int, Any]


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("POLL_S", 0.02), ("ROOM_POLL_S", 0.001), ("RETRY_S", 0.02), ("MAX_RETRY_AFTER_S", 0.001)):
        monkeypatch.setattr(batch_runner, name, value)


class App:
    """The application: answers each prompt as `answer` says, and notes what it was asked."""

    def __init__(self, answer: Callable[[str], Answer] = lambda prompt: (200, {"text": prompt})) -> None:
        self.answer = answer
        self.asked: list[str] = []
        self.callers: list[Caller] = []
        self.num_running = 0
        self.most_running = 0
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.may_begin = asyncio.Event()  # else no prompt is computed
        self.may_begin.set()
        self.slow_tenant = ""  # if given, `may_begin` and `may_answer` are for its prompts only
        self.waits_for_model = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = json.loads((await receive())["body"])
        self.asked.append(body["prompt"])
        self.callers.append(scope["state"]["caller"])
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            if self.waits_for_model:
                scope["state"]["waits_for_model"] = True
            if body["prompt"].startswith(self.slow_tenant):
                await self.may_begin.wait()
            scope["state"]["request_state"] = SimpleNamespace(num_generated_tokens=1)
            if body["prompt"].startswith(self.slow_tenant):
                await self.may_answer.wait()
        finally:
            self.num_running -= 1
        status, told = self.answer(body["prompt"])
        await send({"type": "http.response.start", "status": status, "headers": [(b"retry-after", b"1")]})
        await send({"type": "http.response.body", "body": msgspec.json.encode(told)})


class Service:
    """A storage, and a runner of it that can be started anew."""

    def __init__(self, directory: Path, app: App, **settings: Any) -> None:
        self.app = app
        self.config = ServeConfig(batch_dir=str(directory), **settings)
        self.engine: Any = SimpleNamespace(config=self.config, state="ready", has_free_slots=True)
        self.keyring = Keyring([])
        self.storage = BatchStorage(self.config)
        self.store = self.storage.store
        self.runner: BatchRunner

    def start(self) -> None:
        self.runner = BatchRunner(self.engine, self.keyring, self.storage, self.app, {})
        self.runner.start()

    def create(self, num_lines: int, tenant: str = "", key: Key | None = None, **changes: Any) -> str:
        number = len(self.store.batches(tenant, None, 99))
        file_id, batch_id, now_s = f"file-{tenant}{number}", f"batch_{tenant}{number}", self.storage.now_s()
        with self.store.path_of(file_id).open("w") as file:
            for line in range(1, num_lines + 1):
                body = {"prompt": f"{tenant}{line}"}
                wanted = {"custom_id": f"id-{line}", "method": "POST", "url": "/v1/completions", "body": body}
                file.write(json.dumps(wanted) + "\n")
        self.store.add_file(
            FileRecord(
                id=file_id,
                tenant=tenant,
                name="in",
                purpose="batch",
                num_bytes=1,
                created_s=now_s,
                expires_s=now_s + 9999,
            )
        )
        values: dict[str, Any] = {
            "tenant": tenant,
            "key_digest": "" if key is None else key.digest.hex(),
            "endpoint": "/v1/completions",
            "input_file_id": file_id,
            "completion_window": "24h",
            "created_s": now_s,
            "expires_s": now_s + 86400,
            **changes,
        }
        self.store.add_batch(BatchRecord(id=batch_id, **values))
        return batch_id

    async def wait(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.002)

    async def batch(self, batch_id: str, tenant: str = "") -> BatchRecord:
        found = await self.storage.call(tenant, self.store.batch, tenant, batch_id)
        assert found is not None
        return found

    async def ended(self, batch_id: str, tenant: str = "") -> BatchRecord:
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                batch = await self.batch(batch_id, tenant)
                if batch.status in ("completed", "failed", "expired", "cancelled"):
                    return batch
                await asyncio.sleep(0.002)

    async def lines(self, batch_id: str, is_error: bool = False) -> list[dict[str, Any]]:
        content, _ = await self.storage.call("", self.store.read_results, batch_id, is_error, 0, 2**30)
        return [json.loads(line) for line in content.splitlines()]


@asynccontextmanager
async def service(directory: Path, app: App | None = None, **settings: Any) -> AsyncIterator[Service]:
    made = Service(directory, app or App(), **settings)
    try:
        yield made
    finally:
        made.app.may_answer.set()
        await made.runner.stop()
        await made.storage.stop()


async def test_all_lines_are_answered_with_the_lowest_priority_and_a_bounded_number_at_a_time(tmp_path: Path) -> None:
    async with service(tmp_path, batch_concurrency=3) as made:
        batch_id = made.create(20)
        made.start()
        batch = await made.ended(batch_id)
        assert (batch.status, batch.num_completed, batch.num_failed) == ("completed", 20, 0)
        lines = await made.lines(batch_id)
        assert [(line["custom_id"], line["response"]["body"]["text"]) for line in lines] == [
            (f"id-{number}", f"{number}") for number in range(1, 21)
        ]
        assert made.app.most_running <= 3 and sorted(made.app.asked, key=int) == [f"{n}" for n in range(1, 21)]
        assert {caller.min_priority for caller in made.app.callers} == {1000}


async def test_no_line_begins_while_the_server_has_something_else_to_do(tmp_path: Path) -> None:
    async with service(tmp_path) as made:
        made.engine.has_free_slots = False
        batch_id = made.create(2)
        made.start()
        await made.wait(lambda: made.store.batch("", batch_id).status == "in_progress")  # type: ignore[union-attr]
        await asyncio.sleep(0.05)
        assert made.app.asked == []
        made.engine.has_free_slots, made.engine.state = True, "draining"
        await asyncio.sleep(0.05)
        assert made.app.asked == []
        made.engine.state = "ready"
        assert (await made.ended(batch_id)).num_completed == 2


async def test_no_line_begins_before_the_prompt_of_the_last_one_is_computed(tmp_path: Path) -> None:
    async with service(tmp_path, batch_concurrency=8) as made:
        batch_id = made.create(4)
        made.app.may_begin.clear()
        made.app.may_answer.clear()
        made.start()
        await made.wait(lambda: made.app.num_running == 1)
        await asyncio.sleep(0.05)
        assert made.app.asked == ["1"]
        made.app.may_begin.set()
        await made.wait(lambda: made.app.num_running == 4)
        made.app.may_answer.set()
        assert (await made.ended(batch_id)).num_completed == 4


async def test_a_line_that_waits_for_its_prompt_can_be_cancelled(tmp_path: Path) -> None:
    async with service(tmp_path) as made:
        batch_id = made.create(4)
        made.app.may_begin.clear()
        made.start()
        await made.wait(lambda: made.app.num_running == 1)
        await made.storage.call("", made.store.cancel, "", batch_id, 1)
        made.runner.wake()
        assert (await made.ended(batch_id)).status == "cancelled" and made.app.num_running == 0


async def test_what_was_answered_before_a_stop_is_not_asked_again(tmp_path: Path) -> None:
    async with service(tmp_path, batch_concurrency=1) as made:
        batch_id = made.create(10)

        def answer(prompt: str) -> Answer:
            if prompt == "5":
                made.app.may_answer.clear()  # for the lines after this one
            return 200, {"text": prompt}

        made.app.answer = answer
        made.start()
        await made.wait(lambda: "6" in made.app.asked)
        await made.runner.stop()
        assert (await made.batch(batch_id)).num_completed == 5
        made.app.may_answer.set()
        made.app.answer = lambda prompt: (200, {"text": prompt})
        made.start()
        assert (await made.ended(batch_id)).num_completed == 10
        assert [each for each in made.app.asked if made.app.asked.count(each) > 1] == ["6", "6"]
        assert len(await made.lines(batch_id)) == 10


async def test_a_busy_server_is_asked_again_and_an_error_is_an_answer(tmp_path: Path) -> None:
    def answer(prompt: str) -> Answer:
        if prompt == "2":
            return 400, {"error": {"code": "invalid_value"}}
        return (503, {}) if made.app.asked.count(prompt) < 3 else (200, {})

    async with service(tmp_path, App(answer)) as made:
        batch_id = made.create(3)
        made.start()
        batch = await made.ended(batch_id)
        assert (batch.status, batch.num_completed, batch.num_failed) == ("completed", 2, 1)
        (failed,) = await made.lines(batch_id, is_error=True)
        assert (failed["custom_id"], failed["response"]["status_code"], failed["error"]) == ("id-2", 400, None)
        assert batch.output_file_id and batch.error_file_id and made.app.asked.count("1") == 3


async def test_a_line_that_is_refused_again_and_again_holds_no_place_and_gets_the_error_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_runner, "MAX_RETRY_AFTER_S", 0.05)
    monkeypatch.setattr(batch_runner, "MAX_ATTEMPTS", 5)
    app = App(lambda prompt: (503, {"error": {"code": "model_failed"}}) if prompt == "1" else (200, {}))
    async with service(tmp_path, app, batch_concurrency=1) as made:
        batch_id = made.create(3)
        made.start()
        batch = await made.ended(batch_id)
        assert (batch.status, batch.num_completed, batch.num_failed) == ("completed", 2, 1)
        assert made.app.asked.count("1") == 5 and made.app.most_running == 1
        assert made.app.asked.index("3") < len(made.app.asked) - 1, "the others are answered between the attempts"
        (failed,) = await made.lines(batch_id, is_error=True)
        assert (failed["response"]["status_code"], failed["response"]["body"]["error"]["code"]) == (503, "model_failed")


async def test_a_line_that_waits_for_its_model_does_not_keep_the_others_from_beginning(tmp_path: Path) -> None:
    app = App()
    app.may_begin.clear()
    app.waits_for_model = True
    async with service(tmp_path, app, batch_concurrency=2) as made:
        batch_id = made.create(3)
        made.start()
        await made.wait(lambda: made.app.num_running == 2)
        made.app.may_begin.set()
        assert (await made.ended(batch_id)).num_completed == 3


async def test_a_lock_that_cannot_be_opened_is_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_runner.log, "propagate", True)
    async with service(tmp_path) as made:
        (tmp_path / "owner.lock").mkdir()
        batch_id = made.create(2)
        made.start()
        await made.wait(lambda: "batches do not run" in caplog.text)
        (tmp_path / "owner.lock").rmdir()
        assert (await made.ended(batch_id)).num_completed == 2


async def test_an_exception_in_the_application_is_an_error_of_its_line(tmp_path: Path) -> None:
    def answer(prompt: str) -> Answer:
        if prompt == "1":
            raise RuntimeError("planted")
        return 200, {}

    async with service(tmp_path, App(answer)) as made:
        batch_id = made.create(2)
        made.start()
        assert (await made.ended(batch_id)).num_failed == 1
        (failed,) = await made.lines(batch_id, is_error=True)
        assert failed["response"]["status_code"] == 500


@pytest.mark.parametrize(
    ("end", "code"), [("cancelled", "batch_cancelled"), ("expired", "batch_expired")], ids=["cancelled", "expired"]
)
async def test_a_batch_that_ends_early_keeps_its_answers_and_names_the_other_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, code: str
) -> None:
    async with service(tmp_path, batch_concurrency=2) as made:
        batch_id = made.create(9)
        made.app.may_answer.clear()
        made.start()
        await made.wait(lambda: made.app.num_running == 2)
        made.app.may_answer.set()
        made.app.may_answer.clear()  # those two are answered
        await made.wait(lambda: len(made.app.asked) >= 4)
        if end == "cancelled":
            await made.storage.call("", made.store.cancel, "", batch_id, 1)
            made.runner.wake()
        else:
            now_s = made.storage.now_s()
            monkeypatch.setattr(BatchStorage, "now_s", lambda _: now_s + 86400)
        batch = await made.ended(batch_id)
        assert (batch.status, batch.num_completed, batch.num_failed) == (end, 2, 7)
        assert made.app.num_running == 0, "what ran was aborted"
        lines = await made.lines(batch_id, is_error=True)
        assert {line["error"]["code"] for line in lines} == {code} and lines[0]["response"] is None
        answered = {line["custom_id"] for line in await made.lines(batch_id)}
        assert answered | {line["custom_id"] for line in lines} == {f"id-{number}" for number in range(1, 10)}


async def test_a_batch_stops_when_its_key_is_removed_and_continues_when_it_is_back(tmp_path: Path) -> None:
    key, other = Key(b"\1" * 32, "a"), Key(b"\2" * 32, "a")
    async with service(tmp_path, batch_concurrency=1) as made:
        made.keyring.keys = [key, other]
        batch_id = made.create(3, "a", key)
        made.app.may_answer.clear()
        made.start()
        await made.wait(lambda: made.app.num_running == 1)
        made.keyring.keys = [other]
        await made.wait(lambda: made.app.num_running == 0)
        made.app.may_answer.set()
        await asyncio.sleep(0.1)
        assert (await made.batch(batch_id, "a")).num_completed == 0
        made.keyring.keys = [key]
        assert (await made.ended(batch_id, "a")).num_completed == 3


async def test_tenants_take_turns_and_one_batch_of_a_tenant_follows_the_other(tmp_path: Path) -> None:
    keys = [Key(b"\1" * 32, "a"), Key(b"\2" * 32, "b")]
    async with service(tmp_path, batch_concurrency=2) as made:
        made.keyring.keys = keys
        batches = [(made.create(30, "a", keys[0]), "a"), (made.create(3, "a", keys[0]), "a")]
        batches.append((made.create(3, "b", keys[1]), "b"))
        made.app.may_answer.clear()
        made.start()
        await made.wait(lambda: made.app.num_running == 2)
        statuses = [(await made.batch(*batch)).status for batch in batches]
        await made.wait(lambda: len(made.runner._work) == 2)
        made.app.may_answer.set()
        for batch in batches:
            assert (await made.ended(*batch)).status == "completed"
        assert "validating" not in statuses[:1]
        asked = made.app.asked
        assert asked.index("b3") < asked.index("a30"), "the short batch of b does not wait for the long one of a"


async def test_a_tenant_whose_lines_begin_slowly_does_not_delay_those_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_runner, "BEGIN_ALONE_S", 0.01)
    keys = [Key(b"\1" * 32, "a"), Key(b"\2" * 32, "b")]
    async with service(tmp_path, batch_concurrency=2) as made:
        made.keyring.keys = keys
        made.app.slow_tenant = "a"
        made.app.may_begin.clear()
        slow = made.create(4, "a", keys[0])
        made.start()
        await made.wait(lambda: made.app.asked == ["a1"])
        quick = made.create(5, "b", keys[1])
        assert (await made.ended(quick, "b")).num_completed == 5
        assert made.app.asked.count("a2") == 0, "its own lines still begin one after the other"
        made.app.may_begin.set()
        assert (await made.ended(slow, "a")).num_completed == 4


async def test_the_many_files_of_one_tenant_do_not_delay_another_one_nor_the_long_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_check, begun = threading.Event(), list[str]()

    def check(path: Path, endpoint: str) -> Any:
        begun.append(path.name)
        assert may_check.wait(TIMEOUT_S)
        return check_lines(path, endpoint)

    monkeypatch.setattr(batch_runner, "check_lines", check)
    keys = [Key(b"\1" * 32, "a"), Key(b"\2" * 32, "b")]
    async with service(tmp_path) as made:
        made.keyring.keys = keys
        batches = [(made.create(1, "a", keys[0]), "a") for _ in range(batch_runner.MAX_ANSWERED + 1)]
        batches.append((made.create(1, "b", keys[1]), "b"))
        made.start()
        try:
            await made.wait(lambda: len(made.runner._work) >= 2)
            async with asyncio.timeout(5):
                await asyncio.to_thread(str)  # as a long answer is made
        finally:
            may_check.set()
        for batch in batches:
            assert (await made.ended(*batch)).status == "completed"
        assert set(begun[:2]) == {"file-a0", "file-b0"} and len(begun) == len(batches)


async def test_a_batch_that_is_cancelled_while_its_wrong_file_is_checked_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with service(tmp_path) as made:
        batch_id = made.create(3)
        with made.store.path_of("file-0").open("a") as file:
            file.write("no JSON\n")
        begin = made.store.begin

        def cancel_first(*arguments: Any) -> None:
            made.store.cancel("", batch_id, 1)
            begin(*arguments)

        monkeypatch.setattr(made.store, "begin", cancel_first)
        made.start()
        async with asyncio.timeout(5):
            assert (await made.ended(batch_id)).status == "cancelled"


async def test_a_wrong_file_fails_its_batch_and_no_line_is_asked(tmp_path: Path) -> None:
    async with service(tmp_path) as made:
        batch_id = made.create(3, endpoint="/v1/chat/completions")
        made.start()
        batch = await made.ended(batch_id)
        assert batch.status == "failed" and {error.code for error in batch.errors} == {"mismatched_endpoint"}
        assert made.app.asked == []


async def test_a_batch_whose_file_was_removed_ends_all_the_same(tmp_path: Path) -> None:
    async with service(tmp_path) as made:
        missing = made.create(3)
        made.store.path_of("file-0").unlink()
        made.start()
        assert [error.code for error in (await made.ended(missing)).errors] == ["file_not_found"]
        made.engine.has_free_slots = False
        begun = made.create(3)
        await made.wait(made.runner._beginning.locked)
        made.store.path_of("file-1").unlink()
        await made.storage.call("", made.store.cancel, "", begun, 1)
        made.runner.wake()
        assert (await made.ended(begun)).status == "cancelled"


async def test_a_batch_whose_file_is_removed_while_it_runs_fails_and_keeps_its_answers(tmp_path: Path) -> None:
    async with service(tmp_path, batch_concurrency=1) as made:
        first = made.create(9)
        made.app.may_answer.clear()
        made.start()
        await made.wait(lambda: made.app.num_running == 1)
        made.app.may_answer.set()
        made.app.may_answer.clear()  # one line is answered
        await made.wait(lambda: made.app.asked == ["1", "2"])
        await made.runner.stop()
        made.store.path_of("file-0").unlink()
        made.app.may_answer.set()
        second = made.create(2)
        made.start()
        batch = await made.ended(first)
        assert (batch.status, [error.code for error in batch.errors]) == ("failed", ["file_not_found"])
        assert batch.output_file_id is not None and [line["custom_id"] for line in await made.lines(first)] == ["id-1"]
        assert (await made.ended(second)).num_completed == 2, "the tenant's next batch runs"


async def test_answers_wait_for_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with service(tmp_path, batch_concurrency=2) as made:
        failures = 3
        add_results = made.store.add_results

        def add(results: Any) -> None:
            nonlocal failures
            failures -= 1
            if failures >= 0:
                raise StorageFailed("the disk is full")
            add_results(results)

        monkeypatch.setattr(made.store, "add_results", add)
        batch_id = made.create(5)
        made.start()
        assert (await made.ended(batch_id)).num_completed == 5
        assert len(made.app.asked) == 5, "nothing is computed twice"


async def test_a_file_that_is_being_opened_when_its_batch_is_stopped_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_opening, may_open, is_closed = threading.Event(), threading.Event(), threading.Event()

    class SlowReader(LineReader):
        def __init__(self, *arguments: Any) -> None:
            is_opening.set()
            assert may_open.wait(TIMEOUT_S)
            super().__init__(*arguments)

        def close(self) -> None:
            super().close()
            is_closed.set()

    monkeypatch.setattr(batch_runner, "LineReader", SlowReader)
    async with service(tmp_path) as made:
        made.create(1)
        made.start()
        await made.wait(is_opening.is_set)
        await made.runner.stop()
        may_open.set()
        await made.wait(is_closed.is_set)


async def test_batches_of_a_tenant_without_room_stop(tmp_path: Path) -> None:
    async with service(tmp_path, batch_max_total_bytes=2**20) as made:
        batch_id = made.create(3)
        made.start()
        await made.wait(lambda: made.runner._full_tenants == {""})
        await asyncio.sleep(0.05)
        assert made.app.asked == [] and (await made.batch(batch_id)).status == "in_progress"


async def test_a_second_process_runs_the_batches_when_the_first_one_has_ended(tmp_path: Path) -> None:
    async with service(tmp_path) as first:
        first.start()
        async with service(tmp_path) as second:
            await first.wait(lambda: first.runner._lock._descriptor is not None)
            second.start()
            batch_id = second.create(3)
            assert (await second.ended(batch_id)).num_completed == 3
            assert len(first.app.asked) == 3 and second.app.asked == []
            await first.runner.stop()
            batch_id = second.create(2)
            assert (await second.ended(batch_id)).num_completed == 2
            assert len(second.app.asked) == 2
