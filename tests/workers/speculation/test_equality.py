"""The contract of speculative decoding: with each drafter, tokens and logprobs are those of a runner without drafts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from servekit.protocol.messages import StepResult
from tests.support.drafters import HostileDrafter, OracleDrafter, RandomDrafter, WatchingDrafter
from tests.support.inprocess import InProcessEngine
from tests.support.little_memory import LittleMemory
from tests.support.tiny_models import ARCHITECTURES, VOCAB_SIZE
from tests.workers.test_token_identity import make_prompts, prepared
from workers.batch import Batch
from workers.loading.model_manager import LoadedModel
from workers.runner import model_runner
from workers.runner.interface import Pending
from workers.speculation.drafter import Drafter, DraftRequest, HiddenStates
from workers.speculation.ngram import NgramDrafter
from workers.speculation.speculator import Speculator

MAX_DRAFTS = 5
HOT: dict[str, Any] = {"temperature": 0.9, "seed": 5}
# One for each prompt, so that one step has rows of all kinds.
OPTIONS: list[dict[str, Any]] = [
    {},
    HOT,
    {"repetition_penalty": 1.4, "logprobs": 2},
    HOT | {"presence_penalty": 0.6, "frequency_penalty": 0.9},
    {"logprobs": 0, "prompt_logprobs": 1},
    {"bad_words": tuple((first, second) for first in range(3, 60) for second in (7, 8)), "logprobs": 1},
    {"min_tokens": 9, "ignore_eos": False, "stop_token_ids": tuple(range(3, 90))},
    HOT | {"top_k": 9, "top_p": 0.8, "seed": 6},
    HOT | {"min_p": 0.05, "typical_p": 0.7, "seed": 7, "logprobs": 1},
    {"logit_bias": ((5, 6.0), (9, -50.0)), "allowed_token_ids": tuple(range(4, 40))},
]
LENGTHS = [14, 6, 20, 9, 25, 12, 18, 17, 10, 16]

Answer = tuple[list[int], list[Any], list[Any]]


def play(engine: InProcessEngine) -> list[Answer]:
    """Tokens, prompt logprobs and logprobs of sequences with all kinds of options, which come one after the other."""
    prompts = make_prompts(VOCAB_SIZE)
    work = [
        {"prompt": prompt, "max_tokens": length, "ignore_eos": True} | options
        for prompt, length, options in zip(prompts, LENGTHS, OPTIONS, strict=True)
    ]
    sequences = []
    while work or engine.manager.has_work:
        if work and (engine.num_steps % 2 == 0 or not engine.manager.has_work):
            sequences.append(engine.add(**work.pop(0)))
        engine.step()
    return [(s.output_token_ids, list(s.prompt_logprobs), engine.logprobs[s.sequence_id]) for s in sequences]


@cache
def expected(name: str) -> list[Answer]:
    """What a runner without drafts answers, in a pool that is large enough."""
    return play(InProcessEngine(prepared(name)[0], num_blocks=200))


def texts(answers: list[Answer]) -> list[list[int]]:
    """Each prompt with its answer."""
    return [[*prompt, *tokens] for prompt, (tokens, _, _) in zip(make_prompts(VOCAB_SIZE), answers, strict=True)]


def assert_alike(answers: list[Answer], others: list[Answer]) -> None:
    for (tokens, *logprobs), (same, *also) in zip(answers, others, strict=True):
        assert tokens == same
        for ours, theirs in zip(logprobs, also, strict=True):
            assert len(ours) == len(theirs)
            for one, other in zip(ours, theirs, strict=True):
                assert (one is None) == (other is None)
                assert one is None or one.logprob == pytest.approx(other.logprob, abs=1e-4)
                assert one is None or len(one.top) == len(other.top)


class HalfRightDrafter(OracleDrafter):
    """Its first two drafts are right, the third one is wrong."""

    def __init__(self, of: list[list[int]]) -> None:
        super().__init__(of, num_right=2)


DRAFTERS: dict[str, Callable[[list[list[int]]], Drafter]] = {
    "ngram": lambda _: NgramDrafter(),
    "right": OracleDrafter,
    "half right": HalfRightDrafter,
    "random": lambda _: RandomDrafter(12),
    "hostile": lambda _: HostileDrafter(VOCAB_SIZE),
}


class EngineAhead(InProcessEngine):
    """Launches a step before the result of the one before it was read, as on a GPU."""

    def __init__(self, loaded: LoadedModel, **sizes: Any) -> None:
        self.pending: deque[Pending[StepResult]] = deque()
        super().__init__(loaded, max_steps_in_flight=2, **sizes)

    def step(self) -> None:
        self.num_steps += 1
        while (plan := self.manager.plan(0.0)) is not None:
            self.pending.append(self.runner.launch(plan))
        for token in self.manager.commit(self.pending.popleft().finish(), 0.0):
            self.logprobs[token.sequence.sequence_id].append(token.logprobs)
        self.manager.check()


Size = tuple[int, int, int, int, int]  # blocks, block size, tokens a step, slots, steps in flight
SIZES: list[Size] = [(200, 4, 64, 8, 1), (200, 1, 24, 8, 2), (12, 4, 64, 6, 2), (11, 4, 7, 6, 1), (40, 16, 64, 3, 2)]


def speculating(
    name: str, drafter: str, size: Size, engine: type[InProcessEngine] = InProcessEngine
) -> InProcessEngine:
    num_blocks, block_size, num_tokens, num_slots, num_in_flight = size
    fields = {} if engine is EngineAhead else {"max_steps_in_flight": num_in_flight}
    return engine(
        prepared(name)[0],
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_batched_tokens=num_tokens,
        max_num_seqs=num_slots,
        max_drafts=MAX_DRAFTS,
        drafter=DRAFTERS[drafter](texts(expected(name))),
        **fields,
    )


@pytest.mark.parametrize("size", [SIZES[1], SIZES[2]], ids=str)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_answers_are_those_without_drafts(drafter: str, size: Size) -> None:
    engine = speculating("llama", drafter, size)
    assert_alike(play(engine), expected("llama"))
    assert sum(engine.manager.draft_lengths.num_drafted) > 0
    if size[0] < 20:
        assert engine.manager.num_preemptions > 0, "the pool was meant to be too small"


@pytest.mark.parametrize("drafter", ["half right", "random"])
@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "demo"])
def test_answers_of_other_architectures_are_those_without_drafts(name: str, drafter: str) -> None:
    assert_alike(play(speculating(name, drafter, SIZES[2])), expected(name))


@pytest.mark.long
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("name", [*ARCHITECTURES, "demo"])
def test_answers_of_every_architecture_are_those_without_drafts(name: str, drafter: str) -> None:
    """Each architecture with each drafter, in another size for each drafter; llama in all sizes."""
    number = list(ARCHITECTURES).index(name) + list(DRAFTERS).index(drafter) if name in ARCHITECTURES else 0
    for size in SIZES if name == "llama" else [SIZES[number % len(SIZES)]]:
        assert_alike(play(speculating(name, drafter, size)), expected(name))


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_steps_that_are_launched_ahead_give_the_same(drafter: str) -> None:
    assert_alike(play(speculating("llama", drafter, SIZES[2], EngineAhead)), expected("llama"))


class LosingEngine(InProcessEngine):
    """Loses its worker twice. Sequences that were in flight get no drafts from then on; those that come later do."""

    make_drafter: Callable[[], Drafter]

    def step(self) -> None:
        super().step()
        if self.num_steps in (5, 19):
            self.lose_worker()
            self.runner.speculate(self.make_drafter())


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_workers_that_are_lost_change_nothing(drafter: str) -> None:
    engine = speculating("llama", drafter, SIZES[2], LosingEngine)
    assert isinstance(engine, LosingEngine)
    num_drafted = 0

    def count() -> Drafter:
        nonlocal num_drafted
        num_drafted = sum(engine.manager.draft_lengths.num_drafted)
        return DRAFTERS[drafter](texts(expected("llama")))

    engine.make_drafter = count
    assert_alike(play(engine), expected("llama"))
    assert engine.manager.epoch == 2
    assert num_drafted < sum(engine.manager.draft_lengths.num_drafted), "the third worker drafts, too"
    assert num_drafted or drafter == "ngram", "n-grams find nothing in the first tokens"


def test_a_launch_waits_for_the_steps_before_it_only_if_it_has_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    num_waits = 0
    settle_all = Speculator._settle_all

    def counting(self: Speculator) -> None:
        nonlocal num_waits
        num_waits += 1
        settle_all(self)

    monkeypatch.setattr(Speculator, "_settle_all", counting)
    engine = EngineAhead(prepared("llama")[0], num_blocks=200, max_drafts=MAX_DRAFTS, drafter=WatchingDrafter())
    sequences = [engine.add(prompt, max_tokens=12, ignore_eos=True) for prompt in make_prompts(VOCAB_SIZE)[:3]]
    for sequence in sequences:
        sequence.max_drafts = 0
    while min(sequence.num_output_tokens for sequence in sequences) < 6:
        engine.step()
    assert num_waits == 0
    sequences[0].max_drafts = MAX_DRAFTS
    engine.run()
    assert num_waits > 0


def test_right_drafts_save_steps() -> None:
    sizes = {"num_blocks": 200, "max_num_seqs": 1}
    prompt, answer = make_prompts(VOCAB_SIZE)[1], 24
    plain = InProcessEngine(prepared("llama")[0], **sizes)
    sequence = plain.add(prompt, max_tokens=answer, ignore_eos=True)
    plain.run()
    drafter = OracleDrafter([[*prompt, *sequence.output_token_ids]])
    engine = InProcessEngine(prepared("llama")[0], **sizes, max_drafts=5, drafter=drafter)
    again = engine.add(prompt, max_tokens=answer, ignore_eos=True)
    engine.run()
    assert again.output_token_ids == sequence.output_token_ids
    assert engine.num_steps < plain.num_steps / 3
    assert again.num_accepted_tokens == answer - engine.num_steps


def test_prompt_lookup_saves_steps_where_a_text_repeats_itself() -> None:
    """A bias leaves three tokens, so the answer soon repeats itself."""
    sizes = {"num_blocks": 200, "max_num_seqs": 1}
    options: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True, "allowed_token_ids": (40, 41, 42)}
    plain = InProcessEngine(prepared("llama")[0], **sizes)
    sequence = plain.add([5, 6, 7], **options)
    plain.run()
    engine = InProcessEngine(prepared("llama")[0], **sizes, max_drafts=5, drafter=NgramDrafter())
    again = engine.add([5, 6, 7], **options)
    engine.run()
    assert again.output_token_ids == sequence.output_token_ids
    assert engine.num_steps < plain.num_steps / 2


def test_drafter_knows_prompts_that_are_in_the_prefix_cache() -> None:
    """Their tokens are in no chunk. WatchingDrafter asserts that no token is missing."""
    drafter = WatchingDrafter()
    engine = InProcessEngine(prepared("llama")[0], num_blocks=200, max_drafts=3, drafter=drafter)
    for _ in range(2):
        for prompt in make_prompts(VOCAB_SIZE)[:4]:
            engine.add(prompt, max_tokens=6)
        engine.run()
    assert engine.manager.num_cached_tokens > 0 and drafter.num_requests > 0


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_forks_give_the_tokens_without_drafts(drafter: str) -> None:
    loaded, prompt = prepared("llama")[0], make_prompts(VOCAB_SIZE)[1]

    def answers(**speculation: Any) -> list[list[int]]:
        engine = InProcessEngine(loaded, num_blocks=100, max_steps_in_flight=2, **speculation)
        leader = engine.add(prompt, max_tokens=15, ignore_eos=True)
        forks = [
            engine.add(prompt, leader, max_tokens=15, ignore_eos=True, temperature=1.0, seed=seed) for seed in range(4)
        ]
        engine.run()
        assert engine.num_copies > 0
        return [sequence.output_token_ids for sequence in (leader, *forks)]

    plain = answers()
    made = DRAFTERS[drafter]([[*prompt, *answer] for answer in plain])
    assert answers(max_drafts=4, drafter=made) == plain


@pytest.mark.parametrize("max_tokens", [20, 16])
@pytest.mark.parametrize("drafter", ["right", "half right", "hostile"])
def test_steps_that_do_not_fit_into_memory_give_the_same_in_parts(
    drafter: str, max_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = expected("llama")
    monkeypatch.setattr(model_runner, "release_memory", lambda: None)
    memory = LittleMemory(monkeypatch, max_tokens)
    assert_alike(play(speculating("llama", drafter, SIZES[0])), answers)
    assert memory.num_failures > 0


class StateReader(WatchingDrafter):
    """Checks that the hidden states that it gets are those that the output head reads."""

    def __init__(self, loaded: LoadedModel, *, of_all_tokens: bool) -> None:
        super().__init__()
        self.hidden_states = HiddenStates(of_all_tokens)
        self.num_seen = 0
        self._head: Any = loaded.model.get_output_embeddings()
        self._newest: dict[tuple[int, int], int] = {}  # by slot and position: the token that its state predicts

    def observe(self, batch: Batch, hidden_states: torch.Tensor) -> None:
        assert self.hidden_states is not None
        num_rows = len(batch.input_ids) if self.hidden_states.of_all_tokens else len(batch.sampling)
        assert len(hidden_states) == num_rows
        rows = hidden_states[batch.logits_indices] if self.hidden_states.of_all_tokens else hidden_states
        for row, token_id in zip(batch.sampling, self._head(rows).argmax(dim=-1).tolist(), strict=True):
            self._newest[row.slot, row.position] = token_id
            self.num_seen += 1

    def propose(self, requests: list[DraftRequest]) -> list[tuple[int, ...]]:
        for request in requests:
            newest = self.tokens[request.slot][-1]
            assert self._newest[request.slot, request.num_tokens - 1] == newest, "greedy: the head's largest logit"
        return [(self.tokens[request.slot][-1],) * request.max_drafts for request in requests]


@pytest.mark.parametrize("name", ["llama", "gpt2", "demo"])
@pytest.mark.parametrize("of_all_tokens", [False, True])
def test_drafter_gets_the_hidden_states_from_which_tokens_were_chosen(name: str, of_all_tokens: bool) -> None:
    loaded = prepared(name)[0]
    prompts = make_prompts(VOCAB_SIZE)[:5]
    plain = InProcessEngine(loaded, num_blocks=100)
    reader = StateReader(loaded, of_all_tokens=of_all_tokens)
    watched = InProcessEngine(loaded, num_blocks=100, max_drafts=3, drafter=reader)
    answers = []
    for engine in (plain, watched):
        sequences = [
            engine.add(prompt, max_tokens=8, prompt_logprobs=number % 2 or None)
            for number, prompt in enumerate(prompts)
        ]
        engine.run()
        answers.append([sequence.output_token_ids for sequence in sequences])
    assert answers[0] == answers[1]
    assert reader.num_seen > 0
