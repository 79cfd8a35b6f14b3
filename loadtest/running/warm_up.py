"""Send requests before a run, so that it does not measure a cold server."""

from __future__ import annotations

from collections.abc import Sequence

from loadtest.errors import LoadTestError
from loadtest.planning.plan import Plan, Request
from loadtest.record import Outcome
from loadtest.running.clock import now_s
from loadtest.running.runner import Runner
from loadtest.target import Target

NUM_WARM_UP_CLIENTS = 8


async def warm_up(
    target: Target, requests: Sequence[Request], model: str | None = None, sources: Sequence[str] = ()
) -> None:
    """Send these requests without recording them. Raises LoadTestError if none is answered."""
    prompts = [
        Request(number, None, request.prompt, request.max_tokens)
        for number, request in enumerate(requests)
        if request.follows is None
    ]
    if not prompts:
        return
    plan = Plan(prompts, "closed", "warm-up", 0, num_clients=min(len(prompts), NUM_WARM_UP_CLIENTS))
    runner = Runner(target, plan, model=model, sources=sources)
    result = await runner.run(now_s())
    if not any(record.outcome is Outcome.OK for record in result.records):
        first = result.records[0]
        if runner.refusal:
            why = f"the server at {', '.join(target.urls)} says: {runner.refusal}"
        else:
            why = f"check that the server runs at {', '.join(target.urls)} and has the API of --api {target.api.value}"
        raise LoadTestError(
            f"none of {len(result.records)} warm-up requests was answered: {first.outcome.value}, {first.error}; " + why
        )
