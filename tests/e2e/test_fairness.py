"""A tenant that asks for too much, and what others notice of it."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.server_process import ONE_THREAD, ServerProcess, serving

KEYS = """
[[key]]
key = "flood"
tenant = "flood"
[[key]]
key = "modest"
tenant = "modest"
[[key]]
key = "limited"
tenant = "limited"
max_concurrent_requests = 40
max_concurrent_sequences = 8
requests_per_minute = 60
[[key]]
key = "metered"
tenant = "metered"
max_concurrent_requests = 40
tokens_per_minute = 1_000
"""
NUM_PLACES, NUM_SLOTS, NUM_CLIENTS = 64, 4, 200
FLAGS = ["--model", "sim:step=5ms", "--max-num-seqs", str(NUM_SLOTS), "--max-num-queued-reqs", str(NUM_PLACES)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("fairness")
    (folder / "keys.toml").write_text(KEYS)
    keys = ["--api-keys-file", str(folder / "keys.toml")]
    with serving(*FLAGS, "--scheduling-policy", "fair", *keys, log=folder / "log") as server:
        server.client.headers["authorization"] = "Bearer modest"
        yield server
        assert "Traceback" not in server.log.read_text()


class Flood:
    """Clients that each ask again as soon as they are answered, and a little later if they are refused."""

    def __init__(self, port: int) -> None:
        self.statuses: Counter[int] = Counter()
        self._port = port
        body = json.dumps({"prompt": "a", "max_tokens": 40, "ignore_eos": True})
        head = f"POST /generate HTTP/1.1\r\nAuthorization: Bearer flood\r\nContent-Length: {len(body)}\r\n\r\n"
        self._request = (head + body).encode()
        self.is_overflowing = asyncio.Event()

    async def run(self, until: asyncio.Event) -> None:
        await asyncio.gather(*(self._ask_until(until) for _ in range(NUM_CLIENTS)))

    async def _ask_until(self, end: asyncio.Event) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        while not end.is_set():
            writer.write(self._request)
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = int(head.partition(b"content-length:")[2].split(b"\r\n")[0])
            await reader.readexactly(length)
            status = int(head.split()[1])
            self.statuses[status] += 1
            if status != 200:
                self.is_overflowing.set()
                await asyncio.sleep(0.5)
        writer.close()


def ask(server: ServerProcess, key: str = "modest", **fields: Any) -> Any:
    body = {"prompt": "b", "max_tokens": 1, **fields}
    return server.client.post("/generate", json=body, headers={"authorization": f"Bearer {key}"})


@pytest.fixture(scope="module")
def replicated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Two workers with the demo model."""
    folder = tmp_path_factory.mktemp("replicated")
    (folder / "keys.toml").write_text(KEYS)
    flags = ["--data-parallel-size", "2", "--max-num-seqs", str(NUM_SLOTS), "--max-num-queued-reqs", str(NUM_PLACES)]
    flags += ["--scheduling-policy", "fair", "--api-keys-file", str(folder / "keys.toml")]
    with serving(*flags, log=folder / "log", environment=ONE_THREAD) as server:
        server.client.headers["authorization"] = "Bearer modest"
        yield server
        assert "Traceback" not in server.log.read_text()


async def test_a_modest_tenant_is_admitted_each_time_while_another_floods_the_queue(server: ServerProcess) -> None:
    flood, end = Flood(server.port), asyncio.Event()
    flooding = asyncio.create_task(flood.run(end))
    async with asyncio.timeout(300):
        await flood.is_overflowing.wait()
        num_waiting = await asyncio.to_thread(server.metric, "servekit_num_requests_waiting")
        answers = [(await asyncio.to_thread(ask, server)).status_code for _ in range(25)]
        end.set()
        await flooding
    assert Counter(answers) == {200: 25}
    assert num_waiting <= NUM_PLACES // 2, "the share of a tenant that is alone"
    assert flood.statuses[200] > 25 and set(flood.statuses) == {200, 503}


