"""Write an explanation as one HTML page that needs no server and no other file."""

from __future__ import annotations

from servekit.explaining.report import details, milliseconds
from servekit.laboratory.page import fill_template
from servekit.requests.time_causes import MEANINGS
from servekit.scheduler.explanation import Explanation


def as_page(title: str, explanation: Explanation) -> str:
    """Write a page with a lane of time, and a table of causes."""
    wall_s = explanation.wall_time_s
    data = {
        "title": title,
        "wall_s": wall_s,
        "causes": [
            [cause, MEANINGS[cause], milliseconds(seconds), f"{seconds / wall_s if wall_s else 0.0:.1%}"]
            for cause, seconds in sorted(explanation.causes.items(), key=lambda item: -item[1])
        ],
        "intervals": [
            {
                "cause": each.cause,
                "start_s": each.start_s,
                "end_s": each.end_s,
                "text": ", ".join(
                    filter(None, (f"{each.cause}: {milliseconds(each.end_s - each.start_s)}", details(each)))
                ),
            }
            for each in explanation.intervals
        ],
    }
    return fill_template(__package__, "page.html", data)
