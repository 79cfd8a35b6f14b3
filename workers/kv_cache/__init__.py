"""The KV pages of one device, and their number formats.

May import no other package of workers.
"""
