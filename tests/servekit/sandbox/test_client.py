"""Tests of sandbox processes: exact results, limits of time and memory, and restarts."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from transformers import AutoTokenizer

import servekit.sandbox.client as sandbox_module
from servekit.engine.model_files import DEMO_MODEL_PATH, find_chat_template
from servekit.errors import InvalidRequest, QueueFull, WorkerNotReady
from servekit.request import GrammarKind
from servekit.sandbox.client import MAX_WAITING, Sandbox
from servekit.sandbox.jobs import CompileGrammar, RenderChat

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKENIZER = ["--tokenizer", str(DEMO_MODEL_PATH / "tokenizer.json")]
CHAT = [{"role": "user", "content": "Hi {{ 1 + 1 }}"}, {"role": "assistant", "content": "Hello"}]


def render(template: str, messages: list[dict[str, Any]] = CHAT, **variables: Any) -> RenderChat:
    return RenderChat(template, messages, True, False, variables)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chats() -> AsyncIterator[Sandbox]:
    sandbox = Sandbox([], timeout_s=1.0, memory_bytes=2**27)
    await sandbox.start()
    yield sandbox
    await sandbox.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def grammars() -> AsyncIterator[Sandbox]:
    sandbox = Sandbox([*TOKENIZER, "--vocab-size", "2048", "--eos-token-ids", "2"], timeout_s=2.0, memory_bytes=2**28)
    await sandbox.start()
    yield sandbox
    await sandbox.stop()


async def test_a_rendered_chat_equals_that_of_transformers(chats: Sandbox) -> None:
    template = find_chat_template(DEMO_MODEL_PATH)
    assert template is not None
    job = RenderChat(template.source, CHAT[:1], True, False, dict(template.special_tokens))
    expected = AutoTokenizer.from_pretrained(DEMO_MODEL_PATH).apply_chat_template(
        CHAT[:1], tokenize=False, add_generation_prompt=True
    )
    assert await chats.run(job, "messages", "") == expected


async def test_the_last_message_can_be_continued(chats: Sandbox) -> None:
    template = find_chat_template(DEMO_MODEL_PATH)
    assert template is not None
    job = RenderChat(template.source, CHAT, False, True, dict(template.special_tokens))
    assert str(await chats.run(job, "messages", "")).endswith("<|assistant|>Hello")


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
    chats: Sandbox, template: str, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message) as refusal:
        await chats.run(render(template), "messages", "")
    assert refusal.value.param == "messages"
    assert await chats.run(render("{{ messages[0].content }}"), "messages", "") == "Hi {{ 1 + 1 }}"


async def test_the_outcome_of_a_cancelled_job_does_not_go_to_the_next_job(chats: Sandbox) -> None:
    slow = asyncio.create_task(chats.run(render("{% for i in range(99999) %}{{ i }}{% endfor %}"), "messages", ""))
    await asyncio.sleep(0.005)
    slow.cancel()
    assert await chats.run(render("next"), "messages", "") == "next"


async def test_the_queue_of_waiting_jobs_is_bounded(chats: Sandbox) -> None:
    served = MAX_WAITING + 1  # one runs while the others wait
    asked = [asyncio.create_task(chats.run(render(str(i)), "messages", "")) for i in range(served + 5)]
    outcomes = await asyncio.gather(*asked, return_exceptions=True)
    assert outcomes[:served] == [str(i) for i in range(served)]
    assert all(isinstance(outcome, QueueFull) for outcome in outcomes[served:])


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
    grammars: Sandbox, kind: GrammarKind, text: str, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        await grammars.run(CompileGrammar(kind, text), "grammar", "")
    assert await grammars.run(CompileGrammar(GrammarKind.REGEX, "[ab]+"), "grammar", "")


async def test_every_kind_of_grammar_compiles(grammars: Sandbox) -> None:
    for kind, text in (
        (GrammarKind.JSON, ""),
        (GrammarKind.JSON_SCHEMA, "true"),
        (GrammarKind.JSON_SCHEMA, '{"type": "string", "pattern": "^a/b$"}'),
        (GrammarKind.REGEX, r"\d{3}/[^/]*"),
        (GrammarKind.EBNF, 'start: "(" start ")" | "x"'),
        (GrammarKind.CHOICE, json.dumps(['a "quoted" one', "<eos>", "é\n🦊", "\\", "/"])),
    ):
        assert await grammars.run(CompileGrammar(kind, text), "grammar", "")


async def test_a_job_whose_process_was_killed_from_outside_runs_again(chats: Sandbox) -> None:
    """The kernel for lack of memory, or a person may have killed it; neither is the client's fault."""
    for _ in range(2):
        assert chats._process is not None
        os.kill(chats._process.pid, signal.SIGKILL)
        assert await chats.run(render("next"), "messages", "") == "next"


async def test_jobs_that_wait_at_shutdown_fail_with_the_shutdown_error() -> None:
    sandbox = Sandbox([], timeout_s=9.0, memory_bytes=2**27)
    await sandbox.start()
    endless = render("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}")
    waiting = [asyncio.create_task(sandbox.run(endless, "messages", "")) for _ in range(3)]
    await asyncio.sleep(0.05)
    async with asyncio.timeout(2):
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


async def test_a_job_that_cannot_be_encoded_is_refused(chats: Sandbox) -> None:
    with pytest.raises(InvalidRequest):
        await chats.run(render("x", n=10**30), "messages", "")


async def test_an_outcome_over_the_size_limit_is_refused(chats: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_module, "MAX_OUTCOME_BYTES", 1000)
    with pytest.raises(InvalidRequest, match="make it shorter"):
        await chats.run(render("{% for i in range(2000) %}x{% endfor %}"), "messages", "")
    assert await chats.run(render("next"), "messages", "") == "next"


async def test_jobs_that_are_cancelled_twice_leave_no_process_behind() -> None:
    sandbox = Sandbox([], timeout_s=1.0, memory_bytes=2**27)
    for number in range(12):
        job = asyncio.create_task(sandbox.run(render("x"), "messages", ""))
        for _ in range(2):
            await asyncio.sleep(0.001 * (number % 4))
            job.cancel()
        await asyncio.gather(job, return_exceptions=True)
    assert await sandbox.run(render("next"), "messages", "") == "next"
    await sandbox.stop()
    assert num_chat_processes() <= 1, "only the one that the other tests share"


def num_chat_processes() -> int:
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    commands = [Path(f"/proc/{pid}/cmdline").read_text() for pid in children]
    return sum("servekit.sandbox.process" in command and "--tokenizer" not in command for command in commands)
