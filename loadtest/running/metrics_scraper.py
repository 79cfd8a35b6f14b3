"""Read the server's /metrics every second of a run."""

from __future__ import annotations

import asyncio
import http.client
from collections.abc import Iterator
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from loadtest.running.clock import now_s

FAMILIES = ("servekit_", "vllm:")
INTERVAL_S = 1.0
TIMEOUT_S = 5.0
MAX_BYTES = 2**24

Scrape = tuple[float, dict[str, float]]  # seconds since the start of the run, and the value of each sample by name


def read_metrics(text: str) -> dict[str, float]:
    """Return gauges, counters, and sums and counts of histograms, of the families that reports know.

    A sample with labels is named as it is written: `vllm:num_requests_running{engine="0"}`. Raises ValueError for text
    that is not in the Prometheus format.
    """
    wanted = "\n".join(line for line in text.splitlines() if line.removeprefix("# TYPE ").startswith(FAMILIES))
    families = text_string_to_metric_families(wanted + "\n")
    return {_name(sample): float(sample.value) for family in families for sample in family.samples if _is_used(sample)}


def get(url: str, path: str, api_key: str | None = None, timeout_s: float = TIMEOUT_S) -> tuple[int, bytes] | None:
    """Return status and body, or None if there was no answer. Blocks."""
    parts = urlsplit(url)
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_s)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read(MAX_BYTES)
    except (OSError, http.client.HTTPException, ValueError):
        return None
    finally:
        connection.close()


async def scrape_periodically(url: str, api_key: str | None, start_s: float, scrapes: list[Scrape]) -> None:
    """Append to `scrapes` until cancelled, or until the server turns out to have no /metrics."""
    for due_s in _each_second(start_s):
        await asyncio.sleep(max(0.0, due_s - now_s()))
        answer = await asyncio.to_thread(get, url, "/metrics", api_key)
        if answer is None:
            continue  # a busy or restarted server has metrics again later
        status, body = answer
        if status != 200:
            return
        try:
            values = read_metrics(body.decode(errors="replace"))
        except ValueError:
            return
        scrapes.append((now_s() - start_s, values))


def _each_second(start_s: float) -> Iterator[float]:
    """Yield every full second of the run; seconds that passed during a slow answer are skipped."""
    due_s = start_s
    while True:
        yield due_s
        due_s += INTERVAL_S * max(1, 1 + (now_s() - due_s) // INTERVAL_S)


def _is_used(sample: Sample) -> bool:
    return not sample.name.endswith(("_bucket", "_created"))


def _name(sample: Sample) -> str:
    if not sample.labels:
        return sample.name
    labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
    return f"{sample.name}{{{labels}}}"
