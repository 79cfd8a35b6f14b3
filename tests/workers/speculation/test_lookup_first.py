"""Claims about prompt lookup before another drafter: the better of both makes the drafts, and no token changes."""

from __future__ import annotations

import random

import pytest

from servekit.protocol.messages import SlotAssignment, StepPlan
from servekit.protocol.sampling_params import SamplingParams
from tests.support.drafters import OracleDrafter, RandomDrafter, WatchingDrafter
from tests.support.inprocess import InProcessEngine
from tests.support.tiny_models import VOCAB_SIZE
from tests.workers.speculation.test_draft_model import drafting
from tests.workers.test_token_identity import make_prompts, prepared, serve_with_joins_and_leaves
from workers.speculation.drafter import DraftRequest
from workers.speculation.lookup_first import ASK_EVERY, MIN_ACCEPTANCE, LookupFirst, LookupFirstDrafter

MAX_DRAFTS = 4
WRONG = 1000  # a token that no text here has


class Constant(WatchingDrafter):
    """Always drafts the same token."""

    def drafts_behind(self, tokens: list[int], max_drafts: int) -> tuple[int, ...]:
        return (WRONG,) * max_drafts


class Late(Constant):
    """Makes no drafts when it is asked for the first times."""

    def __init__(self, num_late: int) -> None:
        super().__init__()
        self._num_late = num_late

    def drafts_behind(self, tokens: list[int], max_drafts: int) -> tuple[int, ...]:
        return super().drafts_behind(tokens, max_drafts) if self.num_requests >= self._num_late else ()


def play(drafter: LookupFirstDrafter, text: list[int], num_known: int) -> int:
    """Let it draft a text of which so many tokens are known, and return in how many steps it was complete."""
    drafter.begin(StepPlan(0, 0, (SlotAssignment(0, SamplingParams(max_tokens=1)),), ()))
    drafter.commit(0, 0, tuple(text[:num_known]))
    num_steps = 0
    while num_known < len(text):
        drafter.begin(StepPlan(0, 0, (), ()))
        requests = [DraftRequest(0, num_known, MAX_DRAFTS)]
        drafter.prepare(requests)
        (drafts,) = drafter.propose(requests)
        count = 1
        for draft, token_id in zip(drafts, text[num_known:], strict=False):
            if draft != token_id:
                break
            count += 1
        tokens = tuple(text[num_known : num_known + count])
        drafter.commit(0, num_known, tokens)
        num_known += len(tokens)
        num_steps += 1
    return num_steps


def repetitive(num_tokens: int) -> list[int]:
    return [number % 12 for number in range(num_tokens)]


def unpredictable(num_tokens: int) -> list[int]:
    """Single tokens return all the time, and so do pairs, but what follows them is another token each time."""
    rng = random.Random(0)
    return [rng.randrange(8) for _ in range(num_tokens)]


def test_where_the_text_repeats_itself_the_other_drafter_is_not_asked() -> None:
    other = Constant()
    assert play(LookupFirstDrafter(other), repetitive(400), 20) <= 1 + 380 / (1 + MAX_DRAFTS)
    assert other.num_requests == 0


def test_where_lookup_is_mostly_wrong_the_other_drafter_makes_the_drafts() -> None:
    text = unpredictable(600)
    oracle = OracleDrafter([text])
    num_steps = play(LookupFirstDrafter(oracle), text, 20)
    assert num_steps < 1.2 * 580 / (1 + MAX_DRAFTS) and oracle.num_requests > 0.8 * num_steps


def test_lookup_is_used_again_as_soon_as_it_is_better_although_the_other_one_was_asked() -> None:
    """What it finds is compared in each step. The other one is right once in each step."""
    text = unpredictable(300) + repetitive(400)
    oracle = OracleDrafter([text], num_right=1)
    drafter = LookupFirstDrafter(oracle)
    play(drafter, text[:300], 20)
    before = oracle.num_requests
    drafter = LookupFirstDrafter(oracle)
    num_steps = play(drafter, text, 20)
    assert oracle.num_requests - before < before + 40
    assert num_steps < 280 / 1.8 + 1.3 * 400 / (1 + MAX_DRAFTS)


def test_a_drafter_that_is_always_wrong_is_asked_now_and_then() -> None:
    rng = random.Random(1)
    text = [rng.randrange(WRONG) for _ in range(600)]  # lookup finds next to nothing
    other = Constant()
    num_steps = play(LookupFirstDrafter(other), text, 20)
    assert num_steps / (2 * ASK_EVERY) < other.num_requests < num_steps / ASK_EVERY + 12


def test_an_ask_that_brought_no_drafts_is_repeated_in_the_next_step() -> None:
    """A draft model makes none while it makes up for steps without drafts."""
    rng = random.Random(3)
    text = [rng.randrange(WRONG) for _ in range(400)]
    none, wrong = Late(num_late=10**6), Late(num_late=2)
    for other in (none, wrong):
        drafter = LookupFirstDrafter(other)
        drafter._means.other.mean = MIN_ACCEPTANCE / 2
        play(drafter, text[: 20 + 2 * ASK_EVERY], 20)
    assert none.num_requests >= ASK_EVERY and wrong.num_requests == 3


def test_a_new_sequence_is_expected_to_be_like_the_others() -> None:
    rng = random.Random(2)
    other = Constant()
    drafter = LookupFirstDrafter(other)
    for number in range(8):
        before = other.num_requests
        play(drafter, [rng.randrange(WRONG) for _ in range(60)], 20)
        assert number < 2 or other.num_requests - before <= 40 / ASK_EVERY + 1


@pytest.mark.parametrize("draft", ["itself", "smaller"])
def test_tokens_are_those_of_generate_with_a_draft_model_behind_lookup(draft: str) -> None:
    """In a pool that is too small, so that sequences are preempted and computed again."""
    loaded, answers = prepared("llama")
    engine = InProcessEngine(
        loaded,
        num_blocks=10,
        block_size=4,
        max_num_seqs=6,
        max_num_batched_tokens=24,
        max_drafts=MAX_DRAFTS,
        loaded_drafter=LookupFirst(drafting("llama", draft)),
    )
    sequences = serve_with_joins_and_leaves(engine, make_prompts(VOCAB_SIZE))
    assert [sequence.output_token_ids for sequence in sequences] == answers
    assert engine.manager.num_preemptions > 0 and sum(engine.manager.draft_lengths.num_drafted) > 0
    assert isinstance(engine.runner.drafter, LookupFirstDrafter)


def test_it_has_what_the_runner_asks_of_the_other_drafter() -> None:
    other = RandomDrafter(VOCAB_SIZE)
    other.is_same_on_all_ranks = True
    drafter = LookupFirstDrafter(other)
    assert drafter.is_same_on_all_ranks and drafter.hidden_states is None
    loaded_drafter = drafting("llama", "itself")
    assert LookupFirst(loaded_drafter).bytes_per_block == loaded_drafter.bytes_per_block > 0
