"""Compare the scheduling policies in virtual time: the real workload manager with a simulated worker.

    python benchmarks/scheduling.py [--seeds 1000]

It prints two tables. *Head of line*: short prompts and their streams, alone and beside a constant flow of long prompts.
*Fairness*: two tenants, one of which sends twenty times as many requests as the other.

A step takes 8 ms plus 25 us per token, which is the order of an 8-billion-parameter model on one H100. Virtual time is
exact, so the figures are the same on every machine.
"""

from __future__ import annotations

import argparse
import random
import statistics

from benchmarks.progress import progress, tell
from servekit.scheduler.policy import Fair
from servekit.scheduler.scheduler_config import SchedulerConfig
from servekit.simulation.scenario import Arrival, Client, Scenario
from servekit.simulation.service import Simulation

STEP_BASE_S, STEP_TOKEN_S = 8e-3, 25e-6
LONG_PROMPT = 10_000
POLICIES_AND_TARGETS = (  # inter-token targets in ms
    ("fcfs", None),
    ("fcfs", 15),
    ("shortest", None),
    ("shortest", 25),
    ("shortest", 15),
    ("fair", 15),
)
MAX_NUM_SEQS, MAX_MODEL_LEN = 4, 40  # of the fairness table


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def play(scheduler: SchedulerConfig, arrivals: list[Arrival]) -> list[Client]:
    scenario = Scenario(
        scheduler=scheduler, arrivals=tuple(arrivals), step_base_s=STEP_BASE_S, step_token_s=STEP_TOKEN_S
    )
    simulation = Simulation(scenario, check=False)
    simulation.run()
    return list(simulation.clients.values())


# -- head of line -----------------------------------------------------------------------------------------------------


