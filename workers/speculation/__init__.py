"""Speculative decoding: drafters, the drafts of each step, and which of them are accepted.

May import loading, sampling, batch, layers, attention, kv_cache, device, parallel, servekit.protocol, servekit.errors.
"""
