"""Load a model: checkpoint files to a transformers model with fast layers and paged attention.

May import layers, attention, kv_cache, device, servekit.protocol, servekit.errors.
"""
