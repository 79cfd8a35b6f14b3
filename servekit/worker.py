"""`python -m servekit.worker`: run a model worker.

The server starts one worker for each device, and passes it two pipes as open file descriptors. It is not meant to be
started by hand. Torch is imported only after the arguments have been checked.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import servekit
from servekit.errors import ConfigError
from servekit.protocol.child_process import die_with_parent, dump_stacks_on_crash, ignore_signals
from servekit.protocol.framing import MessageReceiver, MessageSender, adopt_reader, adopt_writer
from servekit.protocol.logging import configure_logging
from servekit.protocol.messages import FromWorker, ToWorker, WorkerFailed


def main(argv: Sequence[str] | None = None) -> int:
    """Execute step plans until the server sends Shutdown or exits."""
    parser = argparse.ArgumentParser(prog="python -m servekit.worker", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--task-fd", type=int, required=True, help="file descriptor to read step plans from")
    parser.add_argument("--result-fd", type=int, required=True, help="file descriptor to write results to")
    parser.add_argument("--parent-pid", type=int, required=True, help="the server's process id; this exits with it")
    parser.add_argument("--log-level", default="info")
    parser.add_argument("--log-format", default="text")
    arguments = parser.parse_args(argv)
    configure_logging(arguments.log_level, arguments.log_format)
    die_with_parent(arguments.parent_pid)
    ignore_signals()
    dump_stacks_on_crash()
    tasks = MessageReceiver[ToWorker](adopt_reader(arguments.task_fd), ToWorker)
    results = MessageSender[FromWorker](adopt_writer(arguments.result_fd))
    try:
        check_workers_package()
    except ConfigError as error:
        results.send(WorkerFailed(error.message, is_config_error=True))
        return 2

    from workers.model_worker import ModelWorker

    return ModelWorker(tasks, results).run()


def check_workers_package() -> None:
    """Raise ConfigError if the `workers` package of another distribution shadows servekit's."""
    import workers

    ours, found = Path(servekit.__file__).parent.parent, Path(workers.__file__ or "").parent.parent
    if ours != found:
        raise ConfigError(
            f"the package 'workers' in {found} shadows servekit's package of that name in {ours}; uninstall the former"
        )


if __name__ == "__main__":
    sys.exit(main())
