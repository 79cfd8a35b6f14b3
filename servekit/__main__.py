"""Run the `servekit` command: `python -m servekit`."""

import sys

from servekit.cli import main

sys.exit(main())
