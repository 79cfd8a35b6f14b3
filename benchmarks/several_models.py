"""Compare two ways to serve a text classifier, an image classifier and an LLM from one server.

    python -m benchmarks.several_models

Cost-optimised: memory for two of the three models, which are loaded on demand. Latency-optimised: all three stay
loaded. Both servers run at the same time, and requests go to them in turn. The first table has the latency of a request
whose model has to be loaded first (cold), and of one whose model is loaded (hot). The second one has what a client
notices that asks for the models at random, most often for the LLM.

The models are small random ones and the demo model; --texts, --images and --chat take others. Then most of a cold start
is what a worker process takes to import torch and transformers.
"""

from __future__ import annotations

import argparse
import base64
import random
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from msgspec import Struct, field

from tests.support import proc
from tests.support.predictor_checkpoints import make_classifier, make_image, make_image_classifier
from tests.support.server_process import ServerProcess, serving
from tests.torture.report import percentile

MODELS = ("texts", "images", "chat")
WEIGHTS = (20, 10, 70)  # of the models, in the random requests
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "texts": ("/predict", {"input": "cats and dogs sleep, and the fish swim."}),
    "images": ("/predict", {"image": base64.b64encode(make_image(224, 224, "JPEG")).decode()}),
    "chat": ("/v1/completions", {"prompt": "What color is the sky?", "max_tokens": 16, "temperature": 0}),
}


def write_models(folder: Path, paths: dict[str, str], keep: str, room: int) -> Path:
    """Write a model file with memory for `room` of the models."""
    text = f"[memory]\ncpu = {100 * room}\n"
    for name in MODELS:
        text += f'[[model]]\nid = "{name}"\nmodel = "{paths[name]}"\nkeep = "{keep}"\n'
        text += 'device = "cpu"\nmemory_bytes = 100\n'
    file = folder / f"{keep}.toml"
    file.write_text(text)
    return file


def ask(server: ServerProcess, model: str) -> float:
    """Return the seconds of one request."""
    path, body = BODIES[model]
    started = time.perf_counter()
    server.client.post(path, json={"model": model, **body}).raise_for_status()
    return time.perf_counter() - started


def workers_mib(server: ServerProcess) -> float:
    return sum(map(proc.resident_mib, server.worker_pids()))


class Measured(Struct):
    """What one way of serving took, in seconds, by model."""

    first: dict[str, list[float]] = field(default_factory=lambda: {model: [] for model in MODELS})
    others: dict[str, list[float]] = field(default_factory=lambda: {model: [] for model in MODELS})
    mixed: list[float] = field(default_factory=list)
    memory_mib: float = 0.0
    num_loads: float = 0.0


def measure(servers: dict[str, ServerProcess], rounds: int, hot: int, chosen: list[str]) -> dict[str, Measured]:
    """Measure the first request of each round and the others, and then the requests for the chosen models.

    With memory for two models, the three in turn make each other make room: each first request is cold. The servers
    take turns with each request, so that whatever else the machine does is the same for both.
    """
    found = {way: Measured() for way in servers}
    for server in servers.values():
        for model in MODELS[1:]:  # so that the first one is cold when the rounds begin
            ask(server, model)
    for _ in range(rounds):
        for model in MODELS:
            for way, server in servers.items():
                found[way].first[model].append(ask(server, model))
            for _ in range(hot):
                for way, server in servers.items():
                    found[way].others[model].append(ask(server, model))
    before = {way: server.metric("servekit_model_loads_total") for way, server in servers.items()}
    for model in chosen:
        for way, server in servers.items():
            found[way].mixed.append(ask(server, model))
    for way, server in servers.items():
        found[way].num_loads = server.metric("servekit_model_loads_total") - before[way]
        found[way].memory_mib = workers_mib(server)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--texts", help="a checkpoint that classifies texts")
    parser.add_argument("--images", help="a checkpoint that classifies images")
    parser.add_argument("--chat", default="demo", help="a model that generates text")
    parser.add_argument("--rounds", type=int, default=5, help="cold requests for each model")
    parser.add_argument("--hot", type=int, default=20, help="hot requests for each model and round")
    parser.add_argument("--requests", type=int, default=60, help="requests at random")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = {
            "texts": arguments.texts or str(make_classifier(folder / "texts")),
            "images": arguments.images or str(make_image_classifier(folder / "images")),
            "chat": arguments.chat,
        }
        ways = {
            "cost-optimised": write_models(folder, paths, "on_demand", 2),
            "latency-optimised": write_models(folder, paths, "always", 3),
        }
        chosen = random.Random(7).choices(MODELS, WEIGHTS, k=arguments.requests)
        with ExitStack() as stack:
            servers = {
                way: stack.enter_context(serving("--models", str(file), log=folder / f"{way}.log"))
                for way, file in ways.items()
            }
            print_tables(measure(servers, arguments.rounds, arguments.hot, chosen))


def print_tables(found: dict[str, Measured]) -> None:
    cost, latency = found.values()
    print("| median latency | cost-optimised, cold | cost-optimised, hot | latency-optimised |")
    print("|---|---:|---:|---:|")
    for model in MODELS:
        values = (median(cost.first[model]), median(cost.others[model]), median(latency.others[model]))
        print(f"| {model} | " + " | ".join(f"{1e3 * value:,.1f} ms" for value in values) + " |")
    print("\n| requests at random | " + " | ".join(found) + " |")
    print("|---|---:|---:|")
    rows: dict[str, Callable[[Measured], str]] = {
        "median": lambda way: f"{1e3 * median(way.mixed):,.1f} ms",
        "95th percentile": lambda way: f"{1e3 * percentile(way.mixed, 0.95):,.1f} ms",
        "requests/s of one client": lambda way: f"{len(way.mixed) / sum(way.mixed):,.1f}",
        "models loaded meanwhile": lambda way: f"{way.num_loads:.0f}",
        "memory of the workers at the end": lambda way: f"{way.memory_mib:,.0f} MiB",
    }
    for name, value in rows.items():
        print(f"| {name} | " + " | ".join(map(value, found.values())) + " |")


if __name__ == "__main__":
    main()
