"""Several processes, the ranks of a worker group, that execute each plan together: each holds a part of every layer.

May import servekit.errors and workers.kv_cache only.
"""
