"""Benchmark servekit's worker on a GPU: kernels, tokens, steps, memory, HTTP, and other engines on the same shapes."""
