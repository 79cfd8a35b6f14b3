"""Claims about banned tokens, against transformers' processors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList, NoBadWordsLogitsProcessor, PrefixConstrainedLogitsProcessor

from servekit.protocol.messages import SlotAssignment
from servekit.protocol.sampling_params import SamplingParams
from tests.support.inprocess import InProcessEngine
from tests.workers.sampling.test_logprobs import make_prompts, prepared
from workers.batch import SamplingRow, SlotTable
from workers.sampling.sampler import sample
from workers.sampling.token_bans import _flat, ban

INFINITY = float("inf")
VOCAB = 12


def make_table(histories: list[list[int]]) -> SlotTable:
    """A prompt of one token and an answer in each slot; the cells behind hold tokens of a former sequence."""
    table = SlotTable(len(histories), max_model_len=9, num_blocks=4, block_size=4, device=torch.device("cpu"))
    table.token_ids.fill_(3)
    for slot, history in enumerate(histories):
        first = slot * table.row_length
        table.token_ids[first : first + len(history)] = torch.tensor(history, dtype=torch.int32)
    return table


def row(slot: int, num_tokens: int, **options: Any) -> SamplingRow:
    return SamplingRow(SamplingParams(max_tokens=9, **options), num_tokens, slot, num_tokens - 1)


def logits_of(num_rows: int) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(0))


def allowed_in(logits: torch.Tensor) -> list[list[int]]:
    return [(one > -INFINITY).nonzero().flatten().tolist() for one in logits]


def test_bans_equal_those_of_transformers_in_any_batch() -> None:
    histories = [[5, 6, 7], [3, 3, 3], [7], [5, 7, 6, 5], [3, 5], [1, 2, 5, 6]]
    bad = [((5, 6, 7, 8), (6, 7, 9), (7, 1), (3,)), (), ((7, 1), (3, 7, 2)), ((6, 5, 5), (5, 6), (5, 7)), (), ((6, 3),)]
    allowed: list[tuple[int, ...]] = [(), (2, 4), (1, 7, 11), (5, 6, 7, 8), (), ()]
    table, logits = make_table(histories), logits_of(6)
    rows = [
        row(slot, len(history), bad_words=bad[slot], allowed_token_ids=allowed[slot])
        for slot, history in enumerate(histories)
    ]
    before = logits.clone()
    ours = ban(logits, rows, table)
    assert torch.equal(logits, before), "logprobs still need the raw logits"
    for slot, history in enumerate(histories):
        processors = LogitsProcessorList()
        if allowed[slot]:
            processors.append(PrefixConstrainedLogitsProcessor(lambda _, __, slot=slot: list(allowed[slot]), 1))
        if bad[slot]:
            processors.append(NoBadWordsLogitsProcessor([list(word) for word in bad[slot]]))
        expected = processors(torch.tensor([history]), logits[slot : slot + 1].clone())
        assert torch.equal(ours[slot : slot + 1], expected)
    assert torch.equal(ban(logits.flip(0), rows[::-1], table), ours.flip(0))
    assert ban(logits, [rows[4]] * 6, table) is logits


def test_words_of_all_answers_to_one_request_are_prepared_together() -> None:
    """128 answers with 64 words each took longer than the model's step, because each word was prepared by itself."""
    words = ((5, 6, 7), (7, 1))
    table, rows = make_table([[5, 6]] * 8), [row(slot, 2, bad_words=words) for slot in range(8)]
    _flat.cache_clear()
    assert allowed_in(ban(logits_of(8), rows, table)) == [[token for token in range(VOCAB) if token != 7]] * 8
    calls = _flat.cache_info()
    assert calls.hits + calls.misses == 1


