"""Tests of sandbox processes: exact results, limits of time and memory, and restarts."""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from transformers import AutoTokenizer

import servekit.sandbox.client as sandbox_module
from servekit.engine.model_files import DEMO_MODEL_PATH, find_chat_template
from servekit.errors import InternalError, InvalidRequest, QueueFull, SandboxUnavailable, WorkerNotReady
from servekit.requests.generation import GrammarKind
from servekit.sandbox import forked_process
from servekit.sandbox.client import MAX_WAITING, NUM_QUICK, Sandbox
from servekit.sandbox.forked_process import ForkedProcess, ForkServer
from servekit.sandbox.jobs import CompileGrammar, Done, Job, Outcome, Refused, RenderChat, encode_job
from tests.support import proc
from tests.support.pauses import pause
from tests.support.timing import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

ARGUMENTS = ["--tokenizer", str(DEMO_MODEL_PATH / "tokenizer.json"), "--vocab-size", "2048", "--eos-token-ids", "2"]
CHAT = [{"role": "user", "content": "Hi {{ 1 + 1 }}"}, {"role": "assistant", "content": "Hello"}]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse no job because other programs use the processor: it may get a hundredth of a core.

    Slow jobs have the priority of the other tests. At a tenth of it, a second of processor time takes half a minute.
    """
    monkeypatch.setattr(sandbox_module, "MAX_SLOWDOWN", 100.0)
    monkeypatch.setattr(forked_process, "NICENESS", 0)


def render(template: str, messages: list[dict[str, Any]] = CHAT, **variables: Any) -> RenderChat:
    return RenderChat(template, True, False, variables, messages)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandbox() -> AsyncIterator[Sandbox]:
    sandbox = Sandbox(ARGUMENTS, timeout_s=1.0, memory_bytes=2**28)
    await sandbox.start()
    yield sandbox
    await sandbox.stop()


async def test_a_rendered_chat_equals_that_of_transformers(sandbox: Sandbox) -> None:
    template = find_chat_template(DEMO_MODEL_PATH)
    assert template is not None
    job = RenderChat(template.source, True, False, dict(template.special_tokens), CHAT[:1])
    expected = AutoTokenizer.from_pretrained(DEMO_MODEL_PATH).apply_chat_template(
        CHAT[:1], tokenize=False, add_generation_prompt=True
    )
    assert await sandbox.run(job, "messages", "") == expected


async def test_the_last_message_can_be_continued(sandbox: Sandbox) -> None:
    template = find_chat_template(DEMO_MODEL_PATH)
    assert template is not None
    job = RenderChat(template.source, False, True, dict(template.special_tokens), CHAT)
    assert str(await sandbox.run(job, "messages", "")).endswith("<|assistant|>Hello")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "not done within 1 s"),
        ("{% set x = 'a' * 10000000000 %}", "more memory"),
        ("{{ raise_exception('only two may speak') }}", "only two may speak"),
        ("{{ messages", "refuses"),
        ("{{ ''.__class__.__mro__ }}", "refuses"),
        ("{{ 1 // 0 }}", "refuses"),
        ("{{ cycler.__init__.__globals__ }}", "refuses"),
    ],
)
async def test_a_runaway_template_is_refused_and_the_next_one_is_rendered(
    sandbox: Sandbox, template: str, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message) as refusal:
        await sandbox.run(render(template), "messages", "")
    assert refusal.value.param == "messages"
    assert await sandbox.run(render("{{ messages[0].content }}"), "messages", "") == "Hi {{ 1 + 1 }}"


async def test_the_outcome_of_a_cancelled_job_does_not_go_to_the_next_job(sandbox: Sandbox) -> None:
    slow = asyncio.create_task(sandbox.run(render("{% for i in range(99999) %}{{ i }}{% endfor %}"), "messages", ""))
    await asyncio.sleep(0.005)
    slow.cancel()
    assert await sandbox.run(render("next"), "messages", "") == "next"


async def test_a_flooding_tenant_is_refused_alone(sandbox: Sandbox) -> None:
    """Choudhury and Hahne's dynamic threshold: a tenant may hold as many places as are free."""
    flood = [asyncio.create_task(sandbox.run(render(str(i)), "messages", "flood")) for i in range(MAX_WAITING)]
    await asyncio.sleep(0)  # each of them has asked for a place
    other = await sandbox.run(render("other"), "messages", "modest")
    outcomes = await asyncio.gather(*flood, return_exceptions=True)
    num_refused = sum(isinstance(outcome, QueueFull) for outcome in outcomes)
    assert other == "other"
    assert num_refused >= MAX_WAITING // 2 - NUM_QUICK
    assert [outcome for outcome in outcomes if not isinstance(outcome, QueueFull)] == [
        str(i) for i in range(MAX_WAITING - num_refused)
    ]


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (GrammarKind.REGEX, "a[", "unclosed"),
        (GrammarKind.REGEX, "(?=a)b", "look-around"),
        (GrammarKind.EBNF, "start: <eos>", "unknown special token"),
        (GrammarKind.JSON_SCHEMA, '{"type": "integer", "multipleOf": 39989}', "ms to compile"),
        (GrammarKind.EBNF, 'start: "a" x', "unknown name"),
        (GrammarKind.EBNF, "start: start", "no answer can ever match"),
        (
            GrammarKind.EBNF,
            "\n".join(f"r{i}: r{i + 1}" for i in range(20_000)) + '\nr20000: "a"\nstart: r0',
            "nested too deeply",
        ),
        (GrammarKind.JSON_SCHEMA, "{", "Expecting"),
        (GrammarKind.JSON_SCHEMA, "[]", "object"),
        (GrammarKind.JSON_SCHEMA, '{"type": "array", "uniqueItems": true}', "Unimplemented"),
        (GrammarKind.JSON_SCHEMA, '{"x-guidance": {"lenient": true}, "not": {}}', "Unimplemented"),
        (GrammarKind.JSON_SCHEMA, '{"$ref": "#"}', "no answer can ever match"),
        (GrammarKind.JSON_SCHEMA, '{"type": "object", "a": ' * 20_000 + "1" + "}" * 20_000, "nested"),
    ],
)
async def test_an_invalid_grammar_is_refused_with_the_reason(
    sandbox: Sandbox, kind: GrammarKind, text: str, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        await sandbox.run(CompileGrammar(kind, text), "grammar", "")
    assert await sandbox.run(CompileGrammar(GrammarKind.REGEX, "[ab]+"), "grammar", "")


async def test_every_kind_of_grammar_compiles(sandbox: Sandbox) -> None:
    for kind, text in (
        (GrammarKind.JSON, ""),
        (GrammarKind.JSON_SCHEMA, "true"),
        (GrammarKind.JSON_SCHEMA, '{"type": "string", "pattern": "^a/b$"}'),
        (GrammarKind.REGEX, r"\d{3}/[^/]*"),
        (GrammarKind.EBNF, 'start: "(" start ")" | "x"'),
        (GrammarKind.CHOICE, json.dumps(['a "quoted" one', "<eos>", "é\n🦊", "\\", "/"])),
    ):
        assert await sandbox.run(CompileGrammar(kind, text), "grammar", "")


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("victims", ["the one that forks", "those that run jobs", "all"])
async def test_a_job_whose_process_was_killed_or_stopped_from_outside_runs_again(
    sandbox: Sandbox, sent: signal.Signals, victims: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel for lack of memory, or a person may have done it; neither is the client's fault."""
    if sent == signal.SIGSTOP:
        monkeypatch.setattr(forked_process, "ANSWER_TIMEOUT_S", 2.0)
    for number in range(1 if sent == signal.SIGSTOP else 2):  # it takes two seconds to see that one is stopped
        fork_server, others = await processes_at_rest(sandbox)
        pids = {"the one that forks": [fork_server], "those that run jobs": others, "all": [fork_server, *others]}
        for pid in pids[victims]:
            os.kill(pid, sent)
        assert await sandbox.run(render(f"again {number}"), "messages", "") == f"again {number}"


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_process_that_is_killed_or_stopped_while_it_starts_is_started_again(
    sent: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sent == signal.SIGSTOP:
        monkeypatch.setattr(forked_process, "STALLED_START_S", 2.0)
    sandbox = Sandbox(ARGUMENTS, timeout_s=1.0, memory_bytes=2**27)
    known = set(fork_servers())
    asked = asyncio.create_task(sandbox.run(render("next"), "messages", ""))
    started: set[int] = set()
    async with asyncio.timeout(60):
        while not started:
            started = set(fork_servers()) - known
            await asyncio.sleep(0.001)
    os.kill(*started, sent)
    assert await asked == "next"
    await sandbox.stop()


async def test_a_process_that_is_killed_each_time_is_the_servers_error(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ForkedProcess, "run", killed_meanwhile)
    with pytest.raises(SandboxUnavailable, match="failed 2 times") as failure:
        await sandbox.run(render("x"), "messages", "")
    assert (failure.value.status, failure.value.retry_after_s) == (503, 1)
    monkeypatch.undo()
    assert await sandbox.run(render("next"), "messages", "") == "next"


async def test_a_process_that_cannot_be_forked_is_the_servers_error_and_no_place_is_lost(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fork(_: ForkServer) -> ForkedProcess:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Sandbox, "_take_idle", lambda _: None)
    monkeypatch.setattr(ForkServer, "fork", fork)
    async with asyncio.timeout(60):
        for number in range(NUM_QUICK):
            with pytest.raises(SandboxUnavailable, match="Too many open files") as failure:
                await sandbox.run(render("x"), "messages", f"tenant {number}")
            assert (failure.value.status, failure.value.retry_after_s) == (503, 1)
    monkeypatch.undo()
    assert await sandbox.run(render("next"), "messages", "another") == "next"


async def test_a_fork_server_that_cannot_be_started_is_started_for_the_next_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def create(*_: object, **__: object) -> None:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    sandbox = Sandbox(ARGUMENTS, timeout_s=1.0, memory_bytes=2**27)
    num_descriptors = len(proc.open_files(os.getpid()))
    monkeypatch.setattr(subprocess, "Popen", create)
    async with asyncio.timeout(60):
        for number in range(NUM_QUICK):
            with pytest.raises(SandboxUnavailable, match="Resource temporarily unavailable"):
                await sandbox.run(render("x"), "messages", f"tenant {number}")
    assert len(proc.open_files(os.getpid())) <= num_descriptors + 1, "the next start closes the last one's channel"
    monkeypatch.undo()
    assert await sandbox.run(render("next"), "messages", "another") == "next"
    await sandbox.stop()


@pytest.mark.parametrize("sent", [b"", b"\xc1", msgspec.msgpack.encode(Done("abc")).replace(b"abc", b"\xff" * 3)])
async def test_a_job_whose_process_sends_no_outcome_runs_again(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    decode, answers = forked_process._decode_outcome, iter([sent])
    monkeypatch.setattr(forked_process, "_decode_outcome", lambda data: decode(next(answers, data)))
    async with asyncio.timeout(60):
        assert await sandbox.run(render(f"again {sent!r}"), "messages", "") == f"again {sent!r}"


async def test_a_bug_fails_its_job_is_logged_and_no_place_is_lost(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ForkedProcess, "cpu_s", lambda _: 1 // 0)
    async with asyncio.timeout(60):
        for number in range(NUM_QUICK):
            with pytest.raises(InternalError, match="ZeroDivisionError"):
                await sandbox.run(render("x"), "messages", f"tenant {number}")
    assert caplog.text.count("Traceback") == NUM_QUICK
    monkeypatch.undo()
    assert await sandbox.run(render("next"), "messages", "another") == "next"


async def killed_meanwhile(process: ForkedProcess, pieces: object) -> None:
    os.kill(process.pid, signal.SIGKILL)
    raise EOFError


@pytest.mark.parametrize(
    ("cpu_s_per_look", "error", "message"),
    [
        (10.0, InvalidRequest, "not done within 1 s of processor time"),
        (0.001, SandboxUnavailable, "the server is too busy"),
        (0.0, SandboxUnavailable, "no processor time"),
    ],
)
async def test_a_job_is_refused_for_its_own_processor_time_only(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, cpu_s_per_look: float, error: type[Exception], message: str
) -> None:
    monkeypatch.setattr(sandbox_module, "MAX_SLOWDOWN", 2.0)
    looks = itertools.count()
    monkeypatch.setattr(ForkedProcess, "cpu_s", lambda process: cpu_s_per_look * next(looks))
    with pytest.raises(error, match=message):
        await sandbox.run(render(endless(7).template + message), "messages", "")
    monkeypatch.undo()
    assert await sandbox.run(render("next"), "messages", "") == "next"


async def test_a_pause_of_server_and_sandbox_together_fails_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the one that runs in the slow lane nor those that wait for a place there."""
    paused = Sandbox(ARGUMENTS, timeout_s=60.0, memory_bytes=2**28)
    await paused.start()
    num_attempts = 0
    attempt = paused._attempt

    async def count_attempts(*arguments: Any) -> Outcome | None:
        nonlocal num_attempts
        num_attempts += 1
        return await attempt(*arguments)

    monkeypatch.setattr(paused, "_attempt", count_attempts)
    jobs = [asyncio.create_task(paused.run(endless(i), "messages", "")) for i in range(4)]
    while (paused._scheduler.num_running, paused._scheduler.num_waiting) != (1, 3) or num_attempts < 4:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    num_before = num_attempts
    pause(monkeypatch, 3600.0)
    await asyncio.sleep(0.2)
    assert not any(job.done() for job in jobs) and num_attempts == num_before
    await paused.stop()
    await asyncio.gather(*jobs, return_exceptions=True)


async def test_the_processor_time_of_a_process_is_measured(sandbox: Sandbox) -> None:
    _, (pid, *_) = await processes_at_rest(sandbox)
    process = ForkedProcess(pid, None, None)  # type: ignore[arg-type]  # only its number is used
    assert 0 <= process.cpu_s() < 60
    own = ForkedProcess(os.getpid(), None, None)  # type: ignore[arg-type]
    assert own.cpu_s() == pytest.approx(time.process_time(), abs=0.5)
    assert ForkedProcess(2**22 + 1, None, None).cpu_s() == 0.0  # type: ignore[arg-type]  # no such process


async def test_a_slow_job_holds_up_neither_its_tenant_nor_others(sandbox: Sandbox) -> None:
    slow = [asyncio.create_task(sandbox.run(endless(i), "messages", "slow")) for i in range(3)]
    await asyncio.sleep(0)
    for number in range(20):
        for tenant in ("slow", "quick"):
            text = f"{tenant} {number}"
            assert await sandbox.run(render(text), "messages", tenant) == text
    assert not all(task.done() for task in slow), "one second of processor time each, one after the other"
    for task in slow:
        task.cancel()
    await asyncio.gather(*slow, return_exceptions=True)


async def test_a_job_that_begins_again_in_the_slow_lane_has_its_low_priority(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, at_start, run = os.getpriority(os.PRIO_PROCESS, 0), [], ForkedProcess.run

    async def observed(process: ForkedProcess, pieces: Sequence[bytes | bytearray]) -> Outcome:
        at_start.append(os.getpriority(os.PRIO_PROCESS, process.pid))
        return await run(process, pieces)

    monkeypatch.setattr(forked_process, "NICENESS", usual + 1)
    monkeypatch.setattr(ForkedProcess, "run", observed)
    # The slow lane has one place for the tenant. The other job is stopped, and begins again when the first has ended.
    slow = [sandbox.run(endless(number), "messages", "slow") for number in (10, 11)]
    assert all(isinstance(refusal, InvalidRequest) for refusal in await asyncio.gather(*slow, return_exceptions=True))
    assert at_start == [usual, usual, usual + 1]


async def test_outcomes_are_remembered_for_their_tenant(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidRequest, match="not done within"):
        await sandbox.run(endless(99), "messages", "a")
    compiled = await sandbox.run(CompileGrammar(GrammarKind.REGEX, "[a-c]+"), "grammar", "a")
    monkeypatch.setattr(ForkedProcess, "run", None)  # so nothing can run
    with pytest.raises(InvalidRequest, match="not done within"):
        await sandbox.run(endless(99), "messages", "a")
    assert await sandbox.run(CompileGrammar(GrammarKind.REGEX, "[a-c]+"), "grammar", "a") == compiled


async def test_a_tenants_unlucky_refusal_does_not_refuse_another_tenant(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy machine can make a grammar take longer than it may, until it is less busy."""
    refused = Refused("takes 51 ms to compile")

    async def run(*_: object) -> Outcome:
        return refused

    job = CompileGrammar(GrammarKind.REGEX, "unlucky")
    monkeypatch.setattr(ForkedProcess, "run", run)
    with pytest.raises(InvalidRequest, match="takes 51 ms"):
        await sandbox.run(job, "grammar", "a")
    monkeypatch.undo()
    with pytest.raises(InvalidRequest, match="takes 51 ms"):
        await sandbox.run(job, "grammar", "a")
    assert await sandbox.run(job, "grammar", "b")


async def test_equal_jobs_of_a_tenant_run_once_while_one_of_them_waits(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_runs, run = 0, ForkedProcess.run

    async def count(process: ForkedProcess, pieces: Sequence[bytes]) -> Outcome:
        nonlocal num_runs
        num_runs += 1
        return await run(process, pieces)

    monkeypatch.setattr(ForkedProcess, "run", count)
    job = render("{{ 'single' }} flight")
    asked = [asyncio.create_task(sandbox.run(job, "messages", "a")) for _ in range(10)]
    await asyncio.sleep(0)
    asked[0].cancel()  # the others still wait
    assert await asyncio.gather(*asked[1:]) == ["single flight"] * 9
    assert num_runs == 1


async def test_a_long_conversation_is_encoded_in_pieces_and_arrives_whole(sandbox: Sandbox) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"{i}é", "n": [i]} for i in range(5000)]
    job = render("{% for m in messages %}{{ m.content }}{{ m.n[0] }}{% endfor %}", messages)
    pieces = list(encode_job(job))
    assert len(pieces) > 50 and max(map(len, pieces)) < 10_000
    assert msgspec.msgpack.decode(b"".join(pieces), type=Job) == job
    assert await sandbox.run(job, "messages", "") == "".join(f"{i}é{i}" for i in range(5000))


async def test_a_job_over_the_size_limit_is_refused(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_module, "MAX_JOB_BYTES", 1000)
    with pytest.raises(InvalidRequest, match="1000 bytes, which is the limit"):
        await sandbox.run(render("x" * 1000), "messages", "")


async def test_jobs_that_wait_at_shutdown_fail_with_the_shutdown_error() -> None:
    sandbox = Sandbox(ARGUMENTS, timeout_s=600.0, memory_bytes=2**27)
    await sandbox.start()
    waiting = [asyncio.create_task(sandbox.run(endless(i), "messages", "")) for i in range(6)]
    await asyncio.sleep(0.05)
    async with asyncio.timeout(60):  # much less than the jobs would take
        await sandbox.stop()
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(outcome, WorkerNotReady) for outcome in outcomes)


async def test_a_sandbox_without_a_usable_tokenizer_refuses_each_job_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {}}}')
    arguments = ["--tokenizer", str(tmp_path / "tokenizer.json"), "--vocab-size", "10", "--eos-token-ids", "2"]
    sandbox = Sandbox(arguments, timeout_s=1.0, memory_bytes=2**27)
    await sandbox.start()
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="llguidance cannot use this model's tokenizer") as refusal:
            await sandbox.run(CompileGrammar(GrammarKind.REGEX, "a"), "grammar", "")
        assert refusal.value.answer_code == "not_supported"
    await sandbox.stop()


