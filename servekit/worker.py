"""`python -m servekit.worker`: from argv to a running model worker.

The server starts one for each device. It is given its two queues as open file descriptors; there is nothing to type
by hand. Torch is imported only after the arguments are in order.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import servekit
from servekit.errors import ConfigError
from servekit.logs import configure_logging
from servekit.messages import FromWorker, ToWorker, WorkerFailed
from servekit.processes import die_with_parent, ignore_signals, leave_traces
from servekit.queues import MessageReceiver, MessageSender, adopt_reader, adopt_writer


def main(argv: Sequence[str] | None = None) -> int:
    """Serve step plans until the manager says goodbye or goes away."""
    parser = argparse.ArgumentParser(prog="python -m servekit.worker", description=__doc__.splitlines()[0])
    parser.add_argument("--task-fd", type=int, required=True, help="file descriptor to read step plans from")
    parser.add_argument("--result-fd", type=int, required=True, help="file descriptor to write results to")
    parser.add_argument("--parent-pid", type=int, required=True, help="the manager; the worker dies with it")
    parser.add_argument("--log-level", default="info")
    parser.add_argument("--log-format", default="text")
    arguments = parser.parse_args(argv)
    configure_logging(arguments.log_level, arguments.log_format)
    die_with_parent(arguments.parent_pid)
    ignore_signals()
    leave_traces()
    tasks = MessageReceiver[ToWorker](adopt_reader(arguments.task_fd), ToWorker)
    results = MessageSender[FromWorker](adopt_writer(arguments.result_fd))
    try:
        refuse_foreign_workers()
    except ConfigError as error:
        results.send(WorkerFailed(error.message, is_config_error=True))
        return 2

    from workers.model_worker import ModelWorker

    return ModelWorker(tasks, results).run()


def refuse_foreign_workers() -> None:
    """Raise ConfigError if another distribution's `workers` package hides ours."""
    import workers

    ours, found = Path(servekit.__file__).parent.parent, Path(workers.__file__ or "").parent.parent
    if ours != found:
        raise ConfigError(f"another package named 'workers' in {found} hides servekit's in {ours}; uninstall it")


if __name__ == "__main__":
    sys.exit(main())
