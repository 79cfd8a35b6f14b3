"""Explain from a journal where the time of a sequence went: `servekit explain`.

May import the laboratory, whose pages it resembles, and what that may import.
"""
