"""Define what the server and its child processes share: messages, their framing, logging, process setup.

May import servekit.errors. It is all that `workers` may import of servekit, so it imports neither torch nor asyncio.
"""
