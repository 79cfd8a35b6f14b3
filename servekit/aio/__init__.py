"""Add to asyncio an event with one waiter, blocking work in a daemon thread, and a timer that tolerates pauses.

May import nothing of servekit.
"""
