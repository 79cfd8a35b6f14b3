"""Decide, step by step, which tokens a worker computes, as a pure function of the commands that it receives.

No clock, no I/O, no randomness, no torch, no asyncio, no logging. May import requests, protocol, config, errors.
"""
