"""Claims about drafts under grammars: they change no token of an answer, with each drafter and after each failure."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from servekit.engine.model_files import DEMO_MODEL_PATH
from servekit.protocol.messages import StepPlan
from servekit.requests.generation import GrammarKind
from servekit.scheduler.sequence import FinishReason, Sequence
from tests.support.drafters import HostileDrafter, OracleDrafter, RandomDrafter, WatchingDrafter
from tests.support.inprocess import InProcessEngine, load
from tests.workers.sampling.test_structured_output import (
    CHOICES,
    ENDLESS,
    PERSON,
    REGEXES,
    compile_one,
    mask_process,
    prompt_of,
    wait_for_masks,
    wait_until_ready,
)
from workers.batch import Batch
from workers.grammar.messages import Mask
from workers.loading.model_manager import LoadedModel
from workers.runner import model_runner
from workers.runner.interface import OutOfMemory
from workers.runner.oom_retry import MIN_TOKENS
from workers.sampling.logprobs import sampled_logprobs
from workers.sampling.structured_output import GrammarMasks
from workers.speculation.drafter import Drafter
from workers.speculation.ngram import NgramDrafter

VOCAB_SIZE = 2048
MAX_DRAFTS = 5
ASKED: list[tuple[GrammarKind, str] | None] = [
    (GrammarKind.JSON_SCHEMA, json.dumps(PERSON)),
    (GrammarKind.REGEX, REGEXES[0]),
    (GrammarKind.CHOICE, json.dumps(CHOICES)),
    None,
    (GrammarKind.EBNF, 'start: "(" (start | "x"){0,2} ")"'),
    (GrammarKind.JSON_SCHEMA, ENDLESS),
    (GrammarKind.REGEX, REGEXES[1]),
]
AMPLE = {"num_blocks": 400, "max_num_seqs": 16}
SCARCE = {"num_blocks": 45, "max_num_seqs": 16, "max_num_batched_tokens": 40}


@pytest.fixture(scope="module")
def demo() -> LoadedModel:
    return load(DEMO_MODEL_PATH)


def add_all(engine: InProcessEngine) -> list[Sequence]:
    """Add a sequence for each grammar, which samples at a high temperature, and one that is greedy."""
    sequences = []
    for number, asked in enumerate(2 * ASKED):
        grammar = None if asked is None else compile_one(*asked)
        temperature = 1.3 if number < len(ASKED) else 0.0
        options: dict[str, Any] = {"temperature": temperature, "seed": number, "max_tokens": 50}
        sequences.append(engine.add(prompt_of(number), grammar=grammar, **options))
    return sequences


Answer = tuple[list[int], FinishReason | None]


def answers_of(sequences: list[Sequence]) -> list[Answer]:
    return [(list(sequence.output_token_ids), sequence.finish_reason) for sequence in sequences]


@pytest.fixture(scope="module")
def expected(demo: LoadedModel) -> list[Answer]:
    """The answers without drafts."""
    engine = InProcessEngine(demo, **AMPLE)
    sequences = add_all(engine)
    engine.run()
    return answers_of(sequences)


def texts_of(answers: list[Answer]) -> list[list[int]]:
    return [[*prompt_of(number), *token_ids] for number, (token_ids, _) in enumerate(answers)]


DRAFTERS: dict[str, Callable[[list[list[int]]], Drafter]] = {
    "forced": lambda texts: WatchingDrafter(),
    "ngram": lambda texts: NgramDrafter(),
    "oracle": OracleDrafter,
    "half an oracle": lambda texts: OracleDrafter(texts, num_right=2),
    "random": lambda texts: RandomDrafter(VOCAB_SIZE),
    "hostile": lambda texts: HostileDrafter(VOCAB_SIZE),
}


FEW = [("forced", AMPLE), ("half an oracle", SCARCE), ("hostile", AMPLE)]
CASES = [
    pytest.param(drafter, memory, id=f"{drafter}, {name}", marks=() if (drafter, memory) in FEW else pytest.mark.long)
    for drafter in DRAFTERS
    for name, memory in (("ample", AMPLE), ("scarce", SCARCE))
]


@pytest.mark.parametrize(("drafter", "memory"), CASES)
def test_answers_are_those_without_drafts(
    drafter: str, memory: dict[str, int], demo: LoadedModel, expected: list[Answer]
) -> None:
    of_texts = DRAFTERS[drafter](texts_of(expected))
    engine = InProcessEngine(demo, max_steps_in_flight=2, max_drafts=MAX_DRAFTS, drafter=of_texts, **memory)
    sequences = add_all(engine)
    engine.run()
    assert answers_of(sequences) == expected
    assert (engine.manager.num_preemptions > 0) == (memory is SCARCE)
    if memory is AMPLE:
        num_constrained = sum(asked is not None for asked in 2 * ASKED)
        assert next(engine.runner.grammars._numbers) == 1 + num_constrained, "no sequence was sent a second time"
    num_accepted = sum(engine.manager.draft_lengths.num_accepted)
    assert num_accepted > (0 if drafter in ("random", "hostile") else 20)


def test_tokens_that_a_grammar_forces_are_accepted_without_a_drafter(demo: LoadedModel) -> None:
    """Greedy, so that the model writes the forced text in its usual tokens."""
    schema = {
        "type": "object",
        "properties": {f"a_long_name_of_a_property_{number}": {"enum": ["red", "green"]} for number in range(4)},
    }
    schema |= {"required": list(schema["properties"]), "additionalProperties": False}
    grammar = compile_one(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    num_steps = []
    for max_drafts in (0, MAX_DRAFTS):
        drafter = WatchingDrafter() if max_drafts else None
        engine = InProcessEngine(demo, max_drafts=max_drafts, drafter=drafter, **AMPLE)
        wait_until_ready(engine)
        sequence = engine.add(prompt_of(1), grammar=grammar, max_tokens=150)
        num_before = engine.num_steps
        while engine.manager.has_work:
            engine.step()
            wait_for_masks(engine)
        num_steps.append(engine.num_steps - num_before)
        assert sequence.finish_reason is FinishReason.STOP
    assert num_steps[1] < 0.6 * num_steps[0], num_steps


def test_tokens_that_a_grammar_forces_go_before_those_of_the_drafter(demo: LoadedModel) -> None:
    engine = InProcessEngine(demo, max_drafts=MAX_DRAFTS, drafter=HostileDrafter(VOCAB_SIZE), **AMPLE)
    wait_until_ready(engine)
    text = "one certain text of many tokens, " * 3
    sequence = engine.add(prompt_of(1), grammar=compile_one(GrammarKind.CHOICE, json.dumps([text])), max_tokens=150)
    while engine.manager.has_work:
        engine.step()
        wait_for_masks(engine)
    num_tokens = sequence.num_output_tokens
    assert sum(engine.manager.draft_lengths.num_accepted) > 0.4 * num_tokens, num_tokens


def test_masks_that_come_late_or_never_change_no_answer(
    demo: LoadedModel, expected: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every third answer is taken some steps later, and others lack the masks behind some drafts."""
    receive, take = GrammarMasks._receive, GrammarMasks._take
    held: list[tuple[int, Mask, Any]] = []
    num_taken = num_held = num_stale = num_cut = 0

    def hold_some(self: GrammarMasks, mask: Mask, state: Any) -> None:
        nonlocal num_taken, num_held, num_cut
        num_taken += 1
        if num_taken % 3 == 0:
            num_held += 1
            held.append((engine.num_steps + 3, mask, state))
            return
        if num_taken % 3 == 1 and mask.num_drafts:
            num_cut += 1
            mask = replace(mask, num_drafts=num_taken % mask.num_drafts)
        take(self, mask, state)

    def release_some(self: GrammarMasks, timeout_s: float) -> None:
        nonlocal num_stale
        receive(self, timeout_s)
        while held and held[0][0] <= engine.num_steps:
            _, mask, state = held.pop(0)
            num_stale += mask.number < state.first_ask
            take(self, mask, state)

    monkeypatch.setattr(GrammarMasks, "_take", hold_some)
    monkeypatch.setattr(GrammarMasks, "_receive", release_some)
    monkeypatch.setattr(GrammarMasks, "_wait_for", lambda self, batch, computed, share: self._receive(0.001))
    oracle = OracleDrafter(texts_of(expected))
    engine = InProcessEngine(demo, max_steps_in_flight=2, max_drafts=MAX_DRAFTS, drafter=oracle, **AMPLE)
    sequences = add_all(engine)
    engine.run()
    assert answers_of(sequences) == expected
    assert num_held > 20 and num_cut > 20 and num_stale > 5 and engine.manager.num_deferrals > 0
    assert engine.num_failures == 0


