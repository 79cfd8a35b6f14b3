"""Before torch is imported anywhere: its threads must not spin for long, machines that run tests are busy ones."""

import os

os.environ.setdefault("GOMP_SPINCOUNT", "3000")
