"""Compute grammars' token masks in a process of its own, which may be killed and started again at any time.

May import servekit.protocol; nothing else of workers, and no torch, so that the process starts fast and stays small.
client.py is the worker's side. process.py is the process. matchers.py computes masks, within the limits of budgets.py.
"""