def test_a_killed_mask_process_changes_no_answer(demo: LoadedModel, expected: list[Answer]) -> None:
    oracle = OracleDrafter(texts_of(expected))
    engine = InProcessEngine(demo, max_steps_in_flight=2, max_drafts=MAX_DRAFTS, drafter=oracle, **AMPLE)
    sequences = add_all(engine)
    for num_tokens in (8, 20, 32):
        while max(sequence.num_output_tokens for sequence in sequences) < num_tokens:
            engine.step()
        wait_for_masks(engine)  # a request fails if the process is killed twice while it works for that request
        os.kill(mask_process(engine), signal.SIGKILL)
    engine.run()
    assert answers_of(sequences) == expected and engine.num_failures == 0
    assert engine.runner.grammars._process.incarnation == 4


def test_answers_of_a_tenant_that_becomes_slow_continue_in_the_other_process(
    demo: LoadedModel, expected: list[Answer]
) -> None:
    oracle = OracleDrafter(texts_of(expected))
    engine = InProcessEngine(demo, max_steps_in_flight=2, max_drafts=MAX_DRAFTS, drafter=oracle, **AMPLE)
    grammars = engine.runner.grammars
    sequences = add_all(engine)
    while max(sequence.num_output_tokens for sequence in sequences) < 10:
        engine.step()
    wait_for_masks(engine)
    state = next(iter(grammars._states.values()))
    grammars._take(Mask(state.number, is_slow=True, number=state.last_ask), state)
    engine.run()
    assert answers_of(sequences) == expected and engine.num_failures == 0
    assert grammars._slow_process.incarnation == 1


