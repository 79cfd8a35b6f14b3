"""Let many clients stream answers from a server, and measure tokens per second and each process's time for a token."""

from __future__ import annotations

from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from loadtest.experiment import Experiment, run
from loadtest.record import Outcome
from loadtest.target import ApiFormat, Target
from tests.support import proc

ROUNDS_OF_REQUESTS = 6  # that each client sends while it is measured, by default


class StreamCost(Struct, frozen=True):
    """What one round of streams cost."""

    tokens_per_s: float
    cpu_us: dict[str, float]  # processor time for a token, by kind of process; the load generator is the client
    client_lag_ms: float  # p99 of the client's event loop


def measure_streams(
    port: int,
    pids: dict[str, list[int]],
    num_streams: int,
    num_tokens: int,
    seed: int,
    fields: dict[str, Any],
    num_requests: int = ROUNDS_OF_REQUESTS,
    warms_up: bool = True,
) -> StreamCost:
    """Each client sends its next request when it has an answer of `num_tokens` tokens, until it has `num_requests`.

    `pids` are the server's processes by kind, and `fields` are those of a request beside its prompt. What is warmed up
    is warm before anything is counted.
    """
    target = Target(urls=[f"http://127.0.0.1:{port}"], api=ApiFormat.GENERATE_STREAM, model="any", fields=fields)
    experiment = Experiment(
        target=target,
        arrivals=f"closed:{num_streams}",
        workload=f"random:input=32,output={num_tokens}",
        num_requests=num_streams,
        characters_per_token=1.0,
        seed=seed,
        num_warm_up=0,
    )
    if warms_up:
        run(experiment, "warm-up", None)
    before = _cpu_s(pids)
    measured = replace(experiment, num_requests=num_requests * num_streams, seed=seed + 1000)
    trial = run(measured, "measured", None)
    after = _cpu_s(pids)
    assert {record.outcome for record in trial.result.records} == {Outcome.OK}, trial.summary.failures
    total = sum(record.num_output_tokens for record in trial.result.records)
    used_s = {kind: after[kind] - before[kind] for kind in pids} | {"client": sum(trial.result.cpu_s)}
    lag = trial.summary.event_loop_lag_s
    return StreamCost(
        (trial.summary.steady or trial.summary.full).output_tokens_per_s,
        {kind: 1e6 * seconds / total for kind, seconds in used_s.items()},
        0.0 if lag is None else 1e3 * lag.p99,
    )


def _cpu_s(pids: dict[str, list[int]]) -> dict[str, float]:
    return {kind: sum(map(proc.cpu_s, processes)) for kind, processes in pids.items()}
