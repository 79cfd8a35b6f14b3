"""`python -m servekit.worker`: run a model worker that joins a server.

A server starts the workers for its own devices itself: with this command, too, and two pipes as open file descriptors.
`servekit quantize` becomes this command, too, files of other formats are converted by it, and `servekit doctor` asks it
what it finds on the machine. Torch is imported only after the arguments have been checked.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

import servekit
from servekit.errors import ConfigError
from servekit.protocol.child_process import die_with_parent, dump_stacks_on_crash, ignore_signals
from servekit.protocol.conversion_job import ConversionJob
from servekit.protocol.cpu_list import format_cpu_list, parse_cpu_list
from servekit.protocol.framing import MessageReceiver, MessageSender, adopt_reader, adopt_writer
from servekit.protocol.light_imports import light_imports
from servekit.protocol.logging import configure_logging, escaped, write_line
from servekit.protocol.messages import FromWorker, ToWorker, WorkerFailed
from servekit.protocol.quantization_job import QuantizationJob

if TYPE_CHECKING:
    from servekit.joining.agent import NodeRanks

USAGE = (
    "usage: python -m servekit.worker --connect ADDRESS --key-file FILE [--device cuda:1], where ADDRESS and FILE are "
    "the --listen-workers and the --worker-key-file of a server; `servekit serve` alone starts its own worker"
)

MASTER_PORT = 29500  # as torchrun's
MAX_RANKS = 1024  # of one worker
MAX_PORT = 65535

# With ranks: one device for each, or the first one of as many.
DEVICE = re.compile(r"auto|cuda|cpu(,cpu)*|cuda:\d+(,cuda:\d+)*")


def main(argv: Sequence[str] | None = None) -> int:
    """Join a server, or execute step plans for the server that started this process. Returns the exit code."""
    arguments = make_parser().parse_args(argv)
    if arguments.facts:
        return write_facts(arguments.model)
    if arguments.convert is not None:
        return convert_files(arguments.convert)
    if arguments.quantize is not None:
        return quantize(arguments.quantize)
    is_child = arguments.task_fd is not None
    if not is_child and (arguments.connect is None or arguments.key_file is None):
        sys.stderr.write(f"{USAGE}\n")
        return 2
    try:
        if arguments.cpus is not None:
            bind_to_cores(arguments.cpus)
        if not is_child:
            return join(arguments)
    except ConfigError as error:
        sys.stderr.write(f"error: {escaped(error.message)}\n")  # anyone may have sent it, in place of the server
        return 2
    return execute(arguments)


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the command line: flags of operators, and those with which a server starts its own workers."""
    parser = argparse.ArgumentParser(prog="python -m servekit.worker", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--connect", metavar="ADDRESS", help="the server's --listen-workers: unix:PATH, tcp://HOST:PORT"
    )
    parser.add_argument("--key-file", metavar="FILE", help="file with the key in the server's --worker-key-file")
    parser.add_argument(
        "--device",
        default="auto",
        help="auto, cpu, cuda or cuda:N; for ranks also cuda:0,cuda:1 (default: auto)",
    )
    parser.add_argument("--model", help="directory or Hugging Face id of the model (default: the server's path)")
    parser.add_argument(
        "--node", metavar="NAME", default="", help="what the server calls this machine (default: its host name)"
    )
    parser.add_argument(
        "--nnodes", type=int, metavar="N", help="machines (nodes) that share the ranks of one worker (default: 1)"
    )
    parser.add_argument("--node-rank", type=int, metavar="N", help="number of this machine among them, from 0")
    parser.add_argument(
        "--nproc-per-node", type=int, metavar="N", help="ranks on each machine (default: as many as --device names)"
    )
    parser.add_argument("--master-addr", metavar="HOST", help="address of node rank 0, at which the ranks meet")
    parser.add_argument("--master-port", type=int, metavar="PORT", help=f"port there (default: {MASTER_PORT})")
    parser.add_argument(
        "--role",
        default="",
        choices=["prefill", "decode"],
        help="only compute prompts, or only decode, where the server has --prefill-replicas (default: it decides)",
    )
    parser.add_argument(
        "--transfer-address",
        metavar="HOST[:PORT]",
        help="where workers on other machines fetch KV blocks (default: this machine's address on its way to the "
        "server, and any free port)",
    )
    parser.add_argument(
        "--transfer-backend",
        default="tcp",
        choices=["tcp", "nixl"],
        help="what carries these KV blocks: tcp, or nixl (RDMA where there is any) if both sides use it (default: tcp)",
    )
    parser.add_argument("--transfer-tls-cert", metavar="FILE", help="certificate for these transfers; needs the key")
    parser.add_argument("--transfer-tls-key", metavar="FILE", help="its private key")
    parser.add_argument("--tls-ca", metavar="FILE", help="certificates that the server's is signed by; turns TLS on")
    parser.add_argument("--cpus", metavar="LIST", help="cores to run on, like 0-7,16-23 (default: all that it may use)")
    parser.add_argument(
        "--cache-dir", metavar="DIR", help="the only folder that the worker writes to, as the server's --cache-dir"
    )
    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    parser.add_argument("--log-format", default="text", choices=["text", "json"])
    for name in ("--task-fd", "--result-fd", "--parent-pid"):  # of a server that starts it
        parser.add_argument(name, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--predictor", action="store_true", help=argparse.SUPPRESS)  # of a server that starts it
    parser.add_argument("--quantize", metavar="JOB", help=argparse.SUPPRESS)  # of `servekit quantize`
    parser.add_argument("--facts", action="store_true", help=argparse.SUPPRESS)  # of `servekit doctor`
    parser.add_argument("--convert", metavar="JOB", help=argparse.SUPPRESS)  # of a server and `servekit convert`
    return parser


def bind_to_cores(text: str) -> None:
    """Bind this process to cores, before it has threads and children, which inherit them. Raises ConfigError."""
    try:
        cpus = set(parse_cpu_list(text))
    except ValueError:
        cpus = set()
    if not cpus:
        raise ConfigError(f"--cpus = {text!r} is not a list of cores; write it like 0-7,16-23")
    allowed = os.sched_getaffinity(0)
    if not cpus <= allowed:
        raise ConfigError(
            f"--cpus = {text!r} names cores {format_cpu_list(cpus - allowed)}, which do not exist or which this "
            f"process may not use; it may use {format_cpu_list(allowed)}"
        )
    os.sched_setaffinity(0, cpus)


def execute(arguments: argparse.Namespace) -> int:
    """Execute step plans, or a predictor's batches, until the server sends Shutdown or exits."""
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

    if arguments.predictor:
        with light_imports():
            from workers.predictor_worker import PredictorWorker

        return PredictorWorker(tasks, results).run()

    from workers.model_worker import ModelWorker

    return ModelWorker(tasks, results).run()


def join(arguments: argparse.Namespace) -> int:
    """Keep a worker joined to a server until a signal. Raises ConfigError."""
    import asyncio  # which a worker process does without, and so starts faster

    import uvloop

    from servekit.joining.address import UnixAddress, parse_address
    from servekit.joining.agent import AgentSettings, run_agent
    from servekit.joining.credentials import read_key, server_tls, worker_tls
    from servekit.joining.transfer_settings import TransferSettings, parse_transfer_address
    from servekit.server.cache_directory import use_cache_directory

    if DEVICE.fullmatch(arguments.device) is None:
        raise ConfigError(
            f"--device = {arguments.device!r} is not accepted: it takes auto, cpu, cuda or cuda:N, or one device for "
            "each rank: cuda:0,cuda:1"
        )
    if arguments.cache_dir is not None:
        use_cache_directory(arguments.cache_dir, os.environ)
    configure_logging(arguments.log_level, arguments.log_format)
    if arguments.parent_pid is not None:  # of what placed it on a cluster
        die_with_parent(arguments.parent_pid)
    address = parse_address(arguments.connect, "--connect")
    if arguments.tls_ca is not None and isinstance(address, UnixAddress):
        raise ConfigError("--tls-ca has no use with a Unix socket, whose bytes do not leave this machine; leave it out")
    transfer_address = parse_transfer_address(arguments.transfer_address)
    ranks = node_of_ranks(arguments)
    if ranks is not None and transfer_address.port + ranks.num_local_ranks - 1 > MAX_PORT:
        raise ConfigError(
            f"--transfer-address = {arguments.transfer_address!r} has the port of the first of {ranks.num_local_ranks} "
            f"ranks, the others have the next ones, and the last port is {MAX_PORT}; use a lower one"
        )
    certificate, private_key = arguments.transfer_tls_cert, arguments.transfer_tls_key
    settings = AgentSettings(
        address=address,
        key=read_key(arguments.key_file, "--key-file"),
        tls=worker_tls(arguments.tls_ca),
        device=arguments.device,
        model=None if arguments.model is None else find_local(arguments.model),
        node=arguments.node,
        role=arguments.role,
        transfers=TransferSettings(
            transfer_address.host,
            transfer_address.port,
            server_tls(certificate, private_key, "--transfer-tls-cert", "--transfer-tls-key"),
            uses_nixl=arguments.transfer_backend == "nixl",
        ),
        process_arguments=("--log-level", arguments.log_level, "--log-format", arguments.log_format),
        node_of_ranks=ranks,
    )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run_agent(settings))


