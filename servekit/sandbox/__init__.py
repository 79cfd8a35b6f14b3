"""Render chat templates and compile grammars in child processes that may be killed, because clients write both.

May import protocol, request, errors. Only the child process imports jinja2 and llguidance.
"""
