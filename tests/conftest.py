"""Before torch is imported anywhere: its threads must not spin, for the machines that run tests are busy ones."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
