"""Load and evict models of several kinds at random, under load, while workers are killed.

One server has six models on demand, with memory for about three of them, and one that stays loaded. Clients ask for
models at random; some leave before their answer. An operator loads and unloads models, and SIGHUP takes one out of the
file and puts it back. Now and then a worker gets SIGKILL, also while it loads. Every other five seconds, clients ask a
model of a slow remote server, more of them than it has connections. Each request must get the right answer, or a
refusal that tells when to come again, and the slow server must not slow the model that stays loaded.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from msgspec import Struct

from servekit.protocol.sampling_params import SamplingParams
from servekit.simulation.worker import NaiveReference
from tests.support.predictor_checkpoints import TEXTS, make_classifier, make_embedder
from tests.support.server_process import ServerProcess, serving
from tests.torture.crowd import wait_until
from tests.torture.remote_server import read_request, write_completion, write_json
from tests.torture.report import BUILD, Finding, percentile

NUM_CLIENTS = 12
STUCK_S = 180.0  # a request with neither an answer nor a refusal for this long is lost
CAPACITY = 350  # bytes of [memory]
MAX_MIB = 32.0  # that the server may grow after the first third of the time
KEPT = "kept"
SIMULATED = {"a": 100, "b": 100, "c": 100, "wide": 200, KEPT: 50}  # models and their bytes
PREDICTORS = {"texts": 100, "embedder": 100}
MEMORY = SIMULATED | PREDICTORS
ON_DEMAND = [name for name in MEMORY if name != KEPT]
LEAVING_SHARE = 0.15  # of the requests, whose client leaves within a second
UNAVAILABLE = (429, 503)  # each with Retry-After
FAR = "far"  # the model of the slow server
NUM_FAR_CLIENTS = 8
MAX_FAR_CONNECTIONS = 4
FAR_WINDOW_S = 5.0  # that they ask, and then do not
FAR_PIECES, FAR_PAUSE_S = 4, 0.4  # of one answer, and before each
MOST_SLOWED = 1.5  # the median latency of the model that stays loaded, while they ask


def entry(name: str, model: str) -> str:
    keep = "always" if name == KEPT else "on_demand"
    settings = f'device = "cpu"\nmemory_bytes = {MEMORY[name]}\nkeep = "{keep}"\n'
    settings += "num_kv_blocks = 200\n" if name in SIMULATED else 'dtype = "float32"\n'
    return f'[[model]]\nid = "{name}"\nmodel = "{model}"\n{settings}'


class SlowServer:
    """A remote server that takes its time for each piece of an answer."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}/v1"

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head, _ = await read_request(reader)
            if head.startswith(b"GET"):
                await write_json(writer, "200 OK", '{"data": [{"id": "slow"}]}')
            else:
                await write_completion(writer, "slow ", FAR_PIECES, FAR_PAUSE_S)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client has left
        finally:
            writer.close()


class ModelsFile:
    """The file of --models, with or without one of the models."""

    def __init__(self, folder: Path) -> None:
        self.slow_server = SlowServer()
        make_classifier(folder / "texts")
        make_embedder(folder / "embedder")
        paths = {name: f"sim:step=2ms,load={2 * size}ms" for name, size in SIMULATED.items()}
        paths |= {name: str(folder / name) for name in PREDICTORS}
        self._entries = {name: entry(name, paths[name]) for name in MEMORY}
        remote = f'{{ url = "{self.slow_server.url}", max_connections = {MAX_FAR_CONNECTIONS}, connect_timeout = 1 }}'
        self._entries[FAR] = f'[[model]]\nid = "{FAR}"\nkind = "openai"\nmodel = "slow"\nremote = {remote}\n'
        self.path = folder / "models.toml"
        self.write()

    def write(self, without: str | None = None) -> None:
        entries = (text for name, text in self._entries.items() if name != without)
        self.path.write_text(
            f'default = "{KEPT}"\nmax_load_wait = 120\n[memory]\ncpu = {CAPACITY}\n' + "".join(entries)
        )


