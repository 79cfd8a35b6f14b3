"""Decide which items a predictor computes together: dynamic batching for what is not autoregressive. A pure function.

No clock, no I/O, no randomness, no torch, no asyncio, no logging. May import protocol, errors.
"""
