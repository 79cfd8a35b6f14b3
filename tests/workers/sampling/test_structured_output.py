"""Claims about answers that follow a grammar, checked by independent implementations: Python's re and jsonschema."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer

from servekit.engine.model_files import DEMO_MODEL_PATH
from servekit.engine.tokenizer import load_tokenizer
from servekit.protocol.grammar_matcher import grammar_tokenizer, matcher_for
from servekit.protocol.messages import SlotAssignment
from servekit.protocol.sampling_params import SamplingParams
from servekit.requests.generation import GrammarKind
from servekit.sandbox.compile_grammar import compile_grammar
from servekit.sandbox.jobs import CompileGrammar, Done
from servekit.scheduler.sequence import FinishReason, Sequence
from tests.support.inprocess import InProcessEngine, load
from tests.support.timing import again_if_late, assert_within
from workers.grammar import client
from workers.grammar.messages import Mask
from workers.loading.model_manager import LoadedModel
from workers.runner import model_runner
from workers.runner.oom_retry import MIN_TOKENS
from workers.sampling import structured_output
from workers.sampling.logprobs import sampled_logprobs
from workers.sampling.structured_output import GrammarMasks

TOKENIZER = load_tokenizer(DEMO_MODEL_PATH)
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "likes": {"type": "array", "items": {"enum": ["cats", "dogs", "<eos>"]}, "maxItems": 3},
        "home": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/home"}]},
    },
    "required": ["name", "age", "home"],
    "additionalProperties": False,
    "$defs": {"home": {"type": "object", "properties": {"city": {"const": "Paris"}}, "required": ["city"]}},
}
REGEXES = [r"\d{4}-[01]\d", r"[a-z]{2,9}@[a-z]{2,5}\.(org|com)", r"(yes|no)( really)?", "été 🦊!", r"a/b\\c", "<eos>?!"]
CHOICES = ["red", 'a "quoted" one', "<eos>", "<|user|>", "éà\n🦊", "\\", "/", "red and green"]


@pytest.fixture(scope="module")
def demo() -> LoadedModel:
    return load(DEMO_MODEL_PATH)


def compile_one(kind: GrammarKind, text: str) -> str:
    tokenizer = grammar_tokenizer(DEMO_MODEL_PATH / "tokenizer.json", 2048, [2])
    outcome = compile_grammar(CompileGrammar(kind, text), tokenizer)
    assert isinstance(outcome, Done), outcome
    return outcome.text


def prompt_of(number: int) -> list[int]:
    (token_ids,) = TOKENIZER.encode_blocking([f"Tell me about number {number}. " * (1 + number % 3)])
    return token_ids


def text_of(sequence: Sequence) -> str:
    """The answer as its client gets it, without what ended it."""
    token_ids = sequence.output_token_ids
    return TOKENIZER.decode(token_ids[:-1] if sequence.finish_reason is FinishReason.STOP else token_ids)


def is_valid(kind: GrammarKind, text: str, answer: str) -> bool:
    match kind:
        case GrammarKind.REGEX:
            return re.fullmatch(text, answer, re.ASCII) is not None
        case GrammarKind.CHOICE:
            return answer in json.loads(text)
        case GrammarKind.JSON_SCHEMA:
            return jsonschema.Draft202012Validator(json.loads(text)).is_valid(json.loads(answer))
        case GrammarKind.JSON:
            return isinstance(json.loads(answer), dict)
        case _:
            return answer.startswith("(") and answer.count("(") == answer.count(")")


def test_every_answer_matches_its_grammar_through_preemption_beside_free_answers(demo: LoadedModel) -> None:
    """At a high temperature, in a pool small enough to preempt; half of the batch has no grammar."""
    asked = [
        *((GrammarKind.REGEX, regex) for regex in REGEXES),
        (GrammarKind.CHOICE, json.dumps(CHOICES)),
        (GrammarKind.JSON_SCHEMA, json.dumps(PERSON)),
        (GrammarKind.EBNF, 'start: "(" (start | "x"){0,2} ")"'),
    ] * 4
    engine = InProcessEngine(demo, num_blocks=40, max_num_seqs=16, max_num_batched_tokens=40, max_steps_in_flight=2)
    free, constrained = [], []
    for number, (kind, text) in enumerate(asked):
        options: dict[str, Any] = {"temperature": 1.5, "seed": number, "max_tokens": 120}
        free.append(engine.add(prompt_of(number), **{**options, "max_tokens": 25}))
        constrained.append(engine.add(prompt_of(number), grammar=compile_one(kind, text), **options))
    engine.run()
    assert engine.manager.num_preemptions > 0
    whole = 0
    for sequence, (kind, text) in zip(constrained, asked, strict=True):
        if sequence.finish_reason is FinishReason.STOP:
            assert is_valid(kind, text, text_of(sequence)), (kind, text, text_of(sequence))
            whole += 1
    assert whole > 0.9 * len(asked)
    alone = InProcessEngine(demo, num_blocks=200)
    for number, sequence in enumerate(free[:6]):
        same = alone.add(prompt_of(number), temperature=1.5, seed=number, max_tokens=25)
        alone.run()
        assert same.output_token_ids == sequence.output_token_ids, "a grammar changed an answer without one"


def test_preempted_answer_continues_in_its_grammar(demo: LoadedModel) -> None:
    grammar = compile_one(GrammarKind.JSON_SCHEMA, json.dumps(PERSON))
    answers = []
    for num_blocks in (400, 50):
        engine = InProcessEngine(demo, num_blocks=num_blocks)
        sequences = [
            engine.add(prompt_of(n), grammar=grammar, temperature=1.2, seed=n, max_tokens=90) for n in range(8)
        ]
        engine.run()
        assert (engine.manager.num_preemptions > 0) == (num_blocks == 50)
        answers.append([text_of(sequence) for sequence in sequences])
    assert answers[0] == answers[1]


def test_a_step_that_is_executed_again_uses_the_masks_of_its_own_positions(
    demo: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory runs out after a step has sampled tokens, and has asked for the masks behind them."""
    grammar = compile_one(GrammarKind.JSON_SCHEMA, json.dumps(PERSON))
    num_failed = 0

    def fail_at_times(*arguments: Any) -> Any:
        nonlocal num_failed
        is_divisible = len(arguments[2]) > MIN_TOKENS
        if is_divisible and engine.num_steps % 5 == 3 and num_failed <= engine.num_steps // 5:
            num_failed += 1
            raise MemoryError
        return sampled_logprobs(*arguments)

    answers = []
    for replacement in (sampled_logprobs, fail_at_times):
        monkeypatch.setattr(model_runner, "sampled_logprobs", replacement)
        engine = InProcessEngine(demo, num_blocks=400, max_num_seqs=32)
        sequences = [
            engine.add(prompt_of(n), grammar=grammar, temperature=1.2, seed=n, max_tokens=60) for n in range(24)
        ]
        engine.run()
        answers.append([text_of(sequence) for sequence in sequences])
    assert num_failed > 3
    assert answers[0] == answers[1]


