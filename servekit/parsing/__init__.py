"""Read answers of chat models: reasoning, content and tool calls. Pure: text in, events out, grammars as text.

May import requests, errors. A family of models has a format, which says two things: how its text is read while it
arrives, and which grammar holds its calls to the schemas of their functions. `chat_format.py` chooses the formats.
"""
