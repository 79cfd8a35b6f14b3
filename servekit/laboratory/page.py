"""Write the timelines of runs as one HTML page that needs no server and no other file."""

from __future__ import annotations

import sys
from importlib.resources import files
from pathlib import Path

import msgspec

from servekit.errors import ConfigError
from servekit.laboratory.batching import BatchingMode
from servekit.laboratory.report import COLUMNS, COMPARISON, format_figure
from servekit.laboratory.summary import Summary
from servekit.laboratory.timeline import Timeline

_TEMPLATE, _FRAME = "page.html", "frame.html"
_PAGE, _DATA = "<!-- page -->", "/* data */ null"
MICROSECONDS = 1e-6


def as_page(title: str, runs: list[tuple[BatchingMode, str, Timeline, Summary]], num_slots: int) -> str:
    """Write a page with one timeline for each run: a lane for each slot, all on the same scale of time.

    The text of each run says how it was played, such as "virtual time".
    """
    data = {
        "title": title,
        "num_slots": num_slots,
        "figures": [COLUMNS[name][0] for name in COMPARISON],
        "runs": [_run(*run) for run in runs],
    }
    return fill_template(__package__, _TEMPLATE, data)


def fill_template(package: str, name: str, data: dict[str, object]) -> str:
    """Return a page of a package with its data, which has a `title`, in the frame that all pages have in common."""
    # In a script element, "</" would end it, and "<!--" would begin a comment.
    text = msgspec.json.encode(data).decode().replace("<", "\\u003c")
    page = files(__package__).joinpath(_FRAME).read_text()
    for placeholder, content in ((_PAGE, files(package).joinpath(name).read_text()), (_DATA, text)):
        assert page.count(placeholder) == 1
        page = page.replace(placeholder, content)
    return page


def write_page(path: Path, text: str) -> None:
    """Write a page, and the folder that it is in. Raises ConfigError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        raise ConfigError(f"--out {path.parent}: {error.strerror}") from None
    print(f"\nwritten: {path}", file=sys.stderr)


def _run(mode: BatchingMode, how: str, timeline: Timeline, summary: Summary) -> dict[str, object]:
    requests = sorted(timeline.requests.values(), key=lambda request: (request.arrival_s, request.sequence_id))
    began_s = requests[0].arrival_s

    def after_start(at_s: float) -> int:
        return round((at_s - began_s) / MICROSECONDS)

    return {
        "name": mode.name,
        "how": how,
        "explanation": mode.explanation,
        "figures": [format_figure(name, getattr(summary, name)) for name in COMPARISON],
        "duration_us": round(summary.duration_s / MICROSECONDS),
        "requests": [
            {
                "slot": request.slot,
                "arrival_us": after_start(request.arrival_s),
                "admitted_us": after_start(request.admitted_s or request.arrival_s),
                "first_us": after_start(request.token_times_s[0]),
                "ended_us": after_start(request.ended_s),
                "prompt": request.num_prompt_tokens,
                "cached": request.num_cached_tokens,
                "tokens": len(request.token_times_s),
                "prefills_us": [(after_start(begin), after_start(end)) for begin, end in request.prefills],
            }
            for request in requests
        ],
    }
