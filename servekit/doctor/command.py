"""The command `servekit doctor`: probe the machine, run the checks, print the results."""

from __future__ import annotations

from servekit.config import ServeConfig
from servekit.doctor.checks import examine
from servekit.doctor.probes import look_at_machine
from servekit.doctor.report import as_json, as_text


def doctor(config: ServeConfig, as_json_object: bool) -> int:
    """Print what is to be said of this machine for a server with these settings. Returns 1 if something is broken."""
    checks = examine(look_at_machine(config), config)
    print(as_json(checks) if as_json_object else as_text(checks), end="")
    return 1 if any(check.status == "broken" for check in checks) else 0
