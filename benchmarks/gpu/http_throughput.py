"""Compare streams over HTTP with the same requests in this process: what the API server costs."""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.gpu.byte_tokenizer import tokenizer_file
from benchmarks.gpu.requirements import REQUIRED_BY_SERVER
from benchmarks.gpu.sequences import Sequences
from benchmarks.gpu.session import ROOT, Session, environment, require_modules
from benchmarks.gpu.shapes import HTTP_GOAL, Shape
from benchmarks.gpu.stage_process import run_stage
from workers.runner.model_runner import make_runner


def run(session: Session) -> None:
    require_modules(REQUIRED_BY_SERVER, "a package that the server or its clients need")
    clients, num_input, num_output, waves = (128, 1024, 256, 3) if session.on_gpu else (4, 32, 16, 2)
    shape = session.shapes[0]
    named, rates = {"shape": shape.name, "clients": clients}, {}
    flags = ["--max-num-seqs", str(clients), "--max-num-batched-tokens", "8192", "--no-enable-prefix-caching"]
    flags += [] if session.on_gpu else ["--num-kv-blocks", "256"]
    with session.model_folder(shape) as folder, _serving(session, shape, folder, flags) as port:
        for interval in (1, 8):
            with session.row("http", **named, side=f"over HTTP, stream_interval {interval}") as row:
                row |= _over_http(port, interval, clients, num_input, num_output, waves)
                rates[interval] = row["tokens_per_s"]
    with session.row("http", **named, side="without") as row:
        row |= _without(session, shape, clients, num_input, num_output)
        without = row["tokens_per_s"]
        for interval, rate in rates.items():
            with session.row("http_share", side=f"stream_interval {interval}") as share:
                share["share"], share["goal"] = rate / without, HTTP_GOAL if session.on_gpu else None


def _over_http(port: int, interval: int, clients: int, num_input: int, num_output: int, waves: int) -> dict[str, Any]:
    """Run closed-loop clients: each sends its next request when the last one is answered, so answers come in waves."""
    from loadtest import experiment as load
    from loadtest.record import Outcome
    from loadtest.target import ApiFormat, Target

    target = Target(
        urls=[f"http://127.0.0.1:{port}"],
        api=ApiFormat.GENERATE_STREAM,
        model="any",
        fields={"ignore_eos": True, "temperature": 0.0, "stream_interval": interval},
    )
    experiment = load.Experiment(
        target=target,
        arrivals=f"closed:{clients}",
        workload=f"random:input={num_input},output={num_output}",
        num_requests=waves * clients,
        characters_per_token=1.0,
        seed=interval,
        num_warm_up=clients,  # captures the graphs
    )
    trial = load.run(experiment, "HTTP", None)
    bad = {record.outcome for record in trial.result.records} - {Outcome.OK}
    assert not bad, f"{trial.summary.failures}"
    figures = trial.summary.full
    lag = trial.summary.event_loop_lag_s
    return {
        "tokens_per_s": figures.output_tokens_per_s,
        "ttft_p50_s": figures.ttft_s.p50 if figures.ttft_s else None,
        "tpot_p50_s": figures.tpot_s.p50 if figures.tpot_s else None,
        "client_lag_p99_s": lag.p99 if lag else None,
        "is_valid": trial.summary.is_valid,
    }


def _without(session: Session, shape: Shape, clients: int, num_input: int, num_output: int) -> dict[str, float]:
    """Compute one wave: all prompts in steps as large as the server's, then a token for each sequence in every step."""
    loaded = session.load(shape)
    runner = make_runner(loaded, session.settings(clients, num_input + num_output + 8))
    Sequences(runner, clients, num_input, num_output + 8).run(3)  # captures the graphs
    sequences = Sequences(runner, clients, num_input, num_output + 8)
    started = time.perf_counter()
    sequences.run(num_output - 2)  # the prompts gave a token each, and no step follows the last one
    wave_s = sequences.prefill_s + time.perf_counter() - started
    return {"tokens_per_s": clients * num_output / wave_s, "prefill_s": sequences.prefill_s}


@contextmanager
def _serving(session: Session, shape: Shape, folder: Path, flags: list[str]) -> Iterator[int]:
    """Serve the shape with random weights on a free port; stop the server in any case."""
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_file(shape.vocab_size)))
    port = _free_port()
    command = [sys.executable, "-m", "servekit", "serve", str(folder), "--load-format", "dummy", "--dtype", "bfloat16"]
    command += ["--device", str(session.device), "--port", str(port), "--log-level", "info", *flags]
    log = folder / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, env=environment())
    try:
        _wait_until_ready(process, port, min(240.0, session.left_s))
        yield port
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=20)
        process.kill()
        process.wait()
        with log.open() as lines:
            shutil.copyfileobj(lines, sys.stdout)


def _wait_until_ready(process: subprocess.Popen[bytes], port: int, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        assert process.poll() is None, f"the server ended with code {process.returncode}"
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        with suppress(OSError, http.client.HTTPException):
            connection.request("GET", "/ready")
            if connection.getresponse().status == 200:
                return
        connection.close()
        time.sleep(0.1)
    raise AssertionError(f"the server was not ready after {limit_s:.0f} s")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


if __name__ == "__main__":
    run_stage(run)
