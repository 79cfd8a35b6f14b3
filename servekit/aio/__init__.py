"""Extend asyncio: an event with one waiter, work in a daemon thread, a timer that tolerates pauses, work in slices, and
a semaphore and threads that tenants use in turns.

May import no other package of servekit.
"""
