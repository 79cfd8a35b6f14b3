"""Programs that make and serve a model with other servers, for benchmarks/against_peers.py. They need no servekit."""
