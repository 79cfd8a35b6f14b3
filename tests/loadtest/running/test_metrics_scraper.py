"""Test reading a server's /metrics during a run, also if it has none, or none at the moment."""

from __future__ import annotations

import asyncio

import pytest

from loadtest.running import metrics_scraper as scrape
from loadtest.running.clock import now_s
from loadtest.running.metrics_scraper import Scrape, get, read_metrics, scrape_periodically
from tests.loadtest.running.test_connection import Handler, served
from tests.support.timing import until

METRICS = b"# TYPE servekit_num_requests_running gauge\nservekit_num_requests_running 3.0\n"


def answer(body: bytes, status: bytes = b"200 OK") -> bytes:
    return b"HTTP/1.1 %b\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body)


def one_after_the_other(*answers: bytes) -> tuple[Handler, list[str]]:
    """The last one again and again. Also what was asked."""
    asked: list[str] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        asked.append(head)
        writer.write(answers[min(len(asked), len(answers)) - 1])

    return handle, asked


async def scraped(monkeypatch: pytest.MonkeyPatch, *answers: bytes) -> tuple[list[Scrape], list[str], bool]:
    """Until there are two, fifty times as often as usual. Also what was asked, and whether it ended by itself."""
    monkeypatch.setattr(scrape, "INTERVAL_S", 0.02)
    handle, asked = one_after_the_other(*answers)
    scrapes: list[Scrape] = []
    async with served(handle) as url:
        task = asyncio.create_task(scrape_periodically(url, "secret", now_s(), scrapes))
        await until(lambda: task.done() or len(scrapes) >= 2)
        has_ended = task.done()
        task.cancel()
        (result,) = await asyncio.gather(task, return_exceptions=True)
        assert result is None or isinstance(result, asyncio.CancelledError)
    return scrapes, asked, has_ended


async def test_metrics_are_read_every_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    scrapes, asked, has_ended = await scraped(monkeypatch, answer(METRICS))
    assert not has_ended and len(scrapes) >= 2
    assert all(values == {"servekit_num_requests_running": 3.0} for _, values in scrapes)
    times_s = [at_s for at_s, _ in scrapes]
    assert times_s == sorted(times_s) and times_s[0] >= 0.0
    assert asked[0].startswith("GET /metrics ") and "Authorization: Bearer secret" in asked[0]


async def test_scraping_continues_after_a_failed_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    nonsense = b"SSH-2.0\r\n\r\n"
    scrapes, _, has_ended = await scraped(monkeypatch, nonsense, b"", nonsense, answer(METRICS))
    assert not has_ended and scrapes


@pytest.mark.parametrize(
    "nothing",
    [answer(b"no", b"404 Not Found"), answer(b"servekit_x one\n"), answer(b"# TYPE servekit_x gauge\nservekit_x {\n")],
)
async def test_scraping_ends_if_there_are_no_metrics(monkeypatch: pytest.MonkeyPatch, nothing: bytes) -> None:
    scrapes, asked, has_ended = await scraped(monkeypatch, nothing)
    assert has_ended and not scrapes and len(asked) == 1


async def test_bytes_that_are_not_utf_8_are_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    scrapes, _, _ = await scraped(monkeypatch, answer(b"process_name \xff\n" + METRICS))
    assert scrapes[0][1] == {"servekit_num_requests_running": 3.0}


def test_get_returns_none_without_an_answer() -> None:
    assert get("http://127.0.0.1:1", "/metrics") is None


def test_metrics_are_gauges_counters_and_the_sums_of_histograms() -> None:
    text = """# HELP servekit_num_requests_running Sequences that hold KV blocks.
# TYPE servekit_num_requests_running gauge
servekit_num_requests_running 3.0
# TYPE servekit_num_preemptions counter
servekit_num_preemptions_total 2.0
servekit_num_preemptions_created 1.7e+09
# TYPE servekit_step_seconds histogram
servekit_step_seconds_bucket{le="0.1"} 4.0
servekit_step_seconds_bucket{le="+Inf"} 5.0
servekit_step_seconds_count 5.0
servekit_step_seconds_sum 0.6
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="m",engine="0"} 7.0
# TYPE process_open_fds gauge
process_open_fds 12.0
"""
    assert read_metrics(text) == {
        "servekit_num_requests_running": 3.0,
        "servekit_num_preemptions_total": 2.0,
        "servekit_step_seconds_count": 5.0,
        "servekit_step_seconds_sum": 0.6,
        'vllm:num_requests_running{engine="0",model_name="m"}': 7.0,
    }
