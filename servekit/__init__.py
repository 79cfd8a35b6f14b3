"""servekit serves large language models.

docs/ARCHITECTURE.md describes its packages. No module of servekit imports torch.
"""

__version__ = "0.1.0"
