"""Write the timelines of runs as one HTML page that needs no server and no other file."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import msgspec
from msgspec import Struct

from servekit.errors import ConfigError
from servekit.laboratory.report import COLUMNS, COMPARISON, format_figure
from servekit.laboratory.summary import Summary
from servekit.laboratory.timeline import Timeline

_TEMPLATE, _FRAME = "page.html", "frame.html"
_PAGE, _DATA = "<!-- page -->", "/* data */ null"
MICROSECONDS = 1e-6


class Picture(Struct, frozen=True, kw_only=True):
    """One run, as the page shows it."""

    name: str  # of the mode and how it was played, or of the case of an experiment
    explanation: str
    num_slots: int
    timeline: Timeline
    summary: Summary


def as_page(
    title: str, pictures: Sequence[Picture], figures: Sequence[str] = COMPARISON, *, number_of_first: int = 0
) -> str:
    """Return a page with a timeline of each run, with a lane for each slot. It shows two runs on one scale of time.

    `figures` are the fields of Summary in its table. Until a reader chooses others, it shows the run with the number
    `number_of_first` and the last run.
    """
    data = {
        "title": title,
        "first": number_of_first,
        "figures": [COLUMNS[name][0] for name in figures],
        "runs": [_run(picture, figures) for picture in pictures],
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


def _run(picture: Picture, figures: Sequence[str]) -> dict[str, object]:
    summary = picture.summary
    requests = sorted(picture.timeline.requests.values(), key=lambda request: (request.arrival_s, request.sequence_id))
    began_s = requests[0].arrival_s

    def after_start(at_s: float) -> int:
        return round((at_s - began_s) / MICROSECONDS)

    return {
        "name": picture.name,
        "explanation": picture.explanation,
        "num_slots": picture.num_slots,
        "tokens_per_s": format_figure("tokens_per_s", summary.tokens_per_s),
        "figures": [format_figure(name, getattr(summary, name)) for name in figures],
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