def test_bad_word_may_begin_in_the_prompt_and_needs_its_whole_beginning() -> None:
    table = make_table([[5, 6], [6]])
    words = ((5, 6, 1), (4, 5, 6, 2), (3, 6, 4), (6, 6, 2), (5, 5, 6, 3), (6, 9))
    rows = [row(0, 2, bad_words=words), row(1, 1, bad_words=words)]
    ours = allowed_in(ban(logits_of(2), rows, table))
    assert [sorted({*range(VOCAB)} - {*left}) for left in ours] == [[1, 9], [9]]


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({"allowed_token_ids": (4, 2), "bad_words": ((2,), (4,))}, [2, 4]),
        ({"allowed_token_ids": (4, 2), "bad_words": ((2,),)}, [4]),
        ({"allowed_token_ids": (7,), "min_tokens": 9}, [7]),
        ({"allowed_token_ids": (7, 8), "min_tokens": 9}, [8]),
        ({"bad_words": tuple((i,) for i in range(VOCAB))}, [*range(VOCAB)]),
        ({"bad_words": ((VOCAB,), (2**31 - 1,), (3, 2**31 - 1))}, [*range(VOCAB)]),
        ({"allowed_token_ids": (1, VOCAB, 2**31 - 1)}, [1]),
        ({"allowed_token_ids": (VOCAB,), "bad_words": ((0,),)}, [*range(1, VOCAB)]),
    ],
)
def test_allowed_tokens_are_left_where_bans_would_leave_none(options: dict[str, Any], left: list[int]) -> None:
    table = make_table([[3]])
    table.assign(
        SlotAssignment(0, SamplingParams(max_tokens=9, **options), prompt_length=1, stop_token_ids=(7, 2**31 - 1))
    )
    assert allowed_in(ban(logits_of(1), [row(0, 1, **options)], table)) == [left]


@pytest.mark.parametrize("stop_token_ids", [(), (2, 10, 2**31 - 1)])
def test_no_stop_token_is_chosen_before_min_tokens(
    stop_token_ids: tuple[int, ...],
) -> None:
    table = SlotTable(num_slots=1, max_model_len=9, num_blocks=4, block_size=4, device=torch.device("cpu"))
    params = SamplingParams(max_tokens=9, min_tokens=2)
    table.assign(SlotAssignment(0, params, prompt_length=3, stop_token_ids=stop_token_ids))
    logits = logits_of(1)[:, :10]
    early, late = (SamplingRow(params, 3 + outputs, 0, outputs) for outputs in (1, 2))
    forbidden = torch.isinf(ban(logits, [early], table))[0].nonzero().flatten().tolist()
    assert forbidden == [token_id for token_id in stop_token_ids if token_id < 10]
    assert ban(logits, [late], table) is logits


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.0}, {}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.3}, {"typical_p": 0.5}]
)
def test_banned_tokens_are_never_drawn_with_any_filter(sampling: dict[str, Any]) -> None:
    rows = [row(0, position, allowed_token_ids=(2, 9), seed=1, **sampling) for position in range(1, 500)]
    drawn = sample(ban(logits_of(1).expand(len(rows), -1), rows, make_table([[3]])), rows)
    assert {*drawn.tolist()} <= {2, 9}


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
@pytest.mark.parametrize(("num_blocks", "num_rounds"), [(12, 1), (100, 2)])
def test_bad_words_give_the_tokens_of_generate(num_blocks: int, num_rounds: int, max_steps_in_flight: int) -> None:
    """Chunked, preempted in a small pool, cached in a large one. Each prompt's bans are words of its own answer."""
    loaded, model = prepared("llama")
    prompts = make_prompts([23, 12, 17, 9, 30, 5])

    def generate(prompt: list[int], **options: Any) -> list[int]:
        with torch.inference_mode():
            mask = torch.ones(1, len(prompt), dtype=torch.int64)
            length = {"max_new_tokens": 10, "min_new_tokens": 10}
            output = model.generate(torch.tensor([prompt]), attention_mask=mask, do_sample=False, **length, **options)
        return output[0, len(prompt) :].tolist()

    engine = InProcessEngine(
        loaded, num_blocks=num_blocks, max_num_batched_tokens=16, max_steps_in_flight=max_steps_in_flight
    )
    for _ in range(num_rounds):
        sequences, expected = [], []
        for prompt in prompts:
            said = generate(prompt)
            # The last two of the prompt and what follows; two later ones; one wherever it is. (To ban the end of
            # sequence by itself is what transformers ignores and we do not: hence `min_tokens`.)
            words = ((*prompt[-2:], said[0]), tuple(said[2:4]), (said[6],))
            sequences.append(engine.add(prompt, max_tokens=10, min_tokens=10, bad_words=words))
            expected.append(generate(prompt, bad_words_ids=[list(word) for word in words]))
            assert expected[-1] != said
        engine.run()
        assert [sequence.output_token_ids for sequence in sequences] == expected
    assert engine.manager.num_preemptions if num_rounds == 1 else engine.manager.num_cached_tokens
