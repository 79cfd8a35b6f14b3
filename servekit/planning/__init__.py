"""Estimate what a model needs on a device, and what a service would achieve and cost: `servekit plan`.

May import the replay of journals, the laboratory, and what these may import. Nothing here reads a clock.
"""
