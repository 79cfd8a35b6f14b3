"""Decide which items a predictor computes together: dynamic batching for models that generate no text. Pure.

No clock, no I/O, no randomness, no torch, no asyncio, no logging. May import protocol, errors.
"""
