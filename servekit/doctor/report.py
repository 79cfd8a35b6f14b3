"""Write the results of the checks as text and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from servekit.doctor.checks import Check


def as_text(checks: Sequence[Check]) -> str:
    """Return a line for each check, and for one that is not ok two more: why it matters, and what to do."""
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        lines.append(f"{check.status:<8} {check.name:<{width}}  {check.found}")
        if check.status != "ok":
            indent = " " * (8 + 1 + width + 2)
            lines += [f"{indent}why: {check.why}", f"{indent}do:  {check.remedy}"]
    return "\n".join([*lines, "", summary(checks)]) + "\n"


def summary(checks: Sequence[Check]) -> str:
    """Say how many checks have which status."""
    counts = Counter(check.status for check in checks)
    if not counts["broken"]:
        return f"servekit can serve here: {counts['ok']} ok, {counts['limited']} limited, {counts['slow']} slow"
    return (
        f"servekit cannot serve here: {counts['broken']} broken, {counts['slow']} slow, {counts['limited']} limited, "
        f"{counts['ok']} ok"
    )


def as_json(checks: Sequence[Check]) -> str:
    """Return the checks as a JSON object."""
    content = {"can_serve": all(check.status != "broken" for check in checks), "checks": checks}
    return msgspec.json.format(msgspec.json.encode(content), indent=2).decode() + "\n"