def test_a_step_that_is_executed_again_uses_the_masks_of_its_own_positions(
    demo: LoadedModel, expected: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory runs out after a step has sampled tokens, and has asked for the masks behind them."""
    num_failed = 0

    def fail_at_times(*arguments: Any) -> Any:
        nonlocal num_failed
        if len(arguments[2]) > MIN_TOKENS and engine.num_steps >= 3 + 5 * num_failed:
            num_failed += 1
            raise MemoryError
        return sampled_logprobs(*arguments)

    monkeypatch.setattr(model_runner, "sampled_logprobs", fail_at_times)
    oracle = OracleDrafter(texts_of(expected), num_right=3)
    engine = InProcessEngine(demo, max_drafts=MAX_DRAFTS, drafter=oracle, **AMPLE)
    sequences = add_all(engine)
    engine.run()
    assert num_failed >= 2
    assert answers_of(sequences) == expected


def test_a_part_of_a_step_whose_masks_are_late_holds_up_no_row_before_it(
    demo: LoadedModel, expected: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part may begin with the row of a draft, which is deferred and turns out to be after a rejected draft."""
    oracle = OracleDrafter(texts_of(expected), num_right=3)
    engine = InProcessEngine(demo, max_drafts=MAX_DRAFTS, drafter=oracle, **AMPLE)
    wait, execute, parts = engine.runner.grammars._wait, engine.runner._execute, list[StepPlan]()

    def fail_at_times(plan: StepPlan, batch: Batch | None) -> Any:
        if plan.num_tokens <= MIN_TOKENS:
            parts.append(plan)
        elif engine.num_steps % 3 == 0:
            parts.clear()
            raise OutOfMemory("for a test")
        return execute(plan, batch)

    def wait_in_first_part(*arguments: Any) -> None:
        if len(parts) < 2:
            wait(*arguments)

    monkeypatch.setattr(engine.runner, "_execute", fail_at_times)
    monkeypatch.setattr(engine.runner.grammars, "_wait", wait_in_first_part)
    sequences, num_late = add_all(engine), 0
    while engine.manager.has_work:
        parts.clear()
        engine.step()
        num_late += len(parts) > 1
        assert engine.num_steps < 2000, "a row is deferred again and again"
    assert num_late and answers_of(sequences) == expected


def test_a_grammar_that_crashes_its_process_fails_only_the_answers_of_its_request(demo: LoadedModel) -> None:
    grammar = compile_one(GrammarKind.JSON_SCHEMA, ENDLESS)
    engine = InProcessEngine(demo, max_drafts=MAX_DRAFTS, drafter=NgramDrafter(), **AMPLE)
    ended = engine.add(prompt_of(1), grammar=grammar, max_tokens=40)
    other = engine.add(prompt_of(2), grammar=grammar, max_tokens=40)
    while ended.num_output_tokens < 5:
        engine.step()
    states = engine.runner.grammars._states
    number = next(state.number for state in states.values() if state.assignment.slot == ended.slot)
    os.kill(mask_process(engine), signal.SIGSTOP)
    engine.runner.grammars._process._current[0] = number  # as the process does while it works on the sequence
    os.kill(mask_process(engine), signal.SIGSEGV)
    os.kill(mask_process(engine), signal.SIGCONT)
    engine.run()
    assert (ended.finish_reason, other.finish_reason) == (FinishReason.ERROR, FinishReason.LENGTH)
