"""Attention over a paged KV cache: the interface, the selector, and one file a backend.

May import kv_cache, csrc, device.
"""
