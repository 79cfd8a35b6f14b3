"""Provide what the HTTP clients of servekit share: requests, and text that is safe to print.

May import servekit.errors only. Needs the packages of the `terminal` extra.
"""
