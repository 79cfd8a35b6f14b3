"""Measure the client itself against a reference server that logs when it sent each token.

May import `loadtest.running`, `loadtest.analysis` and what those may import.
"""
