"""Files and batches on disk: what OpenAI's Files and Batches endpoints store, and how a batch's lines are read.

May import `servekit.errors` only. Nothing here is asyncio: the API calls it in threads.
"""
