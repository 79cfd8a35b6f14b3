"""The words of a report, for people and for programs."""

from __future__ import annotations

import json

from servekit.doctor.checks import Check
from servekit.doctor.report import as_json, as_text

FINE = Check(name="port", status="ok", found="127.0.0.1:8000 is free", why="the server listens there")
SLOW = Check(name="huge pages", status="slow", found="never", why="steps take longer", remedy="turn them on")
BROKEN = Check(name="torch", status="broken", found="no module", why="it computes", remedy="install it")


def test_what_is_ok_has_one_line_and_what_is_not_has_a_reason_and_a_remedy() -> None:
    assert as_text([FINE, SLOW]) == (
        "ok       port        127.0.0.1:8000 is free\n"
        "slow     huge pages  never\n"
        "                     why: steps take longer\n"
        "                     do:  turn them on\n"
        "\n"
        "servekit can serve here: 1 ok, 0 limited, 1 slow\n"
    )


def test_the_last_line_says_whether_the_server_can_start() -> None:
    assert as_text([FINE, SLOW, BROKEN]).endswith("servekit cannot serve here: 1 broken, 1 slow, 0 limited, 1 ok\n")


def test_programs_get_all_of_it() -> None:
    report = json.loads(as_json([FINE, BROKEN]))
    assert report["can_serve"] is False and json.loads(as_json([FINE, SLOW]))["can_serve"] is True
    assert report["checks"][1] == {
        "name": "torch",
        "status": "broken",
        "found": "no module",
        "why": "it computes",
        "remedy": "install it",
    }
