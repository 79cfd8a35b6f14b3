"""The HTTP API of one engine: `servekit.api.app` puts its routes and layers together.

May import engine and everything below it.
"""
