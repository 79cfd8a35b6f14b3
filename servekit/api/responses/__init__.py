"""Write answers: JSON, errors, server-sent events, and the wire format of each API.

May import endpoint, schemas, disconnect, and what the API may import.
"""