def chat_beside(documents: str, seed: int, span_s: float = 30.0) -> list[Arrival]:
    """Return 15 short prompts per second with answers of 60 tokens, and "none", "steady" or "bursts" of documents."""
    rng = random.Random(seed)
    arrivals: list[Arrival] = []

    def arrive(at_s: float, length: int, max_tokens: int, tenant: str) -> None:
        prompt = tuple(rng.randrange(50_000) for _ in range(length))
        arrivals.append(Arrival(name=len(arrivals), at_s=at_s, prompt=prompt, max_tokens=max_tokens, tenant=tenant))

    at_s = 0.0
    while (at_s := at_s + rng.expovariate(15.0)) < span_s:
        arrive(at_s, rng.randint(50, 300), 60, "chat")
    if documents == "steady":
        for second in range(int(span_s)):
            arrive(float(second), LONG_PROMPT, 20, "documents")
    elif documents == "bursts":
        for number in range(int(span_s)):
            arrive(8.0 * (number // 8), rng.randint(4_000, LONG_PROMPT), 20, "documents")
    return arrivals


def serving(policy: str, itl_target_s: float | None, max_num_batched_tokens: int = 2048) -> SchedulerConfig:
    return SchedulerConfig(
        num_blocks=16_000,
        block_size=16,
        max_model_len=32_768,
        max_num_seqs=256,
        max_num_batched_tokens=max_num_batched_tokens,
        max_steps_in_flight=2,
        scheduling_policy=policy,
        itl_target_s=itl_target_s,
    )


def chat_latencies(clients: list[Client]) -> tuple[float, float, float]:
    """Return p50 and p99 of TTFT, and p99 of the inter-token latency, of short prompts, in ms."""
    chat = [client for client in clients if client.arrival.tenant == "chat"]
    ttft = [client.token_times_s[0] - client.arrival.at_s for client in chat]
    gaps = [later - sooner for c in chat for sooner, later in zip(c.token_times_s, c.token_times_s[1:], strict=False)]
    return 1e3 * statistics.median(ttft), 1e3 * percentile(ttft, 0.99), 1e3 * percentile(gaps, 0.99)


def document_latency(clients: list[Client]) -> float:
    """Return p50 of the documents' TTFT, in ms."""
    documents = [client for client in clients if client.arrival.tenant == "documents"]
    return 1e3 * statistics.median(client.token_times_s[0] - client.arrival.at_s for client in documents)


def describe(policy_and_target: tuple[str, int | None]) -> str:
    policy, target_ms = policy_and_target
    return policy if target_ms is None else f"{policy}, {target_ms} ms"


def head_of_line(num_seeds: int) -> None:
    print("TTFT p99 of short prompts (50 to 300 tokens, 15 a second), ms: alone; beside 10,000-token prompts, one a")
    print("second; beside bursts of eight documents of 4,000 to 10,000 tokens. In brackets: ratio to alone\n")
    print(
        "| policy | ITL target | alone | beside 10,000-token prompts | beside bursts | ITL p99 | documents' TTFT p50 |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|")
    for policy, target_ms in progress(POLICIES_AND_TARGETS, "head of line", describe):
        scheduler = serving(policy, None if target_ms is None else target_ms / 1e3)
        ttft: dict[str, list[float]] = {"none": [], "steady": [], "bursts": []}
        gaps, documents = [], []
        for seed in range(num_seeds):
            for kind, values in ttft.items():
                clients = play(scheduler, chat_beside(kind, seed))
                _, p99, gap = chat_latencies(clients)
                values.append(p99)
                gaps.append(gap)
                if kind == "steady":
                    documents.append(document_latency(clients))
        alone, steady, bursts = (statistics.median(values) for values in ttft.values())
        tell(
            f"| {policy} | {target_ms or '-'} | {alone:.0f} | {steady:.0f} ({steady / alone:.2f}) "
            f"| {bursts:.0f} ({bursts / alone:.2f}) | {max(gaps):.1f} | {statistics.median(documents):,.0f} |"
        )


# -- fairness ---------------------------------------------------------------------------------------------------------


def flood(seed: int, policy: str) -> Scenario:
    """Return two tenants, one of which sends twenty times as many requests; together more than can be served."""
    rng = random.Random(seed)
    scheduler = SchedulerConfig(
        num_blocks=40,
        block_size=4,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=rng.choice([8, 32]),
        max_steps_in_flight=2,
        scheduling_policy=policy,
    )
    arrivals: list[Arrival] = []
    for tenant, gap_s in (("modest", 0.02), ("flood", 0.001)):
        at_s = rng.uniform(0, 0.05)
        while (at_s := at_s + rng.expovariate(1 / gap_s)) < 0.25:
            length = rng.randint(1, 20)
            arrivals.append(
                Arrival(
                    name=len(arrivals),
                    at_s=at_s,
                    prompt=tuple(rng.randrange(1000) for _ in range(length)),
                    max_tokens=rng.randint(1, MAX_MODEL_LEN - length),
                    has_length_bound=rng.random() < 0.5,
                    tenant=tenant,
                )
            )
    return Scenario(scheduler=scheduler, arrivals=tuple(arrivals))


def fairness(num_seeds: int) -> None:
    bound = Fair.max_lag(MAX_NUM_SEQS, MAX_MODEL_LEN)
    print(
        f"\ntwo tenants, one with 20 times the requests; {num_seeds:,} seeds; the bound of `fair` is {bound} tokens\n"
    )
    print("| policy | service lag, median | service lag, worst | TTFT p50 of the smaller tenant, ms | p99, ms |")
    print("|---|---:|---:|---:|---:|")
    for policy in ("fcfs", "fair"):
        lags, ttft = [], []
        for seed in progress(range(num_seeds), f"fairness, {policy}", lambda seed: f"seed {seed}"):
            simulation = Simulation(flood(seed, policy), check=False, watch_lag=True)
            simulation.run()
            lags.append(simulation.lag.worst)
            ttft += [
                client.token_times_s[0] - client.arrival.at_s
                for client in simulation.clients.values()
                if client.arrival.tenant == "modest"
            ]
        p50, p99 = 1e3 * statistics.median(ttft), 1e3 * percentile(ttft, 0.99)
        if policy == "fair" and max(lags) > bound:
            raise SystemExit(f"a lag of {max(lags)} tokens; the bound is {bound}")
        print(f"| {policy} | {statistics.median(lags):,.0f} | {max(lags):,} | {p50:.0f} | {p99:.0f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=1000, help="number of seeds of the fairness table")
    arguments = parser.parse_args()
    head_of_line(num_seeds=5)
    fairness(arguments.seeds)


if __name__ == "__main__":
    main()
