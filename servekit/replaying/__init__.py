"""`servekit replay`: repeat the decisions of a journal, or simulate its requests with other settings.

May import the laboratory, whose pages it resembles, and what that may import. Nothing here reads a clock.
"""