class Asked(Struct, frozen=True):
    """A request, and what its answer has to be."""

    path: str
    body: dict[str, Any]
    expected: Any

    def is_right(self, body: dict[str, Any]) -> bool:
        return bool(answer_of(body) == self.expected)


def answer_of(body: dict[str, Any]) -> Any:
    """Return what an answer says, without what differs each time."""
    if "choices" in body:
        return body["choices"][0]["text"]
    if "predictions" in body:
        return [{each["label"]: each["score"] for each in one["scores"]} for one in body["predictions"]]
    return [each["embedding"] for each in body["data"]]


def generation(model: str, chance: random.Random, num_tokens: int | None = None) -> Asked:
    prompt, num_tokens = f"{model} {chance.randrange(1000)}", num_tokens or chance.choice((4, 20, 100, 400))
    expected = bytes(NaiveReference().output(prompt.encode(), SamplingParams(max_tokens=num_tokens))).decode()
    body = {"model": model, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0}
    return Asked("/v1/completions", body, expected)


def predictions(server: ServerProcess) -> dict[str, Asked]:
    """Return a request for each predictor, with its answer on an idle server."""
    found = {}
    for name, path in (("texts", "/predict"), ("embedder", "/v1/embeddings")):
        body = {"model": name, "input": TEXTS}
        answer = answer_of(server.client.post(path, json=body).raise_for_status().json())
        near = [
            pytest.approx(each, abs=1e-4)  # batches of other sizes are rounded in another way
            for each in answer
        ]
        found[name] = Asked(path, body, near)
    return found


