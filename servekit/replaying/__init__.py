"""Replay a journal: the same decisions again, or what would have happened with other settings: `servekit replay`.

May import the laboratory, whose pages it resembles, and what that may import. Nothing here reads a clock.
"""
