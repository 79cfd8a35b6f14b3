"""`python -m servekit` is the `servekit` command."""

import sys

from servekit.cli import main

sys.exit(main())
