"""What the programs that are clients of a server share: HTTP requests, and text that is safe to print.

May import servekit.errors only. Needs the packages of the `terminal` extra.
"""
