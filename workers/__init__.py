"""The execution side of servekit: everything that needs torch, and the process that computes grammars' masks.

May import servekit.protocol and servekit.errors only; the simulated runner also servekit.simulation.
"""
