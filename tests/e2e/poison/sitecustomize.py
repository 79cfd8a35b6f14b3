"""A bug in a worker that one token brings out. Python imports this by its name from PYTHONPATH, in every process."""

import os
import sys

if "servekit.worker" in sys.orig_argv:
    from workers.batch import SlotTable

    _update = SlotTable.update
    _poison = int(os.environ["POISON_TOKEN"])

    def _update_unless_poisoned(table, plan):  # type: ignore[no-untyped-def]
        if any(_poison in row.token_ids for row in plan.chunks):
            os._exit(3)
        _update(table, plan)

    SlotTable.update = _update_unless_poisoned  # type: ignore[method-assign]
