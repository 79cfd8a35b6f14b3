"""Compute what a model needs on a device, and what a service would do, before either is there: `servekit plan`.

May import the laboratory and what that may import. Nothing here reads a clock.
"""
