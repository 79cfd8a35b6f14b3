"""The execution side of servekit: everything that needs torch."""