@pytest.mark.long
async def test_a_modest_tenant_overtakes_a_flood_on_each_of_two_replicas(replicated: ServerProcess) -> None:
    """Behind the flood, which has half of the places, it would wait for 32 answers, and the first 8 of them run."""
    flood, end = Flood(replicated.port), asyncio.Event()
    flooding = asyncio.create_task(flood.run(end))
    statuses: Counter[int] = Counter()
    num_overtaking = []
    async with asyncio.timeout(600):
        await flood.is_overflowing.wait()
        for _ in range(25):
            before = flood.statuses[200]
            statuses[(await asyncio.to_thread(ask, replicated)).status_code] += 1
            num_overtaking.append(flood.statuses[200] - before)
        end.set()
        await flooding
    assert statuses == {200: 25}
    assert sorted(num_overtaking)[12] <= 2 * 2 * NUM_SLOTS, num_overtaking
    lines = replicated.client.get("/metrics").text.splitlines()
    steps = [float(line.rpartition(" ")[2]) for line in lines if line.startswith("servekit_scheduler_steps_total{")]
    assert len(steps) == 2 and min(steps) > 100
    replicated.wait_until_at_rest()


def test_a_tenant_gets_a_slot_while_another_holds_all_of_them(server: ServerProcess) -> None:
    """Its whole answer comes before any of the four answers of 2,000 tokens ends."""
    greedy = {"prompt": "a", "n": NUM_SLOTS, "max_tokens": 2000, "ignore_eos": True, "stream": True}
    headers = {"authorization": "Bearer flood"}

    def num_alive() -> float:
        return server.metric("servekit_num_requests_running") + server.metric("servekit_num_requests_waiting")

    with server.client.stream("POST", "/v1/completions", json=greedy, headers=headers) as stream:
        server.wait_for_metric("servekit_num_requests_running", NUM_SLOTS)
        before = server.metric("servekit_num_share_preemptions_total")
        assert ask(server, max_tokens=4, ignore_eos=True).status_code == 200
        assert server.metric("servekit_num_share_preemptions_total") == before + 1
        assert num_alive() == NUM_SLOTS and stream.status_code == 200
    server.wait_until_at_rest()


def test_answers_at_the_same_time_are_limited_for_each_key(server: ServerProcess) -> None:
    too_many = ask(server, "limited", n=9)
    assert too_many.status_code == 400 and "max_concurrent_sequences" in too_many.json()["error"]["message"]
    body = {"model": "sim:step=5ms", "prompt": "b", "n": 5, "max_tokens": 2000, "ignore_eos": True, "stream": True}
    of_the_key = {"authorization": "Bearer limited"}
    with server.client.stream("POST", "/v1/completions", json=body, headers=of_the_key) as answer:
        assert answer.status_code == 200
        lines = answer.iter_lines()
        next(lines)  # so it runs
        assert [ask(server, "limited", n=number).status_code for number in (5, 4)] == [429, 429]
    server.wait_until_at_rest()
    assert ask(server, "limited", n=5).status_code == 200


def test_a_quota_of_tokens_lets_in_no_more_than_it_holds(server: ServerProcess) -> None:
    """Forty requests at once, each for 250 times the quota; and then the same tokens one answer at a time."""

    def statuses(**fields: Any) -> Counter[int]:
        with ThreadPoolExecutor(40) as pool:
            return Counter(pool.map(lambda _: ask(server, "metered", **fields).status_code, range(40)))

    assert statuses(n=32, max_tokens=2000) == {400: 40}
    admitted = statuses(max_tokens=400, ignore_eos=True)
    assert set(admitted) == {200, 429} and admitted[200] <= 3
    assert ask(server).status_code == 200, "another tenant"


def test_refused_requests_count_against_the_keys_rate(server: ServerProcess) -> None:
    """Sixty a minute: what is refused for its body counts, too, and soon the key is refused without being read."""
    started_s = time.monotonic()
    statuses = Counter(ask(server, "limited", max_tokens=0.5).status_code for _ in range(80))
    passed_s = time.monotonic() - started_s
    assert statuses[400] <= 61 + passed_s and statuses[400] + statuses[429] == 80
