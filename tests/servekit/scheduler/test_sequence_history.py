"""Claims about why a sequence spent its time as it did, as the workload manager reports it."""

from __future__ import annotations

from itertools import pairwise

from servekit.protocol.messages import StepPlan
from servekit.protocol.sampling_params import SamplingParams
from servekit.requests.time_causes import TimeCause as Cause
from servekit.scheduler.commands import AddSequence
from servekit.scheduler.sequence import FinishReason, Sequence
from servekit.scheduler.sequence_history import MAX_QUEUE_STATES, MAX_SPANS, ManagerLog, SequenceHistory, Span
from servekit.scheduler.workload_manager import WorkloadManager
from servekit.simulation.worker import SimulatedWorker
from tests.support.scheduler import add_prompt, add_sequence, make_manager, make_prompt, make_worker


def play(manager: WorkloadManager, worker: SimulatedWorker, start_s: float, num_steps: int = 1000) -> float:
    """Execute steps of one second each until nothing is left to do. Returns the time of the end."""
    plans: list[StepPlan] = []
    now_s = start_s
    for _ in range(num_steps):
        while (plan := manager.plan(now_s)) is not None:
            plans.append(plan)
        if not plans:
            break
        now_s += 1.0
        manager.commit(worker.execute(plans.pop(0)), now_s)
    return now_s


def causes(sequence: Sequence, end_s: float) -> list[tuple[Cause, float]]:
    """(cause, duration) of all spans; they follow each other from the arrival to the end."""
    spans = sequence.history.spans(end_s)
    assert spans[0].start_s == sequence.arrival_s and spans[-1].end_s == end_s
    assert all(one.end_s == other.start_s for one, other in pairwise(spans))
    return [(span.cause, span.end_s - span.start_s) for span in spans]


def queue_causes(span: Span) -> list[tuple[Cause | None, str, float]]:
    """(cause, rule, until when) of the parts of a span in the queue."""
    assert span.queue is not None
    parts = span.queue.between(span.start_s, span.end_s)
    return [(None, "", until_s) if state is None else (state.cause, state.rule, until_s) for state, until_s in parts]


def test_a_sequence_alone_waits_computes_its_prompt_in_chunks_and_decodes() -> None:
    manager = make_manager(max_steps_in_flight=1)
    sequence = add_sequence(manager, 0, prompt_length=70, max_tokens=5, ignore_eos=True)
    end_s = play(manager, make_worker(manager), 2.0)
    assert causes(sequence, end_s) == [(Cause.QUEUE, 2.0), (Cause.PREFILL, 3.0), (Cause.DECODE, 4.0)]
    wait, prefill, decode = sequence.history.spans(end_s)
    assert queue_causes(wait) == [(None, "", 2.0)]  # nothing was known before the first plan
    assert (prefill.num_steps, prefill.num_tokens, prefill.num_others) == (3, 70, 0)
    assert (decode.num_steps, decode.num_others, decode.num_prefill_tokens) == (4, 0, 0)


def test_what_shares_the_steps_is_counted() -> None:
    manager = make_manager(max_steps_in_flight=1)
    first = add_sequence(manager, 0, prompt_length=4, max_tokens=9, ignore_eos=True)
    worker = make_worker(manager)
    now_s = play(manager, worker, 0.0, num_steps=3)
    add_sequence(manager, 1, prompt_length=6, max_tokens=9, ignore_eos=True)
    end_s = play(manager, worker, now_s)
    decode = first.history.spans(end_s)[-1]
    assert decode.cause is Cause.DECODE and decode.num_steps == 8
    assert decode.num_others == 6 and decode.num_prefill_tokens == 6


def test_the_queue_says_whether_slots_memory_tokens_or_admissions_are_lacking() -> None:
    for limits, expected, rule in (
        ({"max_num_seqs": 1}, Cause.SLOTS, "max_num_seqs"),
        ({"num_blocks": 8, "max_model_len": 32}, Cause.MEMORY, "kv_blocks"),
        ({"max_num_batched_tokens": 8}, Cause.STEP_TOKENS, "max_num_batched_tokens"),
        ({"itl_target_s": 1e-9}, Cause.STEP_TOKENS, "itl_target_ms"),
        ({"max_admissions_per_step": 1}, Cause.ADMISSION_RATE, "max_admissions_per_step"),
    ):
        manager = make_manager(max_steps_in_flight=1, **limits)
        prompts = [make_prompt(number, 12) for number in range(3)]
        sampling = SamplingParams(max_tokens=12, ignore_eos=True)
        third = [add_prompt(manager, number, prompt, sampling) for number, prompt in enumerate(prompts)][-1]
        if rule == "itl_target_ms":
            manager.prefill_limiter.observe(12, 0, 1.0)
            manager.prefill_limiter.observe(12, 1, 1.0)
        play(manager, make_worker(manager), 0.0)
        wait = third.history.spans(1e9)[0]
        found = queue_causes(wait)
        assert (expected, rule) in [(cause, rule) for cause, rule, _ in found], (rule, found)


