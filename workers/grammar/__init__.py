"""Compute grammars' token masks in a process of its own, which may be killed and started again at any time.

Imports nothing of `workers`, and no torch: the process starts fast and stays small. client.py is the worker's end;
process.py is the process; matchers.py and budgets.py are what it computes, and what that may cost.
"""
