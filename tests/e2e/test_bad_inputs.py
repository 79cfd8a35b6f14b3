"""Some thousand invalid requests: each gets its exact status, quickly.

The table is in bad_inputs.py. What is refused is refused in the one schema of errors; and when all of it is over the
server is at rest, and its log has neither a traceback nor a word of what was sent.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from typing import Annotated, Literal

import httpx2
import msgspec
import pytest
from msgspec import UNSET, Meta, Struct, UnsetType

from servekit.api.responses.http import ANTHROPIC_PATHS
from tests.e2e.bad_inputs import CANARY, GROUPS, BadInput
from tests.support.server_process import ServerProcess

MAX_ANSWER_BYTES = 4000  # what was sent is not sent back
MAX_LINE = 700  # characters of the log


class ErrorDetail(Struct, forbid_unknown_fields=True):
    message: Annotated[str, Meta(min_length=1, max_length=1500)]
    type: Literal["invalid_request_error"]
    param: Annotated[str, Meta(min_length=1, max_length=200)] | None
    code: Annotated[str, Meta(pattern="^[a-z_]+$")]


class Refusal(Struct, forbid_unknown_fields=True):
    error: ErrorDetail
    error_type: Literal["validation"] | UnsetType = UNSET


class AnthropicErrorDetail(ErrorDetail):
    type: Literal["invalid_request_error", "not_found_error", "request_too_large"]  # type: ignore[assignment]


class AnthropicRefusal(Struct, forbid_unknown_fields=True, tag="error"):
    error: AnthropicErrorDetail


def ask(server: ServerProcess, case: BadInput) -> tuple[httpx2.Response, float]:
    """The answer, and in how many seconds it came."""
    started_s = time.perf_counter()
    response = server.client.request(case.method, case.path, content=case.content, headers=case.headers)
    return response, time.perf_counter() - started_s


def complaints(server: ServerProcess, case: BadInput) -> Iterator[str]:
    response, elapsed_s = ask(server, case)
    if response.status_code != case.status:
        yield f"{response.status_code} instead of {case.status}: {response.text[:200]}"
    elif case.status != 200 and not is_refusal(response):
        yield f"not in the schema of errors: {response.text[:300]}"
    for _ in range(6):  # other load on the machine may have slowed the first try
        if elapsed_s > case.limit_s:
            elapsed_s = ask(server, case)[1]
    if elapsed_s > case.limit_s:
        yield f"took {1e3 * elapsed_s:.0f} ms; the limit is {1e3 * case.limit_s:.0f} ms"


def is_refusal(response: httpx2.Response) -> bool:
    try:
        msgspec.json.decode(
            response.content, type=AnthropicRefusal if response.url.path.startswith(ANTHROPIC_PATHS) else Refusal
        )
    except msgspec.DecodeError:
        return False
    return response.headers["content-type"] == "application/json" and len(response.content) <= MAX_ANSWER_BYTES


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.__name__)
def test_bad_inputs_get_the_expected_error_quickly(
    server: ServerProcess, group: Callable[[], Iterator[BadInput]]
) -> None:
    logged = server.log.stat().st_size
    worker_pids = server.worker_pids()
    found = [f"{case}\n    {said}" for case in group() for said in complaints(server, case)]
    assert not found, f"{len(found)} of them:\n" + "\n".join(found[:20])
    server.wait_until_at_rest()
    assert server.worker_pids() == worker_pids
    log = server.log.read_text()[logged:]
    assert "Traceback" not in log and CANARY not in log, log[-2000:]
    assert all(len(line) < MAX_LINE for line in log.splitlines()), "bad requests must not fill the disk"


ADDRESSES = [  # of one port of this machine
    "http://127.0.0.1:{port}/a.png",
    "http://localhost:{port}/a.png",
    "http://2130706433:{port}/",
    "http://0:{port}/",
    "http://0x7f000001:{port}/",
    "http://0177.0.0.1:{port}/",
    "http://127.1:{port}/",
    "http://[::1]:{port}/",
    "http://[::ffff:127.0.0.1]:{port}/",
    "http://a@127.0.0.1:{port}/",
    "http://127.0.0.1.nip.io:{port}/",
    "https://127.0.0.1:{port}/",
    "ftp://127.0.0.1:{port}/",
    "gopher://127.0.0.1:{port}/_x",
    "//127.0.0.1:{port}/",
    "HTTP://127.0.0.1:{port}/",
    "http:127.0.0.1:{port}",
    "dict://127.0.0.1:{port}/x",
    "ws://127.0.0.1:{port}/",
    "file:///etc/passwd",
    "file://127.0.0.1:{port}/etc/passwd",
    "/etc/passwd",
    "data:image/png;base64,AAAA",
    "",
]
KINDS = ["image_url", "video_url", "audio_url", "input_image", "input_file"]


def test_urls_in_requests_are_never_fetched(server: ServerProcess) -> None:
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    with socket.create_server(("", 0), family=family, dualstack_ipv6=both) as listener:
        port = listener.getsockname()[1]
        for address in (address.format(port=port) for address in ADDRESSES):
            for kind in KINDS:
                content = [{"type": "text", "text": CANARY}, {"type": kind, kind: {"url": address}, "url": address}]
                body = {"messages": [{"role": "user", "content": content}]}
                response = server.client.post("/v1/chat/completions", json=body)
                assert (response.status_code, is_refusal(response)) == (400, True), (kind, address)
                assert response.json()["error"]["param"] == "messages[0].content"
        schema = {"$ref": f"http://127.0.0.1:{port}/schema.json"}
        response = server.client.post("/v1/completions", json={"prompt": CANARY, "guided_json": schema})
        assert response.status_code == 400
        listener.settimeout(0.1)
        with pytest.raises(TimeoutError):
            listener.accept()


def test_there_are_at_least_400_bad_inputs() -> None:
    refused = [case for group in GROUPS for case in group() if case.status != 200]
    assert len(refused) >= 400
    assert len({(case.method, case.path, case.content, str(case.headers)) for case in refused}) > 0.98 * len(refused)
