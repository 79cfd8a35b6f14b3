"""`servekit.ray:app`, the name of the Ray Serve application in `serve run` and in config files of `serve deploy`."""

from __future__ import annotations

from servekit.ray_cluster.serve_app import app

__all__ = ["app"]
