"""Compare two ways to serve a text classifier, an image classifier and an LLM from one server.

    python -m benchmarks.several_models

Cost-optimised: memory for two of the three models, which are loaded on demand. Latency-optimised: all three stay
loaded. The first table has the latency of a request whose model has to be loaded first (cold), and of one whose model
is loaded (hot). The second one has what a client notices that asks for the models at random, most often for the LLM.

The models are small random ones and the demo model; --texts, --images and --chat take others. Then most of a cold start
is what a worker process takes to import torch and transformers.
"""

from __future__ import annotations

import argparse
import base64
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

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


def measure(server: ServerProcess, rounds: int, hot: int) -> dict[str, tuple[list[float], list[float]]]:
    """Return the times of the first request of each round and of the others, by model.

    With memory for two models, the three in turn make each other make room: each first request is cold.
    """
    found: dict[str, tuple[list[float], list[float]]] = {model: ([], []) for model in MODELS}
    for _ in range(rounds):
        for model in MODELS:
            first, others = found[model]
            first.append(ask(server, model))
            others += [ask(server, model) for _ in range(hot)]
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
        times: dict[str, dict[str, tuple[list[float], list[float]]]] = {}
        mixed: dict[str, list[float]] = {}
        memory: dict[str, float] = {}
        loads: dict[str, float] = {}
        for way, file in ways.items():
            with serving("--models", str(file), log=folder / f"{way}.log") as server:
                began = time.perf_counter()
                for model in MODELS[1:]:  # so that the first one is cold when the rounds begin
                    ask(server, model)
                times[way] = measure(server, arguments.rounds, arguments.hot)
                before = server.metric("servekit_model_loads_total")
                mixed[way] = [ask(server, model) for model in chosen]
                loads[way] = server.metric("servekit_model_loads_total") - before
                memory[way] = workers_mib(server)
                print(f"{way}: measured for {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    print_tables(times, mixed, memory, loads)


def print_tables(
    times: dict[str, dict[str, tuple[list[float], list[float]]]],
    mixed: dict[str, list[float]],
    memory: dict[str, float],
    loads: dict[str, float],
) -> None:
    cost, latency = times.values()
    print("| median latency | cost-optimised, cold | cost-optimised, hot | latency-optimised |")
    print("|---|---:|---:|---:|")
    for model in MODELS:
        values = (median(cost[model][0]), median(cost[model][1]), median(latency[model][1]))
        print(f"| {model} | " + " | ".join(f"{1e3 * value:,.1f} ms" for value in values) + " |")
    print("\n| requests at random | " + " | ".join(mixed) + " |")
    print("|---|---:|---:|")
    rows: dict[str, Callable[[str], str]] = {
        "median": lambda way: f"{1e3 * median(mixed[way]):,.1f} ms",
        "95th percentile": lambda way: f"{1e3 * percentile(mixed[way], 0.95):,.1f} ms",
        "requests/s of one client": lambda way: f"{len(mixed[way]) / sum(mixed[way]):,.1f}",
        "models loaded meanwhile": lambda way: f"{loads[way]:.0f}",
        "memory of the workers at the end": lambda way: f"{memory[way]:,.0f} MiB",
    }
    for name, value in rows.items():
        print(f"| {name} | " + " | ".join(map(value, mixed)) + " |")


if __name__ == "__main__":
    main()
