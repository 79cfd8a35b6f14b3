"""Add two helpers to asyncio: an event with one waiter, and blocking work in a daemon thread.

May import nothing of servekit.
"""
