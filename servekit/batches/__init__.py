"""Store files and batches on disk, for OpenAI's Files and Batches endpoints, and read a batch's lines.

May import `servekit.errors` only. Nothing here is asyncio: the API calls it in threads.
"""
