"""Scenarios from seeds, and the smallest part of a scenario that still fails."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import TypeVar

import msgspec

from servekit.protocol.sampling_params import SamplingParams
from servekit.scheduler.scheduler_config import SchedulerConfig
from servekit.simulation.scenario import Arrival, Fault, Scenario
from servekit.simulation.service import Simulation
from servekit.simulation.worker import FIRST_ANSWER, NaiveReference

FAULTS = ("abort", "abort", "abort", "duplicate", "forge", "reorder", "delay", "kill", "memory")

MOVES = ("kill", "leave", "move", "move")

DRAFTERS = ("random", "random", "right", "wrong", "alternates", "few")

Part = TypeVar("Part", Arrival, Fault)


def make_scenario(seed: int, num_arrivals: int = 60) -> Scenario:
    """Tiny pools, short chunks, crowds, and everything that can go wrong; all of it from one seed."""
    rng = random.Random(seed)
    num_blocks, block_size = rng.choice([(8, 4), (8, 4), (8, 2), (8, 1), (12, 4), (5, 4), (24, 2), (3, 16)])
    scheduler = SchedulerConfig(
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=1000,
        max_num_seqs=rng.choice([1, 2, 4, 4, 8, 8]),
        max_num_batched_tokens=rng.choice([1, 4, 8, 16, 64]),
        eos_token_ids=frozenset(range(FIRST_ANSWER, FIRST_ANSWER + rng.choice([0, 3, 10]))),
        max_steps_in_flight=rng.choice([1, 2, 2, 3]),
        enable_prefix_caching=rng.random() < 0.7,
        scheduling_policy=rng.choice(["fcfs", "priority", "shortest", "fair"]),
        itl_target_s=rng.choice([None, None, 0.002]),
        max_preemptions=rng.choice([0, 1, 2, 4, 4, 100]),
    )
    room = num_blocks * block_size + 1
    alphabet = rng.choice([2, 1000])  # with two words, equal blocks after different beginnings abound
    stem = [rng.randrange(alphabet) for _ in range(room)]
    gap_s = rng.choice([0.001, 0.004, 0.02])
    open_ends = rng.choice([0.0, 0.9, 1.0, 1.0])  # how many sequences are admitted on a guess of their length
    outputs = rng.choice([[2, 10], [room], [1, room], [room // 2]])
    impatient = rng.choice([0.0, 0.0, 0.2])
    curious = rng.choice([0.0, 0.0, 0.4])  # how many ask what the model thinks of their prompt, or of their answer
    deadly = rng.choice([0.0, 0.0, 0.0, 0.03])  # how many a worker does not survive
    arrivals: list[Arrival] = []
    at_s = 0.0
    for name in range(num_arrivals):
        at_s += rng.expovariate(1 / gap_s)
        length = rng.randint(1, max(1, min(room - 1, rng.choice([3, 8, room]))))
        shared = rng.randint(0, length) if rng.random() < 0.7 else 0
        prompt = (*stem[:shared], *(rng.randrange(alphabet) for _ in range(length - shared)))
        forks, tenant = None, rng.choice("aaab")
        if arrivals and rng.random() < 0.25:
            forks, prompt, tenant = arrivals[-1].name, arrivals[-1].prompt, arrivals[-1].tenant
        arrivals.append(
            Arrival(
                name=name,
                at_s=arrivals[-1].at_s if forks is not None else at_s,
                prompt=prompt,
                max_tokens=rng.randint(1, min(room - len(prompt), rng.choice(outputs))),
                ignore_eos=rng.random() < 0.2,
                has_length_bound=rng.random() >= open_ends,
                tenant=tenant,
                priority=rng.choice([0, 0, 0, -1, 1]),
                ttft_s=0.02 if rng.random() < impatient else None,
                deadline_s=0.05 if rng.random() < impatient else None,
                forks=forks,
                logprobs=rng.randrange(3) if rng.random() < curious else None,
                prompt_logprobs=rng.randrange(3) if rng.random() < curious else None,
                crashes_at=rng.randrange(len(prompt) + 4) if rng.random() < deadly else None,
            )
        )
    num_faults = rng.choice([0, num_arrivals // 6, num_arrivals // 2])
    faults = [
        Fault(at_s=rng.uniform(0, at_s * 1.2), kind=rng.choice(FAULTS), target=rng.randrange(num_arrivals))
        for _ in range(num_faults)
    ]
    is_reckless = rng.random() < 0.8
    slow = rng.choice([0.0, 0.0, 0.3, 1.0])  # how many wait for their masks
    arrivals = [
        msgspec.structs.replace(each, deferred_percent=rng.choice([10, 30, 70]) if rng.random() < slow else 0)
        for each in arrivals
    ]
    if scheduler.scheduling_policy == "fair" and rng.random() < 0.6:  # tenants have shares that hold whole sequences
        scheduler = msgspec.structs.replace(scheduler, num_blocks=8 * num_blocks)
    scheduler = msgspec.structs.replace(scheduler, max_admissions_per_step=rng.choice([1, 2, 64, 64]))
    scenario = Scenario(scheduler=scheduler, arrivals=tuple(arrivals), faults=tuple(faults), is_reckless=is_reckless)
    return with_offloading(with_drafts(scenario, seed) if seed % 2 else scenario, seed)


def with_offloading(scenario: Scenario, seed: int) -> Scenario:
    """The same scenario; in a third of them, a KV connector stores evicted blocks, and may lose or damage them."""
    rng = random.Random(f"offloading {seed}")
    if rng.random() < 2 / 3:
        return scenario
    scenario = with_conversations(scenario, rng)
    end_s = scenario.arrivals[-1].at_s * 1.2
    damages = [
        Fault(at_s=rng.uniform(0, end_s), kind="damage", target=rng.randrange(6 * scenario.num_replicas))
        for _ in range(rng.choice([0, 0, 10, 40]))
    ]
    return msgspec.structs.replace(
        scenario,
        scheduler=msgspec.structs.replace(
            scenario.scheduler, enable_prefix_caching=True, has_kv_connector=True, prefetches_blocks=True
        ),
        faults=(*scenario.faults, *damages),
        num_offloaded_blocks=rng.choice([1, 4, 16, 16, 1000, 1000]),
        is_connector_durable=rng.random() < 0.5,
    )


def with_drafts(scenario: Scenario, seed: int) -> Scenario:
    """The same scenario with speculative decoding: good and bad drafters, and devices on which drafts are free.

    A block that is published although its last position is a rejected draft is read only by a later prompt that has the
    answer in it. So there are conversations, too.
    """
    rng = random.Random(f"drafts {seed}")
    scenario = with_conversations(scenario, rng)
    arrivals = [
        msgspec.structs.replace(
            each, drafter=rng.choice(DRAFTERS), max_drafts=rng.choice([None, None, None, None, 0, 1, 2])
        )
        for each in scenario.arrivals
    ]
    budget = scenario.scheduler.max_num_batched_tokens
    return msgspec.structs.replace(
        scenario,
        scheduler=msgspec.structs.replace(
            scenario.scheduler, max_drafts=rng.choice([1, 3, 7]), max_num_batched_tokens=rng.choice([budget, 64])
        ),
        arrivals=tuple(arrivals),
        # Where a position takes no time, drafts are made whenever there is room. Elsewhere they must pay.
        step_token_s=rng.choice([0.0, 0.0, scenario.step_token_s]),
        drafting_s=rng.choice([0.0, scenario.step_base_s / 16]),
        # Without it, bad drafters soon make none, and what goes wrong with rejected drafts is rarely seen.
        has_eager_drafts=rng.random() < 0.5,
        # The result of a long step with drafts is awaited before the next step is planned.
        step_base_s=scenario.step_base_s * rng.choice([1, 1, 1, 10]),
    )


def recordable(scenario: Scenario) -> Scenario:
    """The same scenario without eager drafts: a replay chooses drafts as the real manager does."""
    return msgspec.structs.replace(scenario, has_eager_drafts=False)


def with_conversations(scenario: Scenario, rng: random.Random) -> Scenario:
    """The same scenario, where some prompts begin with the prompt and the answer of an earlier arrival."""
    reference, room = NaiveReference(scenario.scheduler.eos_token_ids), scenario.scheduler.max_total_tokens
    leaders = {arrival.forks for arrival in scenario.arrivals}
    arrivals: list[Arrival] = []
    for arrival in scenario.arrivals:
        changed = arrival
        if arrivals and arrival.forks is None and arrival.name not in leaders and rng.random() < 0.5:
            earlier = rng.choice(arrivals[-5:])
            sampling = SamplingParams(max_tokens=earlier.max_tokens, ignore_eos=earlier.ignore_eos)
            said = (*earlier.prompt, *reference.output(earlier.prompt, sampling))
            prompt = (*said, *arrival.prompt[:2])[: room - arrival.max_tokens]
            changed = msgspec.structs.replace(arrival, prompt=prompt, tenant=earlier.tenant)
        arrivals.append(changed)
    return msgspec.structs.replace(scenario, arrivals=tuple(arrivals))


def make_replicated_scenario(seed: int, num_arrivals: int = 60) -> Scenario:
    """A scenario of `make_scenario` on two to four replicas, which lose workers, leave, and exchange sequences."""
    scenario = make_scenario(seed, num_arrivals)
    rng = random.Random(f"replicas {seed}")
    end_s = scenario.arrivals[-1].at_s * 1.2
    faults = [
        Fault(at_s=rng.uniform(0, end_s), kind=rng.choice(MOVES), target=rng.randrange(num_arrivals))
        for _ in range(rng.choice([2, 10, 40]))
    ]
    return msgspec.structs.replace(
        scenario,
        faults=(*scenario.faults, *faults),
        num_replicas=rng.choice([2, 2, 3, 4]),
        recovery_s=rng.choice([0.0, 0.01, 0.1, end_s]),
        exchange_interval_s=rng.choice([0.0, 0.01, 0.1]),
    )


def make_hand_over_scenario(seed: int, num_arrivals: int = 60) -> Scenario:
    """A scenario of `make_replicated_scenario` with prefill and decode replicas. Sent blocks are often overwritten."""
    scenario = make_replicated_scenario(seed, num_arrivals)
    rng = random.Random(f"hand over {seed}")
    scenario = with_conversations(scenario, rng)
    end_s = scenario.arrivals[-1].at_s * 1.2
    damages = [
        Fault(at_s=rng.uniform(0, end_s), kind="damage", target=rng.randrange(num_arrivals))
        for _ in range(rng.choice([0, 0, 10]))
    ]
    num_prefill_replicas, num_blocks = rng.randrange(1, scenario.num_replicas), rng.choice([1, 4, 16, 64, 1000])
    scheduler = msgspec.structs.replace(
        scenario.scheduler,
        enable_prefix_caching=True,
        has_kv_connector=False,
        num_transfer_blocks=rng.choice([0, num_blocks]),  # managers that know it overwrite fewer blocks
    )
    return msgspec.structs.replace(
        scenario,
        scheduler=scheduler,
        faults=(*scenario.faults, *damages),
        num_prefill_replicas=num_prefill_replicas,
        num_transfer_blocks=num_blocks,
    )


def failure(scenario: Scenario) -> Exception | None:
    """What goes wrong when a scenario is played; None if nothing does."""
    try:
        Simulation(scenario).run()
    except Exception as error:
        return error
    return None


def shrink(scenario: Scenario, fails: Callable[[Scenario], bool]) -> Scenario:
    """The smallest scenario we come to by leaving things out and making them plainer, as long as it still fails."""
    assert fails(scenario)
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for candidate in _smaller(scenario):
            if fails(candidate):
                scenario, is_smaller = candidate, True
                break
    return scenario


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
    """One step down in every direction, the big ones first."""
    replace = msgspec.structs.replace
    for arrivals in _without_parts(scenario.arrivals):
        names = {arrival.name for arrival in arrivals}
        kept = tuple(replace(a, forks=None) if a.forks not in names else a for a in arrivals)
        yield replace(scenario, arrivals=kept)
    for faults in _without_parts(scenario.faults):
        yield replace(scenario, faults=faults)
    for num_replicas in range(scenario.num_prefill_replicas + 1, scenario.num_replicas):
        yield replace(scenario, num_replicas=num_replicas)
    if scenario.has_eager_drafts:
        yield replace(scenario, has_eager_drafts=False)
    plainer = {
        "scheduling_policy": "fcfs",
        "max_steps_in_flight": 1,
        "enable_prefix_caching": False,
        "itl_target_s": None,
        "eos_token_ids": frozenset(),
        "max_drafts": 0,
        "has_kv_connector": False,
    }
    for name, value in plainer.items():
        if getattr(scenario.scheduler, name) != value:
            yield replace(scenario, scheduler=replace(scenario.scheduler, **{name: value}))
    for index, arrival in enumerate(scenario.arrivals):
        for changes in _plainer(arrival):
            changed = [*scenario.arrivals]
            changed[index] = replace(arrival, **changes)
            for other, fork in enumerate(changed):  # forks stay forks: what they share changes together
                if fork.prompt == arrival.prompt and not changes.keys().isdisjoint({"prompt", "tenant"}):
                    changed[other] = replace(fork, prompt=changed[index].prompt, tenant=changed[index].tenant)
            yield replace(scenario, arrivals=tuple(changed))


def _plainer(arrival: Arrival) -> Iterator[dict[str, object]]:
    if arrival.max_tokens > 1:
        yield {"max_tokens": arrival.max_tokens // 2}
        yield {"max_tokens": arrival.max_tokens - 1}
    if len(arrival.prompt) > 1 and arrival.forks is None:
        yield {"prompt": arrival.prompt[: len(arrival.prompt) // 2]}
        yield {"prompt": arrival.prompt[:-1]}
    optional = ["ttft_s", "deadline_s", "forks", "logprobs", "prompt_logprobs", "crashes_at", "max_drafts"]
    defaults = {
        **dict.fromkeys(optional),
        "priority": 0,
        "tenant": "",
        "ignore_eos": False,
        "deferred_percent": 0,
        "drafter": "right",
    }
    for name, value in defaults.items():
        if getattr(arrival, name) != value:
            yield {name: value}


def _without_parts(parts: tuple[Part, ...]) -> Iterator[tuple[Part, ...]]:
    """Without one half, quarter, eighth … of it, down to each single one (Zeller's delta debugging)."""
    size = len(parts)
    while size > 1:
        size = -(-size // 2)
        for start in range(0, len(parts), size):
            yield (*parts[:start], *parts[start + size :])
        if size == 1:
            break
    if len(parts) == 1:
        yield ()
