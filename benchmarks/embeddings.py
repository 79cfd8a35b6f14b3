"""Compare a server with sentence-transformers: items per second with 1 and 32 clients, and the numbers.

    python -m benchmarks.embeddings [MODEL] --kind embed --python PYTHON

PYTHON is an interpreter with sentence-transformers, which servekit does not need. In a process of its own, it computes
the same texts, or pairs of a query and a text, one by one and in batches of 32. Both sides take turns, and the medians
of all rounds are compared. Without MODEL it is one with random weights and the shape of all-MiniLM-L6-v2.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx2
import torch
import uvloop
from transformers import BertConfig, BertForSequenceClassification, BertModel

from tests.support.predictor_checkpoints import SPECIAL, make_tokenizer, save_checkpoint, write_modules
from tests.support.server_process import serving

TEXT = "the sky is blue and water flows over old stones while people talk about music science food and travel"
WORDS = TEXT.split(" ")
QUERY = "what color is the sky"
MAX_LENGTH = 512

# Reads a line (batch size), computes all texts, and writes items/s; at the end it writes the numbers.
PEER = """
import json, sys, time
from sentence_transformers import CrossEncoder, SentenceTransformer
kind, path, texts = sys.argv[1], sys.argv[2], json.load(open(sys.argv[3]))
if kind == "embed":
    compute = SentenceTransformer(path, device="cpu").encode
    items = texts
else:
    compute = CrossEncoder(path, device="cpu").predict
    items = [(sys.argv[4], text) for text in texts]
compute(items[:32], show_progress_bar=False)
print("ready", flush=True)
for line in sys.stdin:
    if line.strip() == "numbers":
        print(json.dumps(compute(items, batch_size=32, show_progress_bar=False).tolist()), flush=True)
        continue
    size, started = int(line), time.perf_counter()
    if size == 1:
        for item in items:
            compute([item], show_progress_bar=False)
    else:
        compute(items, batch_size=size, show_progress_bar=False)
    print(len(items) / (time.perf_counter() - started), flush=True)
"""


def make_texts(count: int, seed: int) -> list[str]:
    """Return texts of 3 to 60 words, most of them short."""
    generator = random.Random(seed)
    return [" ".join(generator.choices(WORDS, k=min(60, 3 + int(generator.expovariate(1 / 12))))) for _ in range(count)]


def make_model(folder: Path, kind: str) -> Path:
    """Write a checkpoint with random weights and the shape of all-MiniLM-L6-v2."""
    torch.manual_seed(7)
    words = sorted({*WORDS, *QUERY.split(" ")})
    sizes = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
    config = BertConfig(vocab_size=30522, max_position_embeddings=MAX_LENGTH, num_labels=1, **sizes)
    model = BertModel(config) if kind == "embed" else BertForSequenceClassification(config)
    # As BertTokenizer has it: of the generic tokenizer, transformers would leave the token types out.
    names = ["input_ids", "token_type_ids", "attention_mask"]
    save_checkpoint(model, folder, make_tokenizer([*SPECIAL, *words]), MAX_LENGTH, model_input_names=names)
    if kind == "embed":
        pooling = {"type": "Pooling", "word_embedding_dimension": 384, "pooling_mode_mean_tokens": True}
        write_modules(folder, [pooling, {"type": "Normalize"}])
    return folder


def request(kind: str, texts: list[str]) -> tuple[str, dict[str, Any]]:
    """Return the path and the body of a request for texts."""
    if kind == "embed":
        return "/v1/embeddings", {"input": texts, "encoding_format": "base64"}
    return "/score", {"text_1": QUERY, "text_2": texts}


def rate(url: str, kind: str, texts: list[str], num_clients: int) -> float:
    """Return items/s of clients that each send one text at a time.

    They are tasks of one thread, and read no more of HTTP than they must. 32 threads with a client library take twice
    the processor time of the model, on the same cores.
    """
    address, remaining = httpx2.URL(url), iter(texts)

    async def ask() -> None:
        reader, writer = await asyncio.open_connection(address.host, address.port)
        for text in remaining:
            path, body = request(kind, [text])
            encoded = json.dumps(body).encode()
            writer.write(b"POST %s HTTP/1.1\r\nHost: localhost\r\n" % path.encode())
            writer.write(b"Content-Length: %d\r\n\r\n" % len(encoded))
            writer.write(encoded)
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            answer = await reader.readexactly(int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0]))
            if not head.startswith(b"http/1.1 200"):
                raise SystemExit(f"{path} failed: {answer.decode()}")
        writer.close()

    async def ask_all() -> None:
        await asyncio.gather(*(ask() for _ in range(num_clients)))

    started = time.perf_counter()
    uvloop.run(ask_all())
    return len(texts) / (time.perf_counter() - started)


def numbers(server_client: httpx2.Client, kind: str, texts: list[str]) -> list[list[float]]:
    """Return the server's vector of each text, or its score as a vector of one number."""
    path, body = request(kind, texts)
    answer = server_client.post(path, json={**body, "encoding_format": "float"} if kind == "embed" else body).json()
    return [each["embedding"] if kind == "embed" else [each["score"]] for each in answer["data"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--kind", choices=("embed", "rerank"), default="embed")
    parser.add_argument("--python", required=True, help="interpreter with sentence-transformers")
    parser.add_argument("--texts", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    kind, texts = arguments.kind, make_texts(arguments.texts, seed=7)
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or str(make_model(Path(folder) / "model", kind))
        file = Path(folder) / "texts.json"
        file.write_text(json.dumps(texts))
        command = [arguments.python, "-c", PEER, kind, model, str(file), QUERY]
        with (
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as peer,
            serving(model, log=Path(folder) / "log") as server,
        ):

            def ask_peer(line: str) -> str:
                assert peer.stdin is not None and peer.stdout is not None
                peer.stdin.write(line + "\n")
                peer.stdin.flush()
                return peer.stdout.readline()

            assert peer.stdin is not None and peer.stdout is not None
            peer.stdout.readline()
            rate(server.url, kind, texts[:64], 8)
            ours: dict[int, list[float]] = {1: [], 32: []}
            theirs: dict[int, list[float]] = {1: [], 32: []}
            for _ in range(arguments.rounds):
                for size in ours:
                    ours[size].append(rate(server.url, kind, texts, size))
                    theirs[size].append(float(ask_peer(str(size))))
            print("| clients, or texts in a batch | servekit, texts/s | sentence-transformers, texts/s | ratio |")
            print("|---:|---:|---:|---:|")
            for size, values in ours.items():
                one, other = statistics.median(values), statistics.median(theirs[size])
                ratio = statistics.median(a / b for a, b in zip(values, theirs[size], strict=True))
                print(f"| {size} | {one:,.0f} | {other:,.0f} | {ratio:.2f} |")
            expected = json.loads(ask_peer("numbers"))
            pairs = zip(numbers(server.client, kind, texts), expected, strict=True)
            worst = max(
                abs(a - b)
                for own, other in pairs
                for a, b in zip(own, other if isinstance(other, list) else [other], strict=True)
            )
            print(f"\nlargest difference of a number: {worst:.1e}")
            peer.stdin.close()


if __name__ == "__main__":
    sys.exit(main())
