"""Measure and describe what the service does: metrics, step history, live frames, traces, the journal.

May import scheduler, protocol, config, requests, aio, errors.
"""
