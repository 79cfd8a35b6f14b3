"""The execution side of servekit: everything that needs torch.

May import servekit.protocol and servekit.errors only; the simulated runner also servekit.simulation.
"""
