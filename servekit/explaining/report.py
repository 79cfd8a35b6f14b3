"""Write an explanation as text."""

from __future__ import annotations

from servekit.laboratory.report import counted
from servekit.requests.time_causes import MEANINGS
from servekit.scheduler.explanation import Explanation, Interval

BAR_WIDTH = 24
MAX_INTERVALS = 40  # in the text; the others are in --json and on the page


def as_text(explanation: Explanation) -> str:
    """The causes by the time that they took, and the intervals in order."""
    wall_s = explanation.wall_time_s
    reason = explanation.finish_reason or "not ended"
    lines = [f"sequence {explanation.sequence_id}: {milliseconds(wall_s)}, {reason}", ""]
    for cause, seconds in sorted(explanation.causes.items(), key=lambda item: -item[1]):
        share = seconds / wall_s if wall_s else 0.0
        bar = "█" * round(share * BAR_WIDTH)
        lines.append(f"  {cause:<18} {milliseconds(seconds):>12} {share:7.1%}  {bar:<{BAR_WIDTH}}  {MEANINGS[cause]}")
    lines.append("")
    for each in explanation.intervals[:MAX_INTERVALS]:
        start, length = milliseconds(each.start_s), milliseconds(each.end_s - each.start_s)
        lines.append(f"  {start:>12} +{length:>12}  {each.cause:<18} {details(each)}".rstrip())
    num_more = len(explanation.intervals) - MAX_INTERVALS
    if num_more > 0:
        lines.append(f"  … and {num_more} more intervals (--json, or --out DIR)")
    return "\n".join(lines)


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"


def details(interval: Interval) -> str:
    """What is known of an interval besides its cause."""
    parts = [
        interval.rule,
        f"queue: {interval.scheduling_policy}" if interval.scheduling_policy else "",
        f"behind sequence {interval.behind_sequence_id}" if interval.behind_sequence_id is not None else "",
        counted(interval.steps, "step") if interval.steps else "",
        counted(interval.tokens, "token") if interval.tokens else "",
        f"with {counted(interval.mean_other_sequences, 'other')}" if interval.steps else "",
        f"and {counted(interval.other_prefill_tokens, 'token')} of prompts" if interval.other_prefill_tokens else "",
    ]
    return ", ".join(filter(None, parts))
