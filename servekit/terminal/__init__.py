"""Terminal clients of a server, `servekit chat` and `servekit top`: they use its HTTP API only.

May import servekit.errors, servekit.client, and the frame types in servekit.observability.live_frames. Needs the
packages of the `terminal` extra.
"""