def test_grammar_wins_where_other_parameters_leave_no_token(demo: LoadedModel) -> None:
    engine = InProcessEngine(demo)
    yes_or_no = compile_one(GrammarKind.CHOICE, '["yes", "no"]')
    (yes,) = TOKENIZER.encode_blocking(["yes"], add_special_tokens=False)
    (sky,) = TOKENIZER.encode_blocking([" sky"], add_special_tokens=False)
    for options in (
        {"allowed_token_ids": tuple(sky)},
        {"min_tokens": 50},
        {"bad_words": (tuple(yes),), "logit_bias": ((yes[0], -100.0),)},
    ):
        sequence = engine.add(prompt_of(1), grammar=yes_or_no, max_tokens=60, **options)
        engine.run()
        assert text_of(sequence) in ("yes", "no")


def test_each_fork_follows_the_grammar_by_itself(demo: LoadedModel) -> None:
    engine = InProcessEngine(demo, num_blocks=400)
    grammar = compile_one(GrammarKind.REGEX, "[a-z]{5,40}")
    options: dict[str, Any] = {"grammar": grammar, "temperature": 2.0, "max_tokens": 50}
    leader = engine.add(prompt_of(2), seed=0, **options)
    forks = [leader, *(engine.add(prompt_of(2), leader=leader, seed=seed, **options) for seed in range(1, 6))]
    engine.run()
    texts = [text_of(sequence) for sequence in forks]
    assert all(re.fullmatch("[a-z]{5,40}", text) for text in texts) and len(set(texts)) > 3