def node_of_ranks(arguments: argparse.Namespace) -> NodeRanks | None:
    """Return which of several machines this one is; None if a worker's ranks are all on one. Raises ConfigError."""
    from servekit.joining.address import TcpAddress, parse_address
    from servekit.joining.agent import NodeRanks

    num_nodes, node_rank = arguments.nnodes, arguments.node_rank
    if num_nodes is None:
        for name in ("node_rank", "nproc_per_node", "master_addr", "master_port"):
            if getattr(arguments, name) is not None:
                option = name.replace("_", "-")
                raise ConfigError(
                    f"--{option} has no effect without --nnodes, the number of machines; set both, or none"
                )
        return None
    num_devices = arguments.device.count(",") + 1
    num_local_ranks = num_devices if arguments.nproc_per_node is None else arguments.nproc_per_node
    if num_nodes < 2:
        raise ConfigError(
            f"--nnodes {num_nodes} is not accepted: it takes 2 machines or more; leave it out if all ranks are on this "
            "machine"
        )
    if num_local_ranks < 1:
        raise ConfigError(f"--nproc-per-node {num_local_ranks} is not accepted: each machine has one rank or more")
    if num_nodes * num_local_ranks > MAX_RANKS:
        raise ConfigError(
            f"--nnodes {num_nodes} times --nproc-per-node {num_local_ranks} are {num_nodes * num_local_ranks} ranks; a "
            f"worker has {MAX_RANKS} at most, so use fewer machines, or fewer ranks on each"
        )
    if num_devices not in (1, num_local_ranks):
        raise ConfigError(
            f"--device names {num_devices} devices, and --nproc-per-node is {num_local_ranks}; name one for each rank "
            "on this machine, or only the first one"
        )
    if node_rank is None or not 0 <= node_rank < num_nodes:
        raise ConfigError(f"--nnodes {num_nodes} needs --node-rank, a number from 0 to {num_nodes - 1}")
    if arguments.master_addr is None:
        raise ConfigError("--nnodes needs --master-addr, an address of node rank 0 that the other machines can reach")
    host = arguments.master_addr.strip("[]")
    port = MASTER_PORT if arguments.master_port is None else arguments.master_port
    where = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
    rendezvous = parse_address(where, "--master-addr, --master-port")
    assert isinstance(rendezvous, TcpAddress)
    return NodeRanks(num_nodes, node_rank, num_local_ranks, rendezvous)


