"""Predict when a sequence gets its first token and its last one, as a pure function of measurements.

No clock, no I/O, no randomness, no asyncio, no logging. May import scheduler and what the scheduler may import.
"""
