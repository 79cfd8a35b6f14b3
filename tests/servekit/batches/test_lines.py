"""Claims about reading a batch's input file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from servekit.batches import lines
from servekit.batches.lines import LineReader, check_lines

ENDPOINT = "/v1/completions"


def request(custom_id: Any = "a", **changes: Any) -> str:
    line = {"custom_id": custom_id, "method": "POST", "url": ENDPOINT, "body": {"prompt": "Hi"}, **changes}
    return json.dumps(line)


def written(tmp_path: Path, *parts: str | bytes) -> Path:
    path = tmp_path / "input.jsonl"
    path.write_bytes(b"\n".join(part if isinstance(part, bytes) else part.encode() for part in parts))
    return path


def test_requests_are_counted_and_empty_lines_are_not(tmp_path: Path) -> None:
    path = written(tmp_path, request("a"), "", request("b", extra=1), b"\r", request("c"))
    assert check_lines(path, ENDPOINT) == (3, [])


@pytest.mark.parametrize(
    ("line", "code", "param"),
    [
        ("{", "invalid_json_line", None),
        (b'{"custom_id": "\xff"}', "invalid_json_line", None),
        ("[" * 100_000, "invalid_request", None),
        (request(7), "invalid_request", None),
        ('{"custom_id": "b"}', "invalid_request", None),
        (request(""), "invalid_custom_id", "custom_id"),
        (request("x" * 513), "invalid_custom_id", "custom_id"),
        (request("a"), "duplicate_custom_id", "custom_id"),
        (request("b", method="GET"), "invalid_method", "method"),
        (request("b", url="/v1/chat/completions"), "mismatched_endpoint", "url"),
        (request("b", body=[1]), "invalid_body", "body"),
        (request("b", body={"stream": True}), "invalid_body", "body.stream"),
        (request("b", body="x" * (2**21)), "line_too_long", None),
    ],
)
def test_a_wrong_line_is_named_with_its_number(tmp_path: Path, line: str | bytes, code: str, param: str | None) -> None:
    _, errors = check_lines(written(tmp_path, request("a"), "", line, request("z")), ENDPOINT)
    assert [(error.code, error.line, error.param) for error in errors] == [(code, 3, param)]


def test_an_empty_file_and_one_with_too_many_requests_are_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [error.code for error in check_lines(written(tmp_path, "", " "), ENDPOINT)[1]] == ["empty_file"]
    monkeypatch.setattr(lines, "MAX_LINES", 2)
    path = written(tmp_path, *(request(f"{number}") for number in range(3)))
    assert [error.code for error in check_lines(path, ENDPOINT)[1]] == ["too_many_lines"]


def test_only_so_many_errors_are_reported(tmp_path: Path) -> None:
    assert len(check_lines(written(tmp_path, *["{"] * 1000), ENDPOINT)[1]) == lines.MAX_ERRORS


def test_a_check_pauses_as_long_as_it_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, pauses_s = 0.0, list[float]()

    def work() -> float:
        nonlocal now_s
        now_s += lines.WORK_S / 4
        return now_s

    monkeypatch.setattr(lines.time, "monotonic", work)
    monkeypatch.setattr(lines.time, "sleep", pauses_s.append)
    assert check_lines(written(tmp_path, *(request(f"{number}") for number in range(100))), ENDPOINT) == (100, [])
    assert max(pauses_s) < 2 * lines.WORK_S and sum(pauses_s) == pytest.approx(now_s, rel=0.25)


def test_a_reader_gives_each_line_without_an_answer_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "_SLICE_BYTES", 300)
    path = written(tmp_path, *(request(f"{number}") for number in range(1, 101)))
    found, sizes = [], []
    with LineReader(path, {1, 50, 100}) as reader:
        while some := reader.read():
            sizes.append(len(some))
            found += some
    assert [number for number, _ in found] == [number for number in range(1, 101) if number not in (1, 50, 100)]
    assert all(line.custom_id == str(number) for number, line in found)
    assert max(sizes) <= 4, "a slice is bounded"
