"""Compare servekit with other servers in one run: the same model, prompts and load generator.

    python -m benchmarks.against_peers --model PATH --peer vllm=http://127.0.0.1:8101 [--rounds 3] [--clients 1 8 32]
    python -m benchmarks.against_peers --model PATH --serve "--quantization int8" \\
        --server "llama.cpp=llama-server -m MODEL.gguf --port {port}" [--accuracy 200]

The benchmark starts servekit, and each `--server` by its command. A peer is any server that answers `/v1/completions`
at its address; it must have no other load. Rounds alternate between the servers, so a noisy machine affects all of
them, and each figure is the median of its rounds. Sampling is greedy, with answers of a fixed length, so a peer must
support `ignore_eos`. Requests that were not answered completely are reported.

With `--accuracy`, one more servekit computes in float32, and a column has the share of prompts that a server continues
with the same token. Servers with weights of fewer bits are faster and less accurate, so a table of both has to show it.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx2
import numpy as np

from benchmarks.medians import median_of, p50
from benchmarks.progress import Progress, tell
from loadtest.analysis.summary import Summary
from loadtest.experiment import Experiment, run
from loadtest.planning.text import TextGenerator
from loadtest.reporting.formatting import as_number, as_time
from loadtest.target import ApiFormat, Target
from tests.support.server_process import free_port, serving

# Prompts of 64 to 512 tokens and answers of 64; then 544 tokens of which 512 are the same for all, and answers of 32.
WORKLOADS = {
    "mixed": "random:input=uniform:64-512,output=64",
    "shared prefix": "prefix:groups=1,prefix=512,suffix=32,output=32",
}
ACCURACY_PROMPT = 64  # tokens
START_TIMEOUT_S = 300.0


@contextmanager
def started(command: str, log: Path) -> Iterator[str]:
    """Start a server whose command takes its port as {port}. Yield its address as soon as it is ready."""
    port = free_port()
    url, deadline_s = f"http://127.0.0.1:{port}", time.monotonic() + START_TIMEOUT_S
    with log.open("wb") as output:
        arguments = shlex.split(command.replace("{port}", str(port)))
        process = subprocess.Popen(arguments, stdout=output, stderr=subprocess.STDOUT)
    try:
        while True:
            with suppress(httpx2.TransportError):
                if is_ready(url):
                    break
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise SystemExit(f"{command} did not start:\n{log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.wait()


def is_ready(url: str) -> bool:
    """Whether /ready answers 200; of a server without that route, /health."""
    status = httpx2.get(f"{url}/ready").status_code
    return status == 200 or (status == 404 and httpx2.get(f"{url}/health").status_code == 200)


def first_tokens(url: str, prompts: list[str]) -> list[str]:
    """Return the text of the likeliest token after each prompt."""
    listed = httpx2.get(f"{url}/v1/models")
    fields = {"model": listed.json()["data"][0]["id"]} if listed.status_code == 200 else {}
    fields |= {"max_tokens": 1, "temperature": 0, "ignore_eos": True, "stream": True}
    found = []
    for prompt in prompts:
        text = ""
        with httpx2.stream("POST", f"{url}/v1/completions", json=fields | {"prompt": prompt}, timeout=120) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    text += "".join(choice["text"] for choice in json.loads(line[6:])["choices"])
        found.append(text)
    return found


def accuracies(urls: dict[str, str], reference: str, num_prompts: int, characters_per_token: float) -> dict[str, str]:
    """Return how often each server's first token is that of the server at `reference`."""
    texts = TextGenerator(np.random.default_rng(0), characters_per_token)
    prompts = [texts.passage(number, ACCURACY_PROMPT) for number in range(num_prompts)]
    expected, found = first_tokens(reference, prompts), {}
    for side, url in urls.items():
        same = sum(ours == theirs for ours, theirs in zip(first_tokens(url, prompts), expected, strict=True))
        found[side] = f"{100 * same / num_prompts:.0f} %"
    return found


def ask(
    url: str,
    workload: str,
    num_clients: int,
    seed: int,
    num_requests: int,
    characters_per_token: float,
    *,
    keep_alive: bool = True,
) -> Summary:
    """Run one round. The prompts are the same for all servers, and new in each round."""
    target = Target(urls=[url], api=ApiFormat.COMPLETIONS, fields={"temperature": 0.0}, keep_alive=keep_alive)
    experiment = Experiment(
        target=target,
        arrivals=f"closed:{num_clients}",
        workload=workload,
        num_requests=num_requests,
        characters_per_token=characters_per_token,
        seed=seed,
        num_warm_up=min(num_clients, 4),
    )
    summary = run(experiment, url, None).summary
    if not summary.is_valid or summary.failures:
        tell(f"{url}: {summary.invalid_because} {summary.failures}", file=sys.stderr)
    return summary


