"""Attacks with batches: files with many requests, hostile ones or none, which are stored, run and deleted."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random

import httpx2

from servekit.batches.lines import MAX_LINES
from tests.torture.attacks.attacker import Attack, Attacker, AttackerProcess
from tests.torture.attacks.claims import Claim, Scenario, counts
from tests.torture.attacks.tenants import BYSTANDER_KEY
from tests.torture.report import BUILD

BOUNDARY = "b"
NUM_STORING = 4  # files at a time
NUM_OWN_LINES = 5
OWN_WITHIN_S = 30.0
PATIENCE_S = 60.0


def _line(number: int, prompt: str, max_tokens: int) -> str:
    body = {"prompt": prompt, "max_tokens": max_tokens}
    return json.dumps({"custom_id": f"{number}", "method": "POST", "url": "/v1/completions", "body": body}) + "\n"


def _hostile_file(chance: Random) -> str:
    """Return the content of a file that is as expensive as possible, or has no valid request."""
    kind = chance.randrange(6)
    if kind == 0:
        return "".join(_line(number, "a", 1) for number in range(MAX_LINES))
    if kind == 1:
        return "\n" * 2**22
    if kind == 2:
        return "{}\n" * 2**20
    if kind == 3:
        return _line(0, "a" * (2**21 - 200), 1) * 4
    if kind == 4:
        return "[" * 2**20 + "\n"
    return "".join(_line(number, "Once upon a time", 200) for number in range(200))


def _form(content: str) -> bytes:
    parts = [
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n',
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n{content}\r\n',
        f"--{BOUNDARY}--\r\n",
    ]
    return "".join(parts).encode()


async def _store_and_run(attacker: Attacker) -> None:
    """Store a file, begin a batch of it, look at both, cancel the batch and delete the file."""
    form = await asyncio.to_thread(_form, _hostile_file(attacker.chance))
    content_type = f"multipart/form-data; boundary={BOUNDARY}"
    head = attacker.head("/v1/files", f"Content-Length: {len(form)}", content_type=content_type)
    file_id = _id_of(await attacker.exchange(head, form))
    if not file_id:
        return
    created = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
    data = json.dumps(created).encode()
    batch_id = _id_of(await attacker.exchange(attacker.head("/v1/batches", f"Content-Length: {len(data)}"), data))
    for _ in range(20):
        await attacker.send(attacker.head("/v1/batches?limit=100", method="GET"))
        await attacker.send(attacker.head("/v1/files?limit=100", method="GET"))
    if batch_id:
        await attacker.send(attacker.head(f"/v1/batches/{batch_id}/cancel", "Content-Length: 0"))
    await attacker.send(attacker.head(f"/v1/files/{file_id}", method="DELETE"))


def _id_of(answer: tuple[int, bytes]) -> str:
    status, content = answer
    if status != 200:
        return ""
    body: dict[str, str] = json.loads(content.partition(b"\r\n\r\n")[2])
    return body["id"]


@contextmanager
def _with_folder() -> Iterator[tuple[str, ...]]:
    folder = BUILD / "attack-batches-folder"
    shutil.rmtree(folder, ignore_errors=True)
    yield ("--batch-dir", str(folder))
    shutil.rmtree(folder, ignore_errors=True)


def own_batches(seconds: float, chance: Random) -> list[Claim]:
    """Run a small batch of one tenant again and again, while another tenant stores, runs and deletes files."""
    times_s: list[float] = []
    ends: list[str] = []

    async def attack_and_run(port: int) -> dict[str, int]:
        async with AttackerProcess(BATCHES.name, port, chance.randrange(1000)) as attacker:
            attacker.begin("attack")
            await asyncio.sleep(3)
            until_s = time.monotonic() + 2 * seconds
            while not times_s or time.monotonic() < until_s:
                begun_s = time.monotonic()
                ends.append(await asyncio.to_thread(_run_batch, port))
                times_s.append(time.monotonic() - begun_s)
            return await attacker.rest()

    with BATCHES.serving() as server:
        statuses = asyncio.run(attack_and_run(server.port))
        num_tracebacks = server.log.read_text().count("Traceback")
    wanted = f"completed, {NUM_OWN_LINES} of {NUM_OWN_LINES}"
    kinds = counts({each: ends.count(each) for each in ends})
    return [
        Claim(f"each batch of the other tenant: {wanted}", kinds, set(ends) == {wanted}),
        Claim(
            f"each within {OWN_WITHIN_S:g} s",
            f"within {max(times_s):.1f} s",
            max(times_s) <= OWN_WITHIN_S,
            is_timed=True,
        ),
        Claim("", f"the attacker's answers: {counts(statuses)}"),
        Claim("no traceback", f"{num_tracebacks} tracebacks", num_tracebacks == 0),
    ]


def _run_batch(port: int) -> str:
    """Store a file of a few requests, run it, and return how it ended."""
    content = "".join(_line(number, "Once upon a time", 8) for number in range(NUM_OWN_LINES))
    headers = {"X-API-Key": BYSTANDER_KEY}
    with httpx2.Client(base_url=f"http://127.0.0.1:{port}/v1", headers=headers, timeout=PATIENCE_S) as client:
        form = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}
        stored = client.post("/files", content=_form(content), headers=form)
        if stored.status_code != 200:
            return f"file {stored.status_code}"
        wanted = {"input_file_id": stored.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = client.post("/batches", json=wanted).json()
        deadline_s = time.monotonic() + PATIENCE_S
        while batch["status"] not in ("completed", "failed", "cancelled") and time.monotonic() < deadline_s:
            time.sleep(0.05)
            batch = client.get(f"/batches/{batch['id']}").json()
        client.delete(f"/files/{stored.json()['id']}")
    return f"{batch['status']}, {batch['request_counts']['completed']} of {batch['request_counts']['total']}"


BATCHES = Attack("batches", _store_and_run, at_once=NUM_STORING, makes_flags=_with_folder)
ATTACKS = [BATCHES]
SCENARIOS = [Scenario("own-batch", own_batches)]