def quantize(job: str) -> int:
    """Write a quantized checkpoint. `job` is a QuantizationJob in JSON. Returns the exit code of the command."""
    configure_logging("info")
    received: list[int] = []

    def interrupt(number: int, _: object) -> None:
        received.append(number)
        raise KeyboardInterrupt  # so that temporary files are removed

    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, interrupt)
    try:
        check_workers_package()

        with light_imports():
            from workers.compression.quantize import quantize_checkpoint

        quantize_checkpoint(msgspec.json.decode(job, type=QuantizationJob))
    except ConfigError as error:
        write_line(f"servekit: {escaped(error.message)}")
        return 2
    except BaseException:
        # A library in compiled code may raise an error of its own in place of the interrupt, as safetensors does.
        if not received:
            raise
        write_line("servekit: interrupted; nothing has been written")
        return 128 + received[0]
    return 0


def write_facts(model: str | None) -> int:
    """Write what this process finds on the machine and in the directory `model`, as JSON. Returns the exit code."""
    try:
        check_workers_package()
    except ConfigError as error:
        write_line(f"servekit: {escaped(error.message)}")
        return 2

    with light_imports():
        from workers.inspection import worker_facts

    sys.stdout.buffer.write(msgspec.json.encode(worker_facts(model)) + b"\n")
    return 0


def convert_files(job: str) -> int:
    """Convert files of a model. `job` is a ConversionJob in JSON. Writes a ConversionOutcome to standard output."""
    check_workers_package()

    with light_imports():
        from workers.conversion.convert import convert

    outcome = convert(msgspec.json.decode(job, type=ConversionJob))
    sys.stdout.buffer.write(msgspec.json.encode(outcome))
    return 0


def find_local(model: str) -> str:
    """Return the path of a model on this machine; for a simulated model, its name. Raises ConfigError."""
    from servekit.engine.model_files import find_model
    from servekit.engine.tokenizer_directory import with_tokenizer
    from servekit.simulation.model import is_simulated

    return model if is_simulated(model) else str(with_tokenizer(find_model(model)))


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
