"""Connect several API processes to one engine process: their messages, and both ends of the connection.

May import api, engine, and what those may import.
"""
