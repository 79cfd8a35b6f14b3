"""Run servekit on a Ray cluster: place the workers of a server on its nodes, and run servers with Ray Serve.

This is the only package that imports Ray, in processes of its own. May import joining, protocol, config, errors.
"""
