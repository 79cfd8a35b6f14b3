"""The KV pages of one device, and their number formats.

May import nothing of workers.
"""
