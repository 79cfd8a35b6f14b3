"""Decide, step by step, which tokens a worker computes: a pure function of what it is given.

No clock, no I/O, no randomness, no torch, no asyncio, no logging. May import protocol, config, errors.
"""
