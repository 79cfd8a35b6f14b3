"""Offer ten times the load that the server can serve: it keeps its throughput and refuses the rest."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.support.server_process import ONE_THREAD, ServerProcess, serving
from tests.torture.crowd import PROMPTS, References
from tests.torture.load import Item, Offer, Window, offered, total
from tests.torture.report import BUILD, Finding
from tests.torture.streams import STUCK_S, RequestSpec

NUM_SEQS = 32
# A request in the queue waits for about as long as its answer then takes. Clients wait for four times the latency at
# the peak: half of it covers queue and answer, the other half is a reserve.
NUM_QUEUED = 32
PATIENCE = 4
NUM_TOKENS = 128
TIMES = 10
PEAK_S = 20
MAX_GROWTH_MIB = 32
# A pool whose pages are all touched before anything is measured: the first use of memory would look like a leak.
NUM_KV_BLOCKS = 1024

ASKED = [
    RequestSpec(
        f"stream {number}",
        "/generate_stream",
        {"prompt": prompt, "max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0},
    )
    for number, prompt in enumerate(PROMPTS)
]


def resident_mib(pid: int) -> float:
    """Return the resident memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


def lag_p99_s(server: ServerProcess) -> float | None:
    """Return the bucket bound below which 99 % of the event loop's delays lie; None if it is not measured."""
    name = "servekit_api_event_loop_lag_seconds_bucket"
    buckets = [line for line in server.client.get("/metrics").text.splitlines() if line.startswith(name)]
    if not buckets:
        return None
    counts = [(float(line.split('le="')[1].split('"')[0]), float(line.rpartition(" ")[2])) for line in buckets]
    return next(bound for bound, count in counts if count >= 0.99 * counts[-1][1])


def peak_of(port: int, items: list[Item], num_clients: int = NUM_SEQS, seconds: float = PEAK_S) -> Window:
    """Measure the peak: as many clients as the server runs sequences, each sending its next request at once."""
    return next(offered(Offer(port, items, seconds, num_clients, window_s=seconds, patience_s=STUCK_S)))


def run(seconds: int, seed: int = 0) -> list[Finding]:
    """Find the peak, then offer ten times as much for `seconds`."""
    references = References()
    flags = ["--max-num-seqs", NUM_SEQS, "--max-num-queued-reqs", NUM_QUEUED, "--num-kv-blocks", NUM_KV_BLOCKS]
    # Under an overload without end, `shortest` lets longer prompts wait until their clients disconnect.
    flags += ["--scheduling-policy", "fcfs"]
    with serving(*map(str, flags), log=BUILD / "overload.log", environment=ONE_THREAD) as server:
        asyncio.run(references.take(server.port, ASKED))
        items = [Item(asked, references.answers[asked.name]) for asked in references.asked]
        peak = peak_of(server.port, items)
        rate, patience_s = TIMES * peak.num_right / peak.seconds, PATIENCE * peak.latency_p50_s
        print(f"  peak: {peak.goodput:,.0f} tokens/s, {rate / TIMES:.1f} requests/s", flush=True)
        server.wait_until_at_rest()
        pids = {"server": server.process.pid, "worker": server.worker_pids()[0]}
        before = {name: resident_mib(pid) for name, pid in pids.items()}
        offer = Offer(server.port, items, seconds, rate=rate, patience_s=patience_s, window_s=seconds, seed=seed)
        window, rest = offered(offer)
        growth = {name: resident_mib(pid) - before[name] for name, pid in pids.items()}
        lag_s = lag_p99_s(server)
        server.wait_until_at_rest()
    print(f"  {window.rate:.0f} requests/s: {window}", flush=True)
    share = window.goodput / peak.goodput
    statuses = total([window.statuses, rest.statuses])
    wrongs = total([window.wrongs, rest.wrongs])
    without = window.num_without_retry_after + rest.num_without_retry_after
    return [
        Finding("peak goodput", "", f"{peak.goodput:,.0f} tokens/s, {peak.num_right / peak.seconds:.1f} requests/s"),
        Finding(
            "offered",
            f"{TIMES} times the peak's requests",
            f"{window.rate:,.0f} requests/s ({TIMES * window.rate / rate:.1f} times) for {seconds} s",
            window.rate > 0.95 * rate,
        ),
        Finding(
            f"goodput: right, whole and within {patience_s:.1f} s",
            "at least 90 % of the peak",
            f"{window.goodput:,.0f} tokens/s, {100 * share:.0f} %",
            share >= 0.9,
        ),
        Finding(
            "status codes",
            "only 200, 429, 503",
            ", ".join(f"{status}: {count:,}" for status, count in statuses.items()),
            statuses.keys() <= {"200", "429", "503"},
        ),
        Finding("refusals without Retry-After", "0", f"{without:,}", without == 0),
        Finding("wrong or cut answers", "0", f"{wrongs.total():,}", not wrongs),
        Finding("clients who left because it took too long", "", f"{window.num_given_up + rest.num_given_up:,}"),
        Finding("latency of answers, p50 and p99", "", f"{window.latency_p50_s:.1f} s, {window.latency_p99_s:.1f} s"),
        *(
            Finding(
                f"memory of the {name}",
                f"grows by {MAX_GROWTH_MIB} MiB at most",
                f"{mib:+.1f} MiB",
                mib <= MAX_GROWTH_MIB,
            )
            for name, mib in growth.items()
        ),
        Finding("event-loop lag, p99", "", "not measured" if lag_s is None else f"below {1e3 * lag_s:g} ms"),
        Finding("lateness of the generator itself, p99", "", f"{1e3 * window.lateness_p99_s:.0f} ms"),
    ]