async def test_a_job_that_cannot_be_encoded_is_refused(sandbox: Sandbox) -> None:
    with pytest.raises(InvalidRequest):
        await sandbox.run(render("x", n=10**30), "messages", "")


async def test_an_outcome_over_the_size_limit_is_refused(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked_process, "MAX_OUTCOME_BYTES", 1000)
    with pytest.raises(InvalidRequest, match="make it shorter"):
        await sandbox.run(render("{% for i in range(2000) %}x{% endfor %}"), "messages", "")
    assert await sandbox.run(render("next"), "messages", "") == "next"


async def test_jobs_that_are_cancelled_twice_leave_no_process_behind() -> None:
    sandbox = Sandbox(ARGUMENTS, timeout_s=1.0, memory_bytes=2**27)
    for number in range(12):
        job = asyncio.create_task(sandbox.run(render("x"), "messages", ""))
        for _ in range(2):
            await asyncio.sleep(0.001 * (number % 4))
            job.cancel()
        await asyncio.gather(job, return_exceptions=True)
    assert await sandbox.run(render("next"), "messages", "") == "next"
    await sandbox.stop()
    await until(lambda: len(fork_servers()) == 1)  # only the one that the other tests share


def endless(number: int) -> RenderChat:
    return render(f"{{% for i in range(99999) %}}{{% for j in range(99999) %}}{{% endfor %}}{{% endfor %}}{number}")


async def processes_at_rest(sandbox: Sandbox) -> tuple[int, list[int]]:
    """The process that forks, and those that wait for jobs: at least one, which is used again after a quick job."""
    async with asyncio.timeout(60):
        while True:
            assert await sandbox.run(render("a quick job"), "messages", "") == "a quick job"
            for fork_server in fork_servers()[-1:]:  # none, if it was killed and what it had forked is about to end
                if others := proc.children(fork_server):
                    return fork_server, others


def fork_servers() -> list[int]:
    return [pid for pid in proc.children(os.getpid()) if "servekit.sandbox.fork_server" in proc.read(pid, "cmdline")]