def test_the_first_in_the_queue_is_named_and_an_empty_one_is_not() -> None:
    manager = make_manager(max_num_seqs=1, max_steps_in_flight=1)
    for number in range(3):
        add_sequence(manager, number, max_tokens=4, ignore_eos=True)
    play(manager, make_worker(manager), 0.0)
    states = [state for state, _ in manager.log.between(0.0, 1e9)]
    assert states[0] is not None and (states[0].cause, states[0].first_id) == (Cause.SLOTS, 1)
    assert states[-1] is not None and (states[-1].cause, states[-1].first_id) == (Cause.NEXT_STEP, None)


def test_a_preempted_sequence_names_the_other_one_and_computes_again() -> None:
    manager = make_manager(is_reckless=True, num_blocks=9, max_model_len=36, max_steps_in_flight=1)
    first = add_sequence(manager, 0, prompt_length=8, max_tokens=20, ignore_eos=True)
    second = add_sequence(manager, 1, prompt_length=8, max_tokens=20, ignore_eos=True)
    end_s = play(manager, make_worker(manager), 0.0)
    assert second.num_preemptions and not first.num_preemptions
    found = causes(second, end_s)
    assert [cause for cause, _ in found] == [
        Cause.PREFILL,
        Cause.DECODE,
        Cause.MEMORY,  # nothing is behind it that it could preempt
        Cause.PREEMPTED,
        Cause.RECOMPUTE,
        Cause.DECODE,
    ]
    span = second.history.spans(end_s)[3]
    assert (span.behind_id, span.rule) == (0, "kv_blocks")


def test_a_lost_worker_costs_what_was_in_flight_and_the_wait_for_another_one() -> None:
    manager = make_manager(max_steps_in_flight=1)
    sequence = add_sequence(manager, 0, prompt_length=8, max_tokens=20, ignore_eos=True)
    now_s = play(manager, make_worker(manager), 0.0, num_steps=4)
    assert manager.plan(now_s + 0.5) is not None
    manager.restart()
    end_s = play(manager, make_worker(manager), now_s + 10.0)
    assert [cause for cause, _ in causes(sequence, end_s)] == [
        Cause.PREFILL,
        Cause.DECODE,
        Cause.WORKER_LOSS,
        Cause.QUEUE,
        Cause.RECOMPUTE,
        Cause.DECODE,
    ]
    lost, wait = sequence.history.spans(end_s)[2:4]
    assert lost.end_s - lost.start_s == 0.5
    assert queue_causes(wait) == [(Cause.WORKER_LOSS, "worker_lost", now_s + 10.0)]


def test_a_sequence_that_moves_keeps_its_history() -> None:
    source, target = make_manager(max_steps_in_flight=1), make_manager(max_steps_in_flight=1)
    old = add_sequence(source, 0, prompt_length=8, max_tokens=20, ignore_eos=True)
    now_s = play(source, make_worker(source), 0.0, num_steps=4)
    target.plan(now_s + 1.0)
    (command,) = source.withdraw(None)
    moved = target.add(command)
    end_s = play(target, make_worker(target), now_s + 3.0)
    assert moved.history is old.history
    assert causes(moved, end_s)[:5] == [
        (Cause.PREFILL, 1.0),
        (Cause.DECODE, 3.0),
        (Cause.WORKER_LOSS, 1.0),
        (Cause.QUEUE, 2.0),
        (Cause.RECOMPUTE, 1.0),
    ]


def test_a_fork_waits_for_the_prompt_of_its_leader() -> None:
    manager = make_manager(max_steps_in_flight=1)
    prompt = make_prompt(0, 40)
    add_prompt(manager, 0, prompt, SamplingParams(max_tokens=4, ignore_eos=True))
    fork = add_prompt(manager, 1, prompt, SamplingParams(max_tokens=4, ignore_eos=True), leader_id=0)
    end_s = play(manager, make_worker(manager), 0.0)
    assert causes(fork, end_s)[0][0] is Cause.SHARED_PROMPT


def test_a_decode_that_finds_no_block_waits_for_memory() -> None:
    """Two steps in flight: the block of the one that is preempted is fenced until the older step is done."""
    manager = make_manager(is_reckless=True, num_blocks=9, max_model_len=36)
    sequences = [add_sequence(manager, number, prompt_length=8, max_tokens=20, ignore_eos=True) for number in range(3)]
    end_s = play(manager, make_worker(manager), 0.0)
    found = [span for each in sequences for span in each.history.spans(end_s) if span.cause is Cause.MEMORY]
    assert found and {span.rule for span in found} == {"kv_blocks"}
    for each in sequences:
        causes(each, end_s)


