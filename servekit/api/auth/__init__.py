"""Authenticate API keys and limit their rates. Pure: no I/O, and the time is an argument.

May import engine.caller and errors.
"""
