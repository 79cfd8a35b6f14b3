"""What a GPU does with servekit's worker: kernels, tokens, steps, memory, HTTP, and others on the same shapes."""
