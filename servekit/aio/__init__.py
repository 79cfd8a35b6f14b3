"""Extend asyncio: an event with one waiter, work in a daemon thread, a timer that tolerates pauses, work in slices.

May import nothing of servekit.
"""
