"""Claims about the mask process and its end in the worker, with real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from servekit.engine.model_files import DEMO_MODEL_PATH
from servekit.protocol.grammar_matcher import grammar_tokenizer, matcher_for
from servekit.requests.generation import GrammarKind
from tests.support import proc
from tests.workers.grammar.test_matchers import compiled
from workers.grammar import client
from workers.grammar.client import MAX_FAILED_STARTS, Lost, MaskProcess, wait_for_any
from workers.grammar.messages import Ask, AskMasks, Begin, Mask

LIMIT_S = 60.0
TOKENIZER = DEMO_MODEL_PATH / "tokenizer.json"


@pytest.fixture
def process() -> Iterator[MaskProcess]:
    process = MaskProcess(TOKENIZER, 2048, (2,), num_slots=4)
    assert process.ensure_started()
    yield process
    process.stop()


def pid_of(process: MaskProcess) -> int:
    assert process._process is not None
    return process._process.pid


def receive(process: MaskProcess) -> list[Mask] | Lost:
    """Wait for an answer, or for the end of the process."""
    deadline_s = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline_s:
        if received := process.receive(1.0):
            return received
    raise AssertionError("no answer")


def grammar_of(text: str) -> str:
    return compiled(grammar_tokenizer(TOKENIZER, 2048, [2]), GrammarKind.REGEX, text)


def ask(process: MaskProcess, number: int, slot: int, grammar: str, *token_ids: int) -> None:
    process.ask(AskMasks((Ask(number, token_ids),), (Begin(number, slot, "", number, 0),), (grammar,)))


def test_masks_arrive_in_shared_memory_in_the_rows_of_their_slots(process: MaskProcess) -> None:
    grammars = {slot: grammar_of("[a-z]{3}" if slot % 2 else "[0-9]+") for slot in range(4)}
    for slot, grammar in grammars.items():
        ask(process, 10 + slot, slot, grammar)
    masks: list[Mask] = []
    while len(masks) < 4:
        received = receive(process)
        assert not isinstance(received, Lost)
        masks += received
    assert sorted(masks, key=lambda mask: mask.sequence) == [Mask(10), Mask(11), Mask(12), Mask(13)]
    known = grammar_tokenizer(TOKENIZER, 2048, [2])
    for slot, grammar in grammars.items():
        mask = process.masks[slot].tobytes()
        assert mask == matcher_for(grammar, known).compute_bitmask()[: len(mask)]  # which ends with an empty word


def test_the_masks_behind_drafts_are_in_the_rows_of_the_slot() -> None:
    process = MaskProcess(TOKENIZER, 2048, (2,), num_slots=4, max_drafts=3)
    assert process.ensure_started() and process.masks.shape == (4, 4, 64)
    grammar = grammar_of("[a-z]+[0-9]")
    drafts = (70, 71)
    begin = Begin(1, 2, "", 1, 0)
    process.ask(AskMasks((Ask(1, (), 1),), (begin,), (grammar,)))
    assert receive(process) == [Mask(1, number=1)]
    process.ask(AskMasks((Ask(1, (72,), 2, drafts),)))
    assert receive(process) == [Mask(1, number=2, num_drafts=2)]
    alone = matcher_for(grammar, grammar_tokenizer(TOKENIZER, 2048, [2]))
    for row, token_id in enumerate((72, *drafts)):
        assert alone.consume_token(token_id)
        assert process.masks[2, row].tobytes() == alone.compute_bitmask()[:256]
    process.stop()


def test_an_answer_to_an_earlier_ask_leaves_the_later_one_due(process: MaskProcess) -> None:
    ask(process, 1, 0, grammar_of("a+"))
    assert receive(process) == [Mask(1)]
    process.ask(AskMasks((Ask(1, (), 6),)))
    wait_for_any([process], LIMIT_S)  # the answer is there, and not read
    os.kill(pid_of(process), signal.SIGSTOP)
    process.ask(AskMasks((Ask(1, (), 7),)))
    assert receive(process) == [Mask(1, number=6)] and process._due == {1: 7}
    os.kill(pid_of(process), signal.SIGCONT)
    assert receive(process) == [Mask(1, number=7)] and not process._due


def test_a_killed_process_is_noticed_and_replaced_by_one_that_knows_nothing(process: MaskProcess) -> None:
    ask(process, 1, 0, grammar_of("a+"))
    assert receive(process) == [Mask(1)]
    os.kill(pid_of(process), signal.SIGKILL)
    assert receive(process) == Lost(None, is_crash=False)
    incarnation = process.incarnation
    assert not process.is_running and process.ensure_started() and process.incarnation == incarnation + 1
    ask(process, 1, 0, grammar_of("a+"))
    assert receive(process) == [Mask(1)]


def test_a_crash_names_the_sequence_that_was_worked_on(process: MaskProcess) -> None:
    ask(process, 1, 0, grammar_of("a+"))
    assert receive(process) == [Mask(1)]
    process._current[0] = 5  # as the process does before it works on a sequence
    os.kill(pid_of(process), signal.SIGSEGV)
    assert receive(process) == Lost(5, is_crash=True)


def test_a_process_that_does_not_answer_is_replaced(process: MaskProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    ask(process, 1, 0, grammar_of("a+"))
    assert receive(process) == [Mask(1)]
    os.kill(pid_of(process), signal.SIGSTOP)
    assert process.receive(0.0) == [], "nothing is due, so nothing is late"
    monkeypatch.setattr(client, "ANSWER_TIMEOUT_S", 0.1)
    ask(process, 1, 0, grammar_of("a+"), 70)
    lost = receive(process)
    assert isinstance(lost, Lost) and not lost.is_crash and not process.is_running


def test_a_pause_of_both_processes_is_no_silence(process: MaskProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock has gone on by an hour at the first look after the pause, and the process has had no time to answer."""
    os.kill(pid_of(process), signal.SIGSTOP)
    process.ask(AskMasks((Ask(1, ()),), (Begin(1, 0, "a", 1, 0),), (grammar_of("[0-9]+"),)))
    paused_s = time.monotonic() + 3600.0
    monkeypatch.setattr(client.time, "monotonic", lambda: paused_s)
    assert process.receive(0.0) == []
    monkeypatch.undo()
    os.kill(pid_of(process), signal.SIGCONT)
    (mask,) = receive(process)
    assert isinstance(mask, Mask) and not mask.error


