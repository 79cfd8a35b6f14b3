"""Define and check request and response bodies, one module for each API. Pure: bytes and values in, values out.

May import requests, scheduler.sequence and errors.
"""
