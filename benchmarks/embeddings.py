"""Compare a server of an embedder with sentence-transformers: texts per second, with 1 and 32 clients, and the vectors.

    python -m benchmarks.embeddings MODEL --python PYTHON

PYTHON is an interpreter with sentence-transformers, which servekit does not need. It encodes the same texts one by one,
and in batches of 32, in a process of its own. Both sides take turns, and the medians of all rounds are compared.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx2

from tests.support.server_process import serving

TEXT = "the sky is blue and water flows over old stones while people talk about music science food and travel"
WORDS = TEXT.split(" ")

# Reads a line (batch size), encodes all texts, and writes texts/s; at the end it writes the vectors.
PEER = """
import json, sys, time
from sentence_transformers import SentenceTransformer
model, texts = SentenceTransformer(sys.argv[1], device="cpu"), json.load(open(sys.argv[2]))
model.encode(texts[:32])
print("ready", flush=True)
for line in sys.stdin:
    if line.strip() == "vectors":
        print(json.dumps(model.encode(texts, batch_size=32).tolist()), flush=True)
        continue
    size, started = int(line), time.perf_counter()
    if size == 1:
        for text in texts:
            model.encode(text)
    else:
        model.encode(texts, batch_size=size)
    print(len(texts) / (time.perf_counter() - started), flush=True)
"""


def make_texts(count: int, seed: int) -> list[str]:
    """Return texts of 3 to 60 words, most of them short."""
    generator = random.Random(seed)
    return [" ".join(generator.choices(WORDS, k=min(60, 3 + int(generator.expovariate(1 / 12))))) for _ in range(count)]


def rate(url: str, texts: list[str], num_clients: int) -> float:
    """Return texts/s of clients that each send one text at a time."""
    remaining, lock = iter(texts), threading.Lock()

    def ask() -> None:
        with httpx2.Client(base_url=url, timeout=120) as client:
            while True:
                with lock:
                    text = next(remaining, None)
                if text is None:
                    return
                body = {"input": text, "encoding_format": "base64"}
                client.post("/v1/embeddings", json=body).raise_for_status()

    threads = [threading.Thread(target=ask) for _ in range(num_clients)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(texts) / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--python", required=True, help="interpreter with sentence-transformers")
    parser.add_argument("--texts", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    texts = make_texts(arguments.texts, seed=7)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "texts.json"
        file.write_text(json.dumps(texts))
        command = [arguments.python, "-c", PEER, arguments.model, str(file)]
        with (
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as peer,
            serving(arguments.model, log=Path(folder) / "log") as server,
        ):
            assert peer.stdin is not None and peer.stdout is not None

            def ask_peer(line: str) -> str:
                assert peer.stdin is not None and peer.stdout is not None
                peer.stdin.write(line + "\n")
                peer.stdin.flush()
                return peer.stdout.readline()

            peer.stdout.readline()
            rate(server.url, texts[:64], 8)
            found: dict[str, list[float]] = {}
            for _ in range(arguments.rounds):
                for clients, size in ((1, 1), (32, 32)):
                    found.setdefault(f"servekit, {clients} clients", []).append(rate(server.url, texts, clients))
                    found.setdefault(f"sentence-transformers, batch {size}", []).append(float(ask_peer(str(size))))
            for name, values in found.items():
                print(f"{name:<34} {statistics.median(values):8.0f} texts/s  {[round(value) for value in values]}")
            expected = json.loads(ask_peer("vectors"))
            answer = server.client.post("/v1/embeddings", json={"input": texts}).json()
            pairs = zip((each["embedding"] for each in answer["data"]), expected, strict=True)
            worst = max(abs(a - b) for ours, theirs in pairs for a, b in zip(ours, theirs, strict=True))
            print(f"largest difference of a number: {worst:.1e}")
            peer.stdin.close()


if __name__ == "__main__":
    sys.exit(main())
