"""Convert files of a model that must not be read in the server: pickled weights, and tokenizers of other programs.

Runs in a process of its own, which drops its privileges first. May import compression's writer, loading,
servekit.protocol, servekit.errors.
"""
