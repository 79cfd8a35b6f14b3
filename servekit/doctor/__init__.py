"""`servekit doctor`: check the machine, and report what is broken, what will be slow, and what to do about it.

Imports point down: command, probes | report, checks, machine. `machine`, `checks` and `report` are pure.
"""
