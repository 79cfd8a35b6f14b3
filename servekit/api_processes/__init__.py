"""Several API processes in front of one engine process: the messages between them, and both ends of their connection.

May import api, engine, and what those may import.
"""