class SoakTest:
    """Clients, an operator and a killer, for a while."""

    def __init__(self, server: ServerProcess, file: ModelsFile, seed: int) -> None:
        self.outcomes: Counter[str] = Counter()
        self.done: Counter[str] = Counter()  # by the operator and the killer
        self.examples: list[str] = []
        # Latencies of the model that stays loaded, while the slow server is not asked and while it is.
        self.kept_s: tuple[list[float], list[float]] = ([], [])
        self._num_far = 0  # requests to the slow server
        self.most_bytes = 0  # that models held at any look
        self._server = server
        self._file = file
        self._chance = random.Random(seed)
        self._predictions = predictions(server)
        self._has_ended = asyncio.Event()
        self._client = httpx2.AsyncClient(
            base_url=server.url, timeout=STUCK_S, limits=httpx2.Limits(max_connections=64)
        )
        self._removed: str | None = None

    async def run(self, seconds: float) -> None:
        work: list[Coroutine[Any, Any, None]] = [self._ask_on() for _ in range(NUM_CLIENTS)]
        work += [self._ask_far_on() for _ in range(NUM_FAR_CLIENTS)]
        work += [self._ask_kept_on(), self._operate(), self._reload(), self._kill(), self._look()]
        slow_server = self._file.slow_server
        async with await asyncio.start_server(slow_server.answer, sock=slow_server.listener):
            tasks = [asyncio.create_task(each) for each in work]
            await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
            self._has_ended.set()
            await asyncio.gather(*tasks)
            await self._client.aclose()

    async def _pause(self, most_s: float, least_s: float = 0.0) -> None:
        await asyncio.sleep(self._chance.uniform(least_s, most_s))

    # -- clients ------------------------------------------------------------------------------------------------------

    async def _ask_on(self) -> None:
        while not self._has_ended.is_set():
            model = self._chance.choice(ON_DEMAND)
            asked = self._predictions.get(model) or generation(model, self._chance)
            if self._chance.random() < LEAVING_SHARE:
                await self._ask_and_leave(asked)
            else:
                await self._ask(asked)
            await self._pause(0.3)

    async def _ask_and_leave(self, asked: Asked) -> None:
        try:
            async with asyncio.timeout(self._chance.uniform(0.0, 1.0)):
                await self._client.post(asked.path, json=asked.body)
        except (TimeoutError, httpx2.HTTPError):
            self.outcomes["left"] += 1

    async def _ask_kept_on(self) -> None:
        while not self._has_ended.is_set():
            began_s, was_far_asked = time.monotonic(), self._num_far > 0
            await self._ask(generation(KEPT, self._chance, num_tokens=20))
            if was_far_asked == (self._num_far > 0):
                self.kept_s[was_far_asked].append(time.monotonic() - began_s)
            await asyncio.sleep(0.1)

    async def _ask_far_on(self) -> None:
        body = {"model": FAR, "prompt": "x", "max_tokens": 8}
        while not self._has_ended.is_set():
            if int(time.monotonic() / FAR_WINDOW_S) % 2:
                self._num_far += 1
                await self._ask(Asked("/v1/completions", body, "slow " * FAR_PIECES))
                self._num_far -= 1
            await self._pause(0.2)

    async def _ask(self, asked: Asked) -> None:
        try:
            response = await self._client.post(asked.path, json=asked.body)
        except httpx2.HTTPError as error:
            self._note("lost", asked, repr(error))
            return
        if response.status_code == 200:
            is_right = asked.is_right(response.json())
            self._note("right" if is_right else "wrong", asked, response.text)
        elif response.status_code in UNAVAILABLE and "retry-after" in response.headers:
            self._note("refused with Retry-After", asked, response.text)
        elif response.status_code == 404 and self._removed == asked.body["model"]:
            self._note("refused while the file has no such model", asked, response.text)
        else:
            self._note(f"status {response.status_code}", asked, response.text)

    def _note(self, outcome: str, asked: Asked, answer: str) -> None:
        self.outcomes[outcome] += 1
        if outcome in ("lost", "wrong") or outcome.startswith("status"):
            self.examples.append(f"{outcome}: {asked.body}: {answer[:300]}")

    # -- what disturbs them -------------------------------------------------------------------------------------------

    async def _operate(self) -> None:
        while not self._has_ended.is_set():
            await self._pause(2.0)
            model, verb = self._chance.choice(ON_DEMAND), self._chance.choice(("load", "unload"))
            response = await self._client.post(f"/v1/models/{model}/{verb}")
            is_known = response.status_code in (200, *UNAVAILABLE) or self._removed == model
            self.done[verb] += 1
            if not is_known:
                self._note(f"status {response.status_code}", Asked(verb, {"model": model}, None), response.text)

    async def _reload(self) -> None:
        """Take a model out of the file for a moment."""
        while not self._has_ended.is_set():
            await self._pause(20.0, 10.0)
            self._removed = self._chance.choice(ON_DEMAND)
            for without in (self._removed, None):
                num_read = self._num_read()
                self._file.write(without)
                self._server.process.send_signal(signal.SIGHUP)
                await wait_until(lambda num=num_read: self._num_read() > num, 30)  # type: ignore[misc]
                await self._pause(1.5, 0.5)  # so that answers of before have arrived
            self._removed = None
            self.done["SIGHUP"] += 2

    def _num_read(self) -> int:
        return self._server.log.read_text().count("models.toml again")

    async def _kill(self) -> None:
        while not self._has_ended.is_set():
            await self._pause(6.0, 1.0)
            pids = self._server.worker_pids()
            if pids:
                os.kill(self._chance.choice(pids), signal.SIGKILL)
                self.done["worker killed"] += 1

    async def _look(self) -> None:
        """Note how much memory models hold."""
        while not self._has_ended.is_set():
            listed = (await self._client.get("/v1/models")).json()["data"]
            holding = [each["id"] for each in listed if each["state"] not in ("cold", "waiting", "failed")]
            self.most_bytes = max(self.most_bytes, sum(MEMORY.get(name, 0) for name in holding))
            await asyncio.sleep(0.05)


