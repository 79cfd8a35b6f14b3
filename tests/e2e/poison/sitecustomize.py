"""A bug in a worker that one token brings out. Python imports this by its name from PYTHONPATH, in every process."""

import os
import sys

if "servekit.worker" in sys.orig_argv:
    from workers.runner import model_runner

    _make_batch = model_runner.make_batch
    _poison = int(os.environ["POISON_TOKEN"])

    def _make_poisoned_batch(plan, table):  # type: ignore[no-untyped-def]
        if any(_poison in row.token_ids for row in plan.chunks):
            os._exit(3)
        return _make_batch(plan, table)

    model_runner.make_batch = _make_poisoned_batch
