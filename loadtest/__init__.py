"""A load generator for LLM servers: `python -m loadtest`. It imports neither servekit nor workers.

Packages, from the bottom up: planning, analysis, then running and reporting beside each other, self_test, cli.
"""