async def _soak(server: ServerProcess, file: ModelsFile, seconds: float, seed: int) -> tuple[SoakTest, list[Finding]]:
    soak_test = SoakTest(server, file, seed)
    watch = asyncio.create_task(_memory_after(server, seconds / 3))
    await soak_test.run(seconds)
    early_mib = await watch
    is_at_rest = await _unload_all(server)
    late_mib = server.resident_mib()
    loads = server.metric("servekit_model_loads_total")
    num_workers = len(server.worker_pids())
    left = [
        pid
        for pid in server.started_pids()
        if pid not in (*server.worker_pids(), *server.sandbox_pids(), *server.body_process_pids())
    ]
    num_tracebacks = server.log.read_text().count("Traceback")
    return soak_test, [
        Finding("models loaded meanwhile", "", f"{loads:,.0f}"),
        Finding("models evicted or unloaded", "", f"{server.metric('servekit_model_unloads_total'):,.0f}"),
        Finding(
            "uses, workers and processes that are left when all is unloaded",
            f"0 uses, 1 worker (of {KEPT!r}), no other process",
            f"{server.metric('servekit_model_uses'):.0f}, {num_workers}, {len(left)}",
            is_at_rest and num_workers == 1 and not left,
        ),
        Finding(
            "memory of the server after a third of the time, and at the end",
            f"at most {MAX_MIB:g} MiB more",
            f"{early_mib:.0f} MiB, {late_mib:.0f} MiB",
            late_mib <= early_mib + MAX_MIB,
        ),
        Finding("tracebacks in the server's log", "0", f"{num_tracebacks}", num_tracebacks == 0),
    ]


async def _memory_after(server: ServerProcess, seconds: float) -> float:
    await asyncio.sleep(seconds)
    return server.resident_mib()


async def _unload_all(server: ServerProcess) -> bool:
    """Return whether nothing uses any model, and all that may be unloaded are, within a minute."""

    def is_at_rest() -> bool:
        states = {each["id"]: each["state"] for each in server.client.get("/v1/models").json()["data"]}
        for name in ON_DEMAND:
            if states[name] == "ready":
                server.client.post(f"/v1/models/{name}/unload")
        has_uses = server.metric("servekit_model_uses") > 0
        is_unloaded = all(states[name] in ("cold", "failed") for name in ON_DEMAND)
        return not has_uses and is_unloaded and len(server.worker_pids()) == 1

    return await wait_until(is_at_rest, 60, pause_s=0.2)


@contextmanager
def _serving(folder: Path) -> Iterator[tuple[ServerProcess, ModelsFile]]:
    folder.mkdir(parents=True, exist_ok=True)
    file = ModelsFile(folder)
    # A worker that is killed too often in a short time would rightly end its engine.
    flags = ("--max-worker-restarts", "1000", "--log-level", "info")
    with serving("--models", str(file.path), *flags, log=folder / "server.log") as server:
        yield server, file


def run(minutes: float, seed: int = 0) -> list[Finding]:
    """Run a soak test of so many minutes."""
    with _serving(BUILD / "models") as (server, file):
        soak_test, at_end = asyncio.run(_soak(server, file, 60 * minutes, seed))
    for example in soak_test.examples[:20]:
        print(f"  {example}", flush=True)
    is_bad: Callable[[str], bool] = lambda outcome: outcome in ("lost", "wrong") or outcome.startswith("status")  # noqa: E731
    alone_s, beside_s = soak_test.kept_s
    medians = percentile(alone_s, 0.5), percentile(beside_s, 0.5)
    bad = sum(number for outcome, number in soak_test.outcomes.items() if is_bad(outcome))
    return [
        Finding(
            "requests",
            "each answered right, or refused with Retry-After",
            ", ".join(f"{outcome} {number:,}" for outcome, number in soak_test.outcomes.most_common()),
            bad == 0 and soak_test.outcomes["right"] > 0,
        ),
        Finding("disturbances", "", ", ".join(f"{what} {number:,}" for what, number in sorted(soak_test.done.items()))),
        Finding(
            "memory that models held, of what the file gives",
            f"<= {CAPACITY}",
            f"{soak_test.most_bytes}",
            soak_test.most_bytes <= CAPACITY,
        ),
        Finding(
            "answers of the model that stays loaded: p50, p99, longest",
            "",
            ", ".join(f"{percentile(alone_s + beside_s, share):.2f} s" for share in (0.5, 0.99, 1)),
        ),
        Finding(
            "the median of these while no request waits for the slow remote server, and while some do",
            f"at most {MOST_SLOWED:g} times",
            f"{1e3 * medians[0]:.0f} ms, {1e3 * medians[1]:.0f} ms",
            medians[1] <= MOST_SLOWED * medians[0],
        ),
        *at_end,
    ]