def test_decodes_wait_when_a_step_has_too_few_tokens() -> None:
    manager = make_manager(max_steps_in_flight=1)
    sequences = [add_sequence(manager, number, prompt_length=2, max_tokens=8, ignore_eos=True) for number in range(4)]
    worker = make_worker(manager)
    now_s = play(manager, worker, 0.0, num_steps=2)
    manager.step_token_limit = 2  # as after a step that ran out of memory
    now_s = play(manager, worker, now_s, num_steps=1)
    assert causes(sequences[3], now_s)[-1] == (Cause.STEP_TOKENS, 1.0)


def test_prompts_wait_when_a_step_has_too_few_tokens() -> None:
    manager = make_manager(max_steps_in_flight=1, scheduling_policy="shortest")
    worker = make_worker(manager)
    prompts = [add_sequence(manager, 0, prompt_length=100)]
    play(manager, worker, 0.0, num_steps=1)
    prompts.append(add_sequence(manager, 1, prompt_length=60))
    play(manager, worker, 1.0, num_steps=1)
    assert manager.num_running == 2
    manager.step_token_limit = 1  # as after a step that ran out of memory
    play(manager, worker, 2.0, num_steps=1)
    assert (Cause.STEP_TOKENS, 1.0) in [causes(sequence, 3.0)[-1] for sequence in prompts]


def test_sequences_wait_for_a_suspect_that_runs_alone() -> None:
    manager = make_manager(max_steps_in_flight=1)
    add_sequence(manager, 0, prompt_length=40, max_tokens=30, ignore_eos=True)
    now_s = play(manager, make_worker(manager), 0.0, num_steps=1)
    manager.plan(now_s)
    manager.restart()
    manager.plan(now_s)
    manager.restart()  # twice in flight when the worker was lost: from now on it runs alone
    assert manager.quarantine
    bystander = add_sequence(manager, 1, max_tokens=4, ignore_eos=True)
    end_s = play(manager, make_worker(manager), now_s)
    wait = bystander.history.spans(end_s)[0]
    assert Cause.QUARANTINE in [cause for cause, _, _ in queue_causes(wait)]


def test_a_sequence_that_ended_keeps_the_counts_of_its_end() -> None:
    manager = make_manager(max_steps_in_flight=1)
    first = add_sequence(manager, 0, max_tokens=30, ignore_eos=True)
    add_sequence(manager, 1, max_tokens=60, ignore_eos=True)
    worker = make_worker(manager)
    now_s = play(manager, worker, 0.0, num_steps=5)
    manager.finish(0, FinishReason.ABORT)
    play(manager, worker, now_s)
    assert first.history.spans(now_s)[-1].num_steps == 4


def test_the_first_state_of_the_queue_is_kept_for_a_while() -> None:
    log = ManagerLog()
    for number in range(2 * MAX_QUEUE_STATES):
        log.now_s = float(number)
        log.note(Cause.SLOTS, str(number))
    oldest_s = float(MAX_QUEUE_STATES)  # the older half was removed
    known = list(log.between(0.0, oldest_s + 5.0))
    assert known[0] == (None, oldest_s) and known[1][0] is not None and known[-1][1] == oldest_s + 5.0


def test_many_spans_are_joined_without_gaps() -> None:
    log = ManagerLog()
    history = SequenceHistory(0.0, log)
    for number in range(3 * MAX_SPANS):
        log.now_s = float(number + 1)
        history.left_out(number + 0.25, Cause.MEMORY if number % 2 else Cause.STEP_TOKENS, "", log.counts)
    spans = history.spans(log.now_s)
    assert history.num_spans == len(spans) <= MAX_SPANS
    assert spans[0].start_s == 0.0 and spans[-1].end_s == log.now_s
    assert all(one.end_s == other.start_s for one, other in pairwise(spans))


def test_a_sequence_that_came_from_elsewhere_without_its_history_has_one_from_now_on() -> None:
    manager = make_manager()
    source = make_manager()
    add_sequence(source, 0, max_tokens=20, ignore_eos=True)
    play(source, make_worker(source), 0.0, num_steps=3)
    (command,) = source.withdraw(None)
    assert command.progress is not None
    fields = {name: getattr(command, name) for name in command.__struct_fields__}
    progress = {name: getattr(command.progress, name) for name in command.progress.__struct_fields__}
    fields["progress"] = type(command.progress)(**(progress | {"history": None}))
    moved = manager.add(AddSequence(**fields))
    end_s = play(manager, make_worker(manager), 5.0)
    assert causes(moved, end_s)[0] == (Cause.QUEUE, 5.0)