def row(name: str, num_clients: int, sides: dict[str, list[Summary]], accuracy: dict[str, str]) -> str:
    """Return a table row: rate, times and accuracy of each server, and the ratio of servekit's rate to the others'.

    An asterisk marks a round in which the client was late. That can happen beside a server that uses all cores, and the
    times are then a little too long.
    """
    rates = {side: median_of(rounds, lambda each: each.output_tokens_per_s) for side, rounds in sides.items()}
    ours = rates["servekit"]
    cells = [name, str(num_clients)]
    for side, rounds in sides.items():
        times = [median_of(rounds, p50(of)) for of in (lambda each: each.ttft_s, lambda each: each.tpot_s)]
        mark = "" if all(each.is_valid for each in rounds) else " *"
        cells += [as_number(rates[side]) + mark, *map(as_time, times), *([accuracy[side]] if accuracy else [])]
    cells += [f"{ours / rate:.2f}" if ours and rate else "-" for side, rate in rates.items() if side != "servekit"]
    return f"| {' | '.join(cells)} |"


def play(urls: dict[str, str], accuracy: dict[str, str], arguments: argparse.Namespace) -> None:
    """Measure all servers in turn, and print a row for each load."""
    num_steps = len(arguments.workloads) * len(arguments.clients) * arguments.rounds * len(urls)
    with Progress("rounds", num_steps) as progress:
        for number, name in enumerate(arguments.workloads):
            for num_clients in arguments.clients:
                sides: dict[str, list[Summary]] = {side: [] for side in urls}
                num_requests = max(arguments.min_requests, arguments.requests_per_client * num_clients)
                for of_round in range(arguments.rounds):
                    seed = 1000 * number + 100 * of_round + num_clients
                    for side, url in urls.items():
                        progress.begin(f"{side}, {name}, {num_clients} clients")
                        sizes = num_requests, arguments.characters_per_token
                        keep_alive = not arguments.no_keep_alive
                        summary = ask(url, WORKLOADS[name], num_clients, seed, *sizes, keep_alive=keep_alive)
                        sides[side].append(summary)
                tell(row(name, num_clients, sides, accuracy))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="demo", help="model that servekit serves")
    parser.add_argument("--serve", default="", help="further flags of servekit serve, separated by spaces")
    parser.add_argument("--url", help="address of a running servekit; by default the benchmark starts one")
    parser.add_argument(
        "--peer", action="append", default=[], metavar="NAME=URL", help="another server; can be repeated"
    )
    parser.add_argument(
        "--server",
        action="append",
        default=[],
        metavar="NAME=COMMAND",
        help="another server, which is started by its command, with {port} as its port; can be repeated",
    )
    parser.add_argument("--accuracy", type=int, default=0, metavar="NUM", help="prompts of the column of accuracy")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--workloads", nargs="+", choices=[*WORKLOADS], default=[*WORKLOADS])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests-per-client", type=int, default=4)
    parser.add_argument("--min-requests", type=int, default=10)
    parser.add_argument("--characters-per-token", type=float, default=4.0)
    parser.add_argument(
        "--no-keep-alive",
        action="store_true",
        help="open a connection for each request, to all servers: some close theirs without saying so",
    )
    arguments = parser.parse_args()
    print(f"{os.cpu_count()} cores, {arguments.model}, median of {arguments.rounds} rounds", flush=True)
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        folder = Path(temporary)
        common = ("--model", arguments.model, "--log-level", "warning")
        if arguments.url:
            urls = {"servekit": arguments.url}
        else:
            flags = (*common, *arguments.serve.split())
            urls = {"servekit": stack.enter_context(serving(*flags, log=folder / "log")).url}
        urls |= dict(each.split("=", 1) for each in arguments.peer)
        for number, (name, command) in enumerate(each.split("=", 1) for each in arguments.server):
            urls[name] = stack.enter_context(started(command, folder / f"log-{number}"))
        accuracy = {}
        if arguments.accuracy:
            exact = ("--dtype", "float32", "--num-kv-blocks", "128")
            with serving(*common, *exact, log=folder / "log-float32") as reference:
                accuracy = accuracies(urls, reference.url, arguments.accuracy, arguments.characters_per_token)
        of_each = ["tokens/s", "TTFT p50", "TPOT p50", *(["first token as in float32"] if accuracy else [])]
        heads = [f"{name}, {what}" for name in urls for what in of_each]
        heads += [f"servekit / {name}" for name in urls if name != "servekit"]
        print(f"\n| load | clients | {' | '.join(heads)} |\n|---|{'---:|' * (len(heads) + 1)}", flush=True)
        play(urls, accuracy, arguments)


if __name__ == "__main__":
    main()