def test_nothing_is_due_for_sequences_that_have_ended(process: MaskProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    ask(process, 1, 0, grammar_of("a+"))
    assert receive(process) == [Mask(1)]
    os.kill(pid_of(process), signal.SIGSTOP)
    monkeypatch.setattr(client, "ANSWER_TIMEOUT_S", 0.0)
    ask(process, 1, 0, grammar_of("a+"), 70)
    process.forget(1)
    assert process.receive(0.05) == []
    os.kill(pid_of(process), signal.SIGCONT)


def test_messages_that_are_not_read_are_bounded(process: MaskProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "MAX_UNREAD_BYTES", 2**20)
    ask(process, 1, 0, grammar_of("a+"))
    assert receive(process) == [Mask(1)]
    os.kill(pid_of(process), signal.SIGSTOP)
    for number in range(2, 300):
        ask(process, number, 1, "x" * 100_000)
        if isinstance(process.receive(0.0), Lost):
            break
    assert 2 + 10 <= number < 60


def test_a_process_that_cannot_start_refuses_with_a_reason_and_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client.sys, "executable", "/bin/false")
    monkeypatch.setattr(client, "MAX_START_DELAY_S", 0.0)
    process = MaskProcess(TOKENIZER, 2048, (2,), num_slots=4)
    for _ in range(MAX_FAILED_STARTS):
        assert not process.refusal
        assert process.ensure_started()
        assert isinstance(receive(process), Lost)
    assert f"did not start {MAX_FAILED_STARTS} times" in process.refusal
    monkeypatch.undo()
    monkeypatch.setattr(client, "MAX_START_DELAY_S", 0.0)
    process._start_not_before_s = 0.0
    assert process.ensure_started()
    ask(process, 1, 0, grammar_of("a+"))
    assert receive(process) == [Mask(1)] and not process.refusal
    process.stop()


def test_a_tokenizer_that_cannot_be_used_is_reported_once(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    process = MaskProcess(tmp_path / "tokenizer.json", 2048, (2,), num_slots=4)
    assert process.ensure_started()
    assert isinstance(receive(process), Lost)
    assert process.refusal and not process.ensure_started()


def test_the_process_ends_with_the_object_that_started_it() -> None:
    process = MaskProcess(TOKENIZER, 2048, (2,), num_slots=4)
    process.ensure_started()
    pid = pid_of(process)
    del process
    assert pid not in proc.all_pids()


def test_the_process_ends_with_its_worker_even_if_it_is_stopped() -> None:
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from workers.grammar.client import MaskProcess\n"
        f"process = MaskProcess(Path({str(TOKENIZER)!r}), 2048, (2,), 4)\n"
        "process.ensure_started()\n"
        "while not process._is_ready: process.receive(1.0)\n"
        "os.kill(process._process.pid, signal.SIGSTOP)\n"
        "print(process._process.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S)
    proc.wait_until_gone(int(done.stdout))