@again_if_late
def test_too_complex_grammar_fails_only_its_own_sequence(demo: LoadedModel) -> None:
    """The grammar compiles at once. Its ambiguity grows with the answer: without a limit, a token takes seconds."""
    grammar = compile_one(GrammarKind.EBNF, "start: s\ns: s s s | s s | /[a-z ]/ |")
    engine = InProcessEngine(demo, num_blocks=200)
    lost = engine.add(prompt_of(3), grammar=grammar, temperature=2.0, max_tokens=100)
    other = engine.add(prompt_of(4), max_tokens=20)
    slowest_s = 0.0
    while engine.manager.has_work:
        started = time.perf_counter()
        engine.step()
        slowest_s = max(slowest_s, time.perf_counter() - started)
    assert lost.finish_reason is FinishReason.ERROR
    assert other.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
    engine.manager.check()
    assert_within(0.5, slowest_s)


ENDLESS = json.dumps({"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 100})


def mask_process(engine: InProcessEngine) -> int:
    """The pid of the engine's mask process, once it has computed a mask."""
    process = engine.runner.grammars._process
    assert process._process is not None
    return process._process.pid


def wait_until_ready(engine: InProcessEngine) -> None:
    """Generate one token with a grammar, so that the process has started."""
    engine.add(prompt_of(0), grammar=compile_one(GrammarKind.REGEX, "a+"), max_tokens=1)
    engine.run()


def wait_for_masks(engine: InProcessEngine) -> None:
    """Wait until the processes have nothing to do."""
    grammars = engine.runner.grammars
    while any(state.is_asked for state in grammars._states.values()):
        grammars._receive(1.0)


def test_a_killed_mask_process_changes_no_answer(demo: LoadedModel) -> None:
    grammar = compile_one(GrammarKind.JSON_SCHEMA, ENDLESS)
    answers = []
    for num_kills in (0, 3):
        engine = InProcessEngine(demo, num_blocks=400, max_steps_in_flight=2)
        sequences = [
            engine.add(prompt_of(n), grammar=grammar, temperature=1.2, seed=n, max_tokens=40) for n in range(4)
        ]
        for number in range(num_kills):
            while sequences[0].num_output_tokens < 8 * (number + 1):
                engine.step()
            if number > 0:  # a request fails if the process is killed twice while it works for that request
                wait_for_masks(engine)
            os.kill(mask_process(engine), signal.SIGKILL)
        engine.run()
        assert engine.num_failures == 0
        assert engine.runner.grammars._process.incarnation == 1 + num_kills
        answers.append([sequence.output_token_ids for sequence in sequences])
    assert answers[0] == answers[1]


def test_answers_of_a_tenant_that_becomes_slow_continue_in_the_other_process(demo: LoadedModel) -> None:
    grammar = compile_one(GrammarKind.JSON_SCHEMA, ENDLESS)
    answers = []
    for becomes_slow in (False, True):
        engine = InProcessEngine(demo, num_blocks=400, max_steps_in_flight=2)
        grammars = engine.runner.grammars
        options: dict[str, Any] = {"grammar": grammar, "temperature": 1.2, "max_tokens": 40}
        sequences = [engine.add(prompt_of(n), tenant="ab"[n % 2], seed=n, **options) for n in range(4)]
        while any(sequence.num_output_tokens < 8 for sequence in sequences):
            engine.step()
        states = {
            tenant: [each for each in grammars._states.values() if each.assignment.tenant == tenant] for tenant in "ab"
        }
        wait_for_masks(engine)
        for state in states["a"] if becomes_slow else []:
            # As the process answers after a piece of work that took too long, which depends on the machine.
            grammars._take(Mask(state.number, is_slow=True, number=state.last_ask), state)
        engine.run()
        assert engine.num_failures == 0
        if becomes_slow:
            assert {each.process for each in states["a"]} == {grammars._slow_process}
            assert grammars._slow_process.incarnation == 1
        answers.append([sequence.output_token_ids for sequence in sequences])
    assert answers[0] == answers[1]


def test_a_stopped_mask_process_delays_only_answers_with_a_grammar(demo: LoadedModel) -> None:
    grammar = compile_one(GrammarKind.JSON_SCHEMA, ENDLESS)
    expected = InProcessEngine(demo, num_blocks=400)
    options: dict[str, Any] = {"temperature": 1.2, "seed": 1, "max_tokens": 30}
    whole = expected.add(prompt_of(1), grammar=grammar, **options)
    expected.run()
    engine = InProcessEngine(demo, num_blocks=400, max_steps_in_flight=2)
    wait_until_ready(engine)
    os.kill(mask_process(engine), signal.SIGSTOP)
    constrained = engine.add(prompt_of(1), grammar=grammar, **options)
    free = engine.add(prompt_of(2), max_tokens=20, ignore_eos=True)
    while free.finish_reason is None:
        engine.step()
    assert engine.manager.num_deferrals >= 10 and constrained.num_output_tokens == 0
    os.kill(mask_process(engine), signal.SIGCONT)
    engine.run()
    assert constrained.output_token_ids == whole.output_token_ids and engine.num_failures == 0


def test_steps_wait_for_late_masks_ever_more_rarely_while_other_rows_would_wait(
    demo: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = InProcessEngine(demo, num_blocks=400)
    wait_until_ready(engine)
    os.kill(mask_process(engine), signal.SIGSTOP)
    grammars, waits = engine.runner.grammars, []
    monkeypatch.setattr(grammars, "_wait_for", lambda batch, computed, share: waits.append((len(batch.awaited), share)))
    constrained = engine.add(prompt_of(1), grammar=compile_one(GrammarKind.JSON_SCHEMA, ENDLESS), max_tokens=5)
    free = engine.add(prompt_of(2), max_tokens=50, ignore_eos=True)
    while free.finish_reason is None:
        engine.step()
    assert 2 <= sum(num_awaited for num_awaited, _ in waits) <= 12 and len(waits) >= 45
    for _ in range(3):
        engine.step()
    assert waits[-3:] == [(1, structured_output.ALONE_SHARE)] * 3, "no other row waits"
    monkeypatch.undo()
    os.kill(mask_process(engine), signal.SIGCONT)
    engine.run()
    assert constrained.num_output_tokens == 5


def test_a_grammar_that_crashes_its_process_fails_all_answers_of_its_request_and_no_other(demo: LoadedModel) -> None:
    grammar = compile_one(GrammarKind.JSON_SCHEMA, ENDLESS)
    engine = InProcessEngine(demo, num_blocks=400)
    leader = engine.add(prompt_of(1), grammar=grammar, max_tokens=30)
    ended = [leader, engine.add(prompt_of(1), leader=leader, grammar=grammar, max_tokens=30)]
    other = engine.add(prompt_of(2), grammar=grammar, max_tokens=30)
    while ended[1].num_output_tokens < 5:
        engine.step()
    states = engine.runner.grammars._states
    number = next(state.number for state in states.values() if state.assignment.slot == ended[1].slot)
    os.kill(mask_process(engine), signal.SIGSTOP)
    engine.runner.grammars._process._current[0] = number  # as the process does while it works on the sequence
    os.kill(mask_process(engine), signal.SIGSEGV)
    os.kill(mask_process(engine), signal.SIGCONT)
    engine.run()
    assert [each.finish_reason for each in ended] == [FinishReason.ERROR] * 2
    assert other.finish_reason is FinishReason.LENGTH


def test_requests_with_a_grammar_fail_where_the_mask_process_does_not_start(
    demo: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client.sys, "executable", "/bin/false")
    monkeypatch.setattr(client, "MAX_START_DELAY_S", 0.0)
    engine = InProcessEngine(demo, num_blocks=400)
    constrained = engine.add(prompt_of(1), grammar=compile_one(GrammarKind.JSON_SCHEMA, ENDLESS))
    free = engine.add(prompt_of(2), max_tokens=10, ignore_eos=True)
    engine.run()
    assert constrained.finish_reason is FinishReason.ERROR and free.finish_reason is FinishReason.LENGTH


def test_masks_are_used_for_the_tokens_and_drafts_that_they_were_computed_for() -> None:
    masks = GrammarMasks(DEMO_MODEL_PATH / "tokenizer.json", 2048, (2,), num_slots=1, max_drafts=4)
    state = masks._state(SlotAssignment(0, SamplingParams(max_tokens=9, grammar="")), 0)

    def answer(number: int, num_drafts: int, forced: tuple[int, ...] = ()) -> None:
        masks._take(Mask(state.number, number=number, num_drafts=num_drafts, forced=forced), state)

    assert state.ask((), ()).number == 1
    assert state.ask((), (10, 11)).number == 2
    answer(1, 2, forced=(10, 20))  # the process has begun to replace the masks behind these
    assert state.is_ready and state.is_asked and state.use_masks((10, 11)) == 1
    answer(2, 2)
    assert not state.is_ready, "it is about an earlier token"
    for drafts, num_masks in (((30, 31, 32), 3), ((30, 40), 2), ((50,), 1), ((), 1)):
        number = state.ask((7,), (30, 31, 32)).number
        answer(number, 2)
        assert state.is_ready and not state.is_asked and state.use_masks(drafts) == num_masks
    number = state.ask((7,), ()).number
    answer(number, 1, forced=(60, 61))
    assert state.use_masks((60, 61)) == 2, "the mask behind the second one was not computed"


def test_tokens_that_a_grammar_forces_remain_known_while_the_answer_has_them() -> None:
    masks = GrammarMasks(DEMO_MODEL_PATH / "tokenizer.json", 2048, (2,), num_slots=1, max_drafts=4)
    assignment = SlotAssignment(0, SamplingParams(max_tokens=9, grammar=""))
    assert masks.forced_tokens(assignment, 0, 4) == ()
    state = masks._state(assignment, 0)
    masks._take(Mask(state.number, number=state.ask((), ()).number, forced=(60, 61, 62, 63)), state)
    assert masks.forced_tokens(assignment, 0, 2) == (60, 61)
    assert masks.forced_tokens(assignment, 1, 4) == (61, 62, 63)
    state.use_masks(())
    state.ask((60, 61), ())
    state.is_asked = False
    assert masks.forced_tokens(assignment, 2, 4) == (62, 63)
    state.ask((5,), ())
    state.is_asked = False
    assert masks.forced_tokens(assignment, 3, 4) == (), "the answer has another token"
    other = SlotAssignment(0, assignment.sampling)
    assert masks.forced_tokens(other, 3, 4) == ()


def test_step_after_the_end_of_an_answer_reports_no_failure(demo: LoadedModel) -> None:
    engine = InProcessEngine(demo, max_steps_in_flight=2)
    grammar = compile_one(GrammarKind.REGEX, "(yes|no)!")
    sequences = [engine.add(prompt_of(number), grammar=grammar) for number in range(4)]
    engine.run()
    assert {text_of(sequence) for sequence in sequences} <= {"yes!", "no!"}
    assert engine.num_failures == 0


def test_added_tokens_that_are_text_match_as_text(tmp_path: Path) -> None:
    """Many vocabularies have line breaks and tags among their added tokens."""
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL_PATH / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken("\n\n", special=False), AddedToken("<think>", special=False)])
    tokenizer.add_special_tokens(["<|beyond|>"])  # more tokens than the model has logits
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    known = grammar_tokenizer(tmp_path / "tokenizer.json", 2050, [2])
    line_breaks, tag = tokenizer.token_to_id("\n\n"), tokenizer.token_to_id("<think>")
    assert (line_breaks, tag, tokenizer.token_to_id("<|beyond|>")) == (2048, 2049, 2050)

    def allows(kind: GrammarKind, text: str, token_id: int, after: str = "") -> bool:
        outcome = compile_grammar(CompileGrammar(kind, text), known)
        assert isinstance(outcome, Done)
        matcher = matcher_for(outcome.text, known)
        assert matcher.consume_tokens(tokenizer.encode(after, add_special_tokens=False).ids)
        return bool(matcher.compute_bitmask()[token_id // 8] >> token_id % 8 & 1)

    assert allows(GrammarKind.REGEX, "[^<]+", line_breaks) and not allows(GrammarKind.REGEX, "[^<]+", tag)
    assert not allows(GrammarKind.JSON_SCHEMA, '{"type": "string"}', line_breaks, after='"')
    # A tag's token is never used, and its text can be written all the same.
    less_than = tokenizer.token_to_id("<")
    for kind, text in ((GrammarKind.CHOICE, '["<think>"]'), (GrammarKind.REGEX, ".+")):
        assert allows(kind, text, less_than) and not allows(kind, text, tag)


def test_schema_with_properties_means_an_object() -> None:
    tokenizer = grammar_tokenizer(DEMO_MODEL_PATH / "tokenizer.json", 2048, [2])
    for schema in ('{"properties": {"a": {"type": "integer"}}}', '{"required": ["a"]}'):
        matcher = matcher_for(compile_one(GrammarKind.JSON_SCHEMA, schema), tokenizer)
        assert matcher.compute_ff_bytes().startswith(b"{")


def test_tokens_beyond_the_logits_are_left_out_with_the_merges_that_make_them() -> None:
    for vocab_size in (2047, 1948, 2112):  # the last is wider than the vocabulary, as padded logits are
        tokenizer = grammar_tokenizer(DEMO_MODEL_PATH / "tokenizer.json", vocab_size, [2])
        outcome = compile_grammar(CompileGrammar(GrammarKind.REGEX, "[a-z]+"), tokenizer)
        assert isinstance(outcome, Done)
        mask = matcher_for(outcome.text, tokenizer).compute_bitmask()
        assert any(mask) and int.from_bytes(mask, "little") >> min(vocab_size, 2048) == 0


@pytest.mark.parametrize("num_tokens", [31, 64, 1000])
def test_tokens_without_a_bit_get_minus_infinity_and_others_keep_their_logits(
    num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(structured_output, "LIMITS_AT_ONCE", 2 * num_tokens)  # several parts
    random = np.random.default_rng(0)
    bits = random.integers(-(2**31), 2**31, size=(5, -(-num_tokens // 32)), dtype=np.int32)
    logits = torch.from_numpy(random.normal(size=(5, num_tokens)).astype(np.float32))
    logits[1, 3] = -float("inf")
    expected = [
        [
            float(logits[row, token]) if bits[row, token // 32] >> token % 32 & 1 else -float("inf")
            for token in range(num_tokens)
        ]
        for row in range(5)
    ]
    before, exclusion = logits.clone(), structured_output._Exclusion(bits.shape[1])
    assert exclusion.apply(logits, bits, in_place=False).tolist() == expected
    assert torch.equal(logits, before)
    assert exclusion.apply(logits, bits, in_place=True) is logits and logits.tolist() == expected
