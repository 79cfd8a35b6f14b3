"""Run the server process: bind, load, listen, drain; and limit what one connection may use.

May import everything below it: api, engine, and the rest of servekit but the terminal.
"""
