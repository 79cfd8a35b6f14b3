"""Render chat templates and compile grammars in forked processes that may be killed, because clients write both.

May import protocol, requests, errors. Only the process that forks and the forked ones import jinja2 and llguidance.
"""
