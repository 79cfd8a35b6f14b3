"""Measure what an open stream costs the server: memory and asyncio tasks, with the simulated model.

    python benchmarks/open_streams.py [--streams 4000]

Clients are plain sockets that read what arrives. Memory is resident memory, before the streams and when all of them
have had two tokens; the difference is divided by their number.
"""

from __future__ import annotations

import argparse
import json
import selectors
import socket
import tempfile
from pathlib import Path

from benchmarks.progress import Progress, tell
from tests.support.server_process import ServerProcess, serving

MAX_TOKENS = 200  # more than arrive during the measurement


def resident_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def open_stream(server: ServerProcess, number: int) -> socket.socket:
    body = {"prompt": f"Query {number}: how far is it from here to there?", "max_tokens": MAX_TOKENS}
    content = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", server.port))
    head = f"POST /generate_stream HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n"
    connection.sendall(head.encode() + content)
    return connection


def read_until_all_stream(connections: list[socket.socket], num_events: int) -> None:
    """Read until each connection has received `num_events` events."""
    received = dict.fromkeys(connections, 0)
    with selectors.DefaultSelector() as selector:
        for connection in connections:
            selector.register(connection, selectors.EVENT_READ)
        while min(received.values()) < num_events:
            for key, _ in selector.select(60):
                content = key.fileobj.recv(2**16)  # type: ignore[union-attr]
                assert content and b"HTTP/1.1 5" not in content, f"a stream did not begin: {content!r}"
                received[key.fileobj] += content.count(b"data:")  # type: ignore[index]


def measure(num_streams: int) -> None:
    limits = ("--max-num-seqs", str(num_streams), "--max-connections", str(num_streams + 100))
    limits += ("--num-kv-blocks", str(20 * num_streams))  # every sequence must be able to run, at its maximum length
    limits += (
        "--max-predicted-wait",
        "0",
        "--max-num-queued-reqs",
        str(num_streams),
        "--max-num-batched-tokens",
        str(16 * num_streams),
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = ("--model", "sim:step=500ms", "--log-level", "warning", *limits)
        with serving(*arguments, log=Path(folder) / "log") as server, Progress("stages", 4) as progress:
            progress.begin("warm-up with 100 streams")
            read_until_all_stream(
                [open_stream(server, i) for i in range(100)], 2
            )  # allocations that only the first streams cause
            server.wait_until_at_rest()
            pids = {"server": server.process.pid, "worker": server.worker_pids()[0]}
            before = {name: resident_bytes(pid) for name, pid in pids.items()}
            tasks = server.metric("servekit_api_event_loop_tasks")
            progress.begin(f"opening {num_streams:,} streams")
            connections = [open_stream(server, i) for i in range(num_streams)]
            progress.begin("waiting for two tokens of each")
            read_until_all_stream(connections, 2)
            for name, pid in pids.items():
                cost = (resident_bytes(pid) - before[name]) / num_streams / 1024
                tell(f"{name}: {cost:.1f} KiB for each of {num_streams} streams")
            tasks = server.metric("servekit_api_event_loop_tasks") - tasks
            tell(f"tasks: {tasks / num_streams:.2f} for each")
            progress.begin("waiting until the server is at rest")
            for connection in connections:
                connection.close()
            server.wait_until_at_rest()
            kept = resident_bytes(pids["server"]) - before["server"]
            tell(f"server: {kept / 2**20:.0f} MiB more than before after all streams have ended")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--streams", type=int, default=4000)
    measure(parser.parse_args().streams)


if __name__ == "__main__":
    main()
