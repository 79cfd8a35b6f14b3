"""Services in virtual time, whose journals are replayed: a loop around a recorded manager, and step times."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any

from msgspec import Struct

from servekit.observability.journal import Journal
from servekit.protocol.messages import StepPlan, StepResult
from servekit.protocol.sampling_params import SamplingParams
from servekit.scheduler.commands import AddSequence, Commit, Expire, Finish, Plan, Restart
from servekit.scheduler.scheduler_config import SchedulerConfig
from servekit.scheduler.sequence import FinishReason
from servekit.simulation.model import SimulatedModel

MODEL = SimulatedModel(step_s=5e-3, prefill_s=40e-6, decode_s=300e-6, context_s=200e-9, attention_s=10e-9)
CONFIG = SchedulerConfig(
    num_blocks=70,
    block_size=16,
    max_model_len=1024,
    max_num_seqs=8,
    max_num_batched_tokens=128,
    max_steps_in_flight=2,
)
STOP = 7  # the token that ends answers


class Request(Struct, frozen=True):
    """What only the client knows: when it comes, how long its answer becomes, and when it leaves."""

    at_s: float
    prompt: tuple[int, ...]
    num_output_tokens: int
    leaves_s: float = inf
    deadline_s: float = inf
    tenant: str = ""


def requests(number: int, rate: float, seed: int = 1, **fields: Any) -> list[Request]:
    """Random arrivals; half of the prompts begin with one of two long system prompts; most answers are short."""
    rng = random.Random(seed)
    systems = [tuple(rng.randrange(100, 200) for _ in range(64)) for _ in range(2)]
    made, at_s = [], 1000.0
    for index in range(number):
        at_s += rng.expovariate(rate)
        prompt = tuple(rng.randrange(100, 200) for _ in range(rng.randrange(4, 150)))
        prompt = systems[index % 4] + prompt if index % 4 < 2 else prompt
        num_output_tokens = rng.randrange(70, 100) if rng.random() < 0.3 else rng.randrange(2, 15)
        made.append(Request(at_s, prompt, num_output_tokens, tenant=f"tenant {index % 3}", **fields))
    return made


def serve(
    path: Path,
    config: SchedulerConfig,
    arrivals: list[Request],
    duration_s: Callable[[StepPlan], float] = MODEL.duration_s,
    outage_s: float = inf,
) -> None:
    """Serve requests in virtual time, as the engine does, and record it. The worker is away for half a second."""
    journal = Journal(path, 2**40, 1)
    journal.open()
    manager = journal.make_manager(config)
    coming, in_flight = deque(enumerate(arrivals)), deque[tuple[float, StepPlan]]()
    leaving = sorted((each.leaves_s, number) for number, each in enumerate(arrivals) if each.leaves_s < inf)
    now_s = plans_s = 0.0
    while coming or manager.has_work:
        done_s = in_flight[0][0] if in_flight else inf
        events = [done_s, coming[0][1].at_s if coming else inf, leaving[0][0] if leaving else inf, outage_s]
        if manager.has_work and not in_flight:
            events.append(max(now_s, plans_s))
        now_s = max(now_s, min(*events, manager.next_deadline_s))
        may_plan = not in_flight
        if in_flight and in_flight[0][0] <= now_s:
            _, plan = in_flight.popleft()
            sampled = manager.steps_in_flight[0].sampled
            tokens = tuple(
                STOP if each.num_output_tokens + 1 == arrivals[each.sequence_id].num_output_tokens else 8
                for each, _ in sampled
            )
            manager.apply(Commit(StepResult(plan.epoch, plan.step_id, tokens, 0.0), now_s))
            may_plan = True
        if now_s >= outage_s:
            outage_s, plans_s = inf, now_s + 0.5
            in_flight.clear()
            manager.apply(Restart())
        while coming and coming[0][1].at_s <= now_s:
            number, request = coming.popleft()
            manager.apply(
                AddSequence(
                    sequence_id=number,
                    prompt_token_ids=request.prompt,
                    sampling=SamplingParams(max_tokens=100, stop_token_ids=(STOP,), ignore_eos=True),
                    arrival_s=request.at_s,
                    tenant=request.tenant,
                    priority=number % 3,
                    deadline_s=request.deadline_s,
                    has_length_bound=False,
                )
            )
        while leaving and leaving[0][0] <= now_s:
            manager.apply(Finish(leaving.pop(0)[1], FinishReason.ABORT))
        manager.apply(Expire(now_s))
        if may_plan and now_s >= plans_s:
            while (plan := manager.apply(Plan(now_s))) is not None:
                began_s = max(now_s, in_flight[-1][0]) if in_flight else now_s
                in_flight.append((began_s + duration_s(plan), plan))
    journal.close()
