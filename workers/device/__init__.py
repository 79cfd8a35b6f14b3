"""Copy between host and device, and account for the device's memory.

May import servekit.protocol and servekit.errors; nothing of workers.
"""
