"""`python -m loadtest`; see loadtest/cli."""

from __future__ import annotations

import sys

from loadtest.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
