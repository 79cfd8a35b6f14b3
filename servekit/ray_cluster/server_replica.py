"""A replica of Ray Serve that owns one `servekit serve` on its node, and passes requests on to it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator

import aiohttp
from yarl import URL

from servekit.ray_cluster.forwarding import ForwardedRequest, Headers, end_to_end
from servekit.ray_cluster.scaling import report
from servekit.ray_cluster.serve_settings import server_environment

log = logging.getLogger("ray.serve")

READY_INTERVAL_S = 0.1
WATCH_INTERVAL_S = 0.2  # in which the end of the server is noticed
READY_TIMEOUT_S = 10.0
END_MARGIN_S = 15.0  # for a server to end, beyond its shutdown_timeout

# A replica has many threads, so nothing of Python may run between fork and exec. The new process asks for its end with
# the replica's by itself, and then becomes the server.
_LAUNCH = """
import os, sys
from servekit.protocol.child_process import die_with_parent
die_with_parent(int(sys.argv[1]))
os.execv(sys.executable, [sys.executable, "-P", "-m", "servekit", "serve"])
"""


class ServerReplica:
    """One server. It ends with this object, and is killed if this process is."""

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self,
        environment: dict[str, str],
        num_slots: int,
        metrics_key: str | None,
        load_timeout_s: float,
        shutdown_timeout_s: float,
    ) -> None:
        """Start the server, and wait until it is ready. Raises RuntimeError if it ends, or takes too long.

        `num_slots` is how many sequences run at a time in each replica that the server has itself. Raises ConfigError
        if the node has API keys in its variables, and the settings have none.
        """
        variables = server_environment(os.environ, environment)
        ignored = sorted(os.environ.keys() - variables.keys())
        if ignored:
            log.warning("ignoring %s of this node: all settings are those of the application", ", ".join(ignored))
        port = _free_port()
        self._url = f"http://127.0.0.1:{port}"
        self._num_slots = num_slots
        self._metrics_headers = {} if metrics_key is None else {"Authorization": f"Bearer {metrics_key}"}
        self._shutdown_timeout_s = shutdown_timeout_s
        self._client = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),  # the server limits connections and times
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
            skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
        )
        # The kernel kills the server when the thread that started it ends: this one, which lives as long as the actor.
        self._process = subprocess.Popen(  # noqa: ASYNC220  # takes some milliseconds, and nothing else runs here
            [sys.executable, "-P", "-c", _LAUNCH, str(os.getpid())],
            stdin=subprocess.DEVNULL,
            env={**variables, "SERVEKIT_HOST": "127.0.0.1", "SERVEKIT_PORT": str(port)},
        )
        try:
            await self._wait_until_ready(load_timeout_s)
        except BaseException:
            self._process.kill()
            await self._client.close()
            raise
        self._watcher = asyncio.create_task(self._end_with_server(), name="watches the server")

    async def forward(self, request: ForwardedRequest) -> AsyncIterator[tuple[int, Headers] | bytes]:
        """Yield the status and the headers of the answer, and then its body in pieces.

        If the client goes, Ray Serve cancels this, and the server ends the request because its connection closes.
        """
        url = URL(self._url + request.path, encoded=True)
        async with self._client.request(
            request.method, url, headers=request.headers, data=request.body or None, allow_redirects=False
        ) as response:
            yield response.status, end_to_end(response.headers.items())
            async for piece in response.content.iter_any():
                yield piece

    async def check_health(self) -> None:
        """Raise RuntimeError if the server is not ready. Ray Serve replaces a replica after three failures in a row."""
        if not await self._is_ready():
            raise RuntimeError("servekit serve is not ready: GET /ready did not answer 200")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return what `PredictedWaitPolicy` decides by. Ray Serve calls it several times in each look-back period."""
        async with self._client.get(f"{self._url}/metrics", headers=self._metrics_headers) as response:
            text = await response.text()
            if response.status != 200:
                raise RuntimeError(f"GET /metrics was refused with status {response.status}: {text}")
        return report(text, self._num_slots)

    async def __del__(self) -> None:
        """Drain and end the server. Ray Serve calls this when all requests are answered and no more can come."""
        if not hasattr(self, "_watcher"):  # it could not be started
            return
        self._watcher.cancel()
        self._process.send_signal(signal.SIGTERM)
        try:
            await asyncio.to_thread(self._process.wait, self._shutdown_timeout_s + END_MARGIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
        await self._client.close()

    async def _end_with_server(self) -> None:
        """End this process if the server ends by itself.

        Ray Serve's routers notice the end of a replica with the next request, and send that to another one. A replica
        that only failed its health checks would get requests, and refuse them, for half a minute.
        """
        while self._process.poll() is None:  # noqa: ASYNC110  # nothing in this process sets an event
            await asyncio.sleep(WATCH_INTERVAL_S)
        log.error("servekit serve ended with code %d; this replica ends, too", self._process.returncode)
        os._exit(1)

    async def _wait_until_ready(self, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not await self._is_ready():
            if self._process.poll() is not None:
                raise RuntimeError(
                    f"servekit serve ended with code {self._process.returncode}; the log of this replica says why"
                )
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"servekit serve was not ready within {timeout_s:g} s (load_timeout)")
            await asyncio.sleep(READY_INTERVAL_S)

    async def _is_ready(self) -> bool:
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with asyncio.timeout(READY_TIMEOUT_S), self._client.get(f"{self._url}/ready") as response:
                is_ready: bool = response.status == 200
                return is_ready
        return False


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port
