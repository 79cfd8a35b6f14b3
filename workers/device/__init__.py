"""Copy between host and device, and account for the memory of the device and of the heap.

May import servekit.protocol and servekit.errors; nothing of workers.
"""
