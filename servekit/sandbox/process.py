"""Run jobs with untrusted input of clients, in a forked process that the server may kill.

Chat templates are programs, and grammars can be enormous. The server limits the processor time of each job, and the
kernel limits the memory of this process. A job that exceeds a limit ends only this process.
"""

from __future__ import annotations

import resource
from collections.abc import Callable
from typing import Any

from servekit.protocol.child_process import die_with_parent, limit_address_space
from servekit.protocol.framing import MessageReceiver, MessageSender, adopt_reader, adopt_writer
from servekit.sandbox.jobs import Job, Outcome, Refused

# Smaller than the worker's stack: a grammar that overflows a stack is detected here, before it reaches the worker.
STACK_BYTES = 4 * 2**20

Handlers = dict[type[Any], Callable[[Any], Outcome]]  # the function that runs each kind of job


def run_jobs(handlers: Handlers, channel: int, parent_pid: int, memory_bytes: int) -> None:
    """Run one job after the other, until the server closes the socket whose file descriptor is `channel`."""
    die_with_parent(parent_pid)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the server would wait for a dump of half a gigabyte
    resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, STACK_BYTES))
    limit_address_space(memory_bytes)
    jobs = MessageReceiver[Job](adopt_reader(channel), Job)
    outcomes = MessageSender[Outcome](adopt_writer(channel))
    while True:
        try:
            job = jobs.receive()
            outcome = handlers[type(job)](job)
        except EOFError:
            return
        except MemoryError:
            outcome = Refused("it takes more memory than a request may have")
        except RecursionError:
            outcome = Refused("it is nested too deeply")
        except Exception as error:
            outcome = Refused(f"{type(error).__name__}: {error}")
        outcomes.send(outcome)
