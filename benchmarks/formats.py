"""Compare formats of weights: latency, memory and accuracy of each, through the real server.

    python -m benchmarks.formats [--models demo llama] [--formats float32 gptq] [--rounds 3] [--quick] [--write]

The models are the demo model, and a Llama of 0.4 billion random weights, which is made here. Checkpoints of each format
are made of them by rounding to the nearest, without calibration (tests/support/quantized_checkpoints.py). All servers
of a model run all the time, and get the same requests in turn, so a noisy machine affects all formats. Each figure is
the median of its rounds. Weights are multiplied in bfloat16 or int8, except in the first row.

Accuracy of the demo model is what `servekit eval` finds. Random weights have no right answers: there, it is the share
of the tokens of a fixed text after which the model has the same likeliest token as in float32.

The whole run takes about 25 minutes on two cores, and 14 GB of memory. `--quick` takes one short round. `--directory`
keeps the checkpoints for the next run. `--write` writes the tables into docs/quantization.md.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from msgspec import Struct, field
from tokenizers import Tokenizer
from transformers import LlamaConfig

from benchmarks.medians import median_of, p50
from benchmarks.progress import Progress, no_bars_in_files, tell
from benchmarks.random_llama import make_random_llama
from loadtest.analysis.statistics import Distribution
from loadtest.analysis.summary import Figures, Summary
from loadtest.experiment import Experiment, run
from loadtest.planning.text import VOCABULARY
from loadtest.reporting.formatting import as_number, as_time
from loadtest.target import ApiFormat, Target
from scripts.tables import with_table
from servekit.engine.model_files import DEMO_MODEL_PATH
from servekit.evaluation.evaluation import DEMO_QUESTIONS, EvaluationSettings, evaluate
from servekit.evaluation.model_client import ModelClient
from servekit.evaluation.perplexity import TokenScore, same_likeliest
from servekit.evaluation.questions import evenly
from tests.support import proc
from tests.support.k_quants import type_in_q4_k_m
from tests.support.quantized_checkpoints import group_size_of, write_q4_k_m, write_q8_0, write_safetensors
from tests.support.server_process import ServerProcess

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "quantization.md"
MAKER = "python -m benchmarks.formats"
WORKLOAD = "random:input=uniform:32-96,output=32"
NUM_REQUESTS = {1: 3, 8: 16, 32: 32}  # by the number of clients
NUM_KV_BLOCKS = 384  # 32 sequences of 128 tokens, and half as much again
NUM_QUESTIONS, NUM_QUICK_QUESTIONS = 1000, 60
LEARNED_SENTENCES = ("definitions", "servekit")  # categories of questions whose answers begin in few ways
NUM_CHARACTERS = 8000  # of the text that the random model reads
WINDOW = 512  # tokens of it in one prompt
MB = 1e6


# -- the arithmetic of the formats -------------------------------------------------------------------------------------


class Matrix(Struct, frozen=True):
    """A matrix of a Llama."""

    name: str  # as GGUF files call it; token_embd is the embedding and the head
    layer: int
    num_layers: int
    num_outputs: int
    num_inputs: int

    @property
    def is_in_a_layer(self) -> bool:
        return self.name != "token_embd"


def matrices_of(config: LlamaConfig) -> list[Matrix]:
    """Return all matrices of a Llama whose head is tied to the embedding."""
    assert config.tie_word_embeddings
    hidden, inner, num_layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    sizes = {
        "attn_q": (queries, hidden),
        "attn_k": (keys, hidden),
        "attn_v": (keys, hidden),
        "attn_output": (hidden, queries),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }
    found = [Matrix(name, layer, num_layers, *size) for layer in range(num_layers) for name, size in sizes.items()]
    return [*found, Matrix("token_embd", 0, num_layers, config.vocab_size, hidden)]


Bits = Callable[[Matrix, int], float]  # of each weight of a matrix, scales included; takes the group size, too


def plain(bits: float) -> Bits:
    return lambda matrix, group_size: bits


def by_row(bits: float, scale_bits: float, head_bits: float | None = None) -> Bits:
    """Return the bits with a scale for each row; those of the head, if it is not quantized."""
    return lambda matrix, group_size: (
        bits + scale_bits / matrix.num_inputs if matrix.is_in_a_layer or head_bits is None else head_bits
    )


def by_group(bits: float, more_bits: float, head_bits: float, group_size: int | None = None) -> Bits:
    """Return the bits with `more_bits` for each group."""
    return lambda matrix, of_model: bits + more_bits / (group_size or of_model) if matrix.is_in_a_layer else head_bits


def in_blocks(type_of: Callable[[str, int, int, int], str]) -> Bits:
    def bits(matrix: Matrix, group_size: int) -> float:
        type_name = type_of(matrix.name, matrix.layer, matrix.num_layers, matrix.num_inputs)
        numbers, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
        return 8 * num_bytes / numbers

    return bits


def num_bytes_of(matrices: Sequence[Matrix], bits: Bits, group_size: int) -> float:
    return sum(each.num_outputs * each.num_inputs * bits(each, group_size) / 8 for each in matrices)


# -- formats and models ------------------------------------------------------------------------------------------------


class Format(Struct, frozen=True):
    """A format of weights, and how a server gets a model in it."""

    key: str
    name: str
    bits: Bits
    flags: tuple[str, ...] = ()
    write: Callable[[Path, Path], Path] | None = None  # a checkpoint of it; None: the unquantized one is served
    dtype: str = "bfloat16"
    model: str | None = None  # the only one that is measured in it

    def checkpoint(self, source: Path, folder: Path) -> Path:
        """Return the checkpoint to serve; make it if `folder` does not have it."""
        if self.write is None:
            return source
        path = folder / (f"{self.key}.gguf" if self.name.startswith("GGUF") else self.key)
        return path if path.exists() else self.write(source, path)


def as_safetensors(name: str) -> Callable[[Path, Path], Path]:
    return lambda source, target: write_safetensors(source, target, name)


def calibrated(method: str) -> Callable[[Path, Path], Path]:
    """Return what `servekit quantize` writes, calibrated by the questions of the demo model that are not asked."""

    def write(source: Path, target: Path) -> Path:
        lines = DEMO_QUESTIONS.read_text().splitlines()
        others = set(lines) - set(evenly(lines, NUM_QUESTIONS))
        questions = [question for question in map(json.loads, sorted(others)) if isinstance(question["answer"], str)]
        texts = [json.dumps({"text": f"{each['prompt']} {each['answer']}"}) + "\n" for each in questions]
        calibration = target.with_suffix(".jsonl")
        calibration.write_text("".join(texts))
        command = [sys.executable, "-m", "servekit", "quantize", str(source), str(target), "--method", method]
        subprocess.run([*command, "--calibration", str(calibration)], check=True, stdout=subprocess.DEVNULL)
        return target

    return write


_OF_FILES = [
    Format("w8a8", "compressed-tensors W8A8", by_row(8, 16, 16), write=as_safetensors("w8a8")),
    Format("w4a16", "compressed-tensors W4A16", by_group(4, 16, 16), write=as_safetensors("w4a16")),
    Format("w4a8", "compressed-tensors W4A8", by_group(4, 16, 16), write=as_safetensors("w4a8")),
    Format("gptq", "GPTQ", by_group(4, 20, 16), write=as_safetensors("gptq")),
    Format("awq", "AWQ", by_group(4, 20, 16), write=as_safetensors("awq")),
    Format("q8_0", "GGUF Q8_0", in_blocks(lambda *_: "Q8_0"), write=write_q8_0),
    Format("q4_k_m", "GGUF Q4_K_M", in_blocks(type_in_q4_k_m), write=write_q4_k_m),
]
_CALIBRATED = [
    Format(
        f"{method}_calibrated",
        f"`servekit quantize --method {method}`",
        by_group(4, 20, 16),
        write=calibrated(method),
        model="demo",
    )
    for method in ("gptq", "awq")
]
_AT_LOAD = [
    Format("int8", "`--quantization int8` (W8A8)", by_row(8, 32), ("--quantization", "int8")),
    Format("int4", "`--quantization int4` (W4A16)", by_group(4, 32, 8, 64), ("--quantization", "int4")),
]
_UNQUANTIZED = [Format("float32", "float32", plain(32), dtype="float32"), Format("bfloat16", "bfloat16", plain(16))]
FORMATS = {each.key: each for each in [*_UNQUANTIZED, *_AT_LOAD, *_OF_FILES, *_CALIBRATED]}


class Load(Struct, frozen=True):
    """Memory of the worker, in bytes, without what it maps from files."""

    after: int
    peak: int
    weights: int | None  # as the worker counts them, if they are quantized


class Side(Struct):
    """The server of a format, and what was measured of it."""

    format: Format
    server: ServerProcess
    load: Load
    accuracy: list[str] = field(default_factory=list)  # cells
    rounds: dict[int, list[Summary]] = field(default_factory=dict)  # by the number of clients


# -- measuring ---------------------------------------------------------------------------------------------------------


class PeakMemory(threading.Thread):
    """Watches the memory of a server's worker while it loads a model. `peak` is in bytes."""

    def __init__(self, server: ServerProcess) -> None:
        super().__init__(daemon=True)
        self._server = server
        self._is_over = threading.Event()
        self.peak = 0

    def run(self) -> None:
        while not self._is_over.wait(0.01):
            self.peak = max([self.peak, *map(anonymous_bytes, self._server.worker_pids())])

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self.join()


def anonymous_bytes(pid: int) -> int:
    """Return the memory of a process that is no file's; 0 if it has ended."""
    found = re.search(r"RssAnon:\s+(\d+) kB", proc.read(pid, "status"))
    return int(found[1]) * 1024 if found else 0


@contextmanager
def started(format_: Format, source: Path, folder: Path) -> Iterator[Side]:
    """Yield a server of the model in a format; make the checkpoint if `folder` has none."""
    flags = ["--model", str(format_.checkpoint(source, folder)), "--dtype", format_.dtype, *format_.flags]
    flags += ["--num-kv-blocks", str(NUM_KV_BLOCKS), "--max-model-len", "1024", "--log-level", "warning"]
    server = ServerProcess(*flags, log=folder / f"log-{format_.key}")
    try:
        with PeakMemory(server) as memory:
            server.wait_until_ready()
        (worker,) = server.worker_pids()
        info = server.client.get("/info").json()["worker"]
        weights = info["num_weight_bytes"] if info["model"]["quantization"] else None
        yield Side(format_, server, Load(anonymous_bytes(worker), memory.peak, weights))
    finally:
        server.client.close()
        server.process.kill()
        server.process.wait()


def play(side: Side, num_clients: int, num_requests: int, seed: int, characters_per_token: float) -> None:
    """Run one round against a side."""
    experiment = Experiment(
        target=Target(urls=[side.server.url], api=ApiFormat.COMPLETIONS, fields={"temperature": 0.0}),
        arrivals=f"closed:{num_clients}",
        workload=WORKLOAD,
        num_requests=num_requests,
        characters_per_token=characters_per_token,
        seed=seed,
        num_warm_up=1,
    )
    summary = run(experiment, side.format.name, None).summary
    if summary.failures:
        tell(f"{side.format.name}: {summary.failures}", file=sys.stderr)
    side.rounds.setdefault(num_clients, []).append(summary)


def evaluated(sides: Sequence[Side], folder: Path, num_questions: int, progress: Progress) -> None:
    """Set the perplexity and the right answers of the demo model's servers, by `servekit eval`."""
    questions = map(json.loads, DEMO_QUESTIONS.read_text().splitlines())
    texts = {each["answer"] for each in questions if each["category"] in LEARNED_SENTENCES}
    (folder / "sentences.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in sorted(texts)))
    for side in sides:
        progress.begin(f"{side.format.name}, questions")
        settings = EvaluationSettings(
            url=side.server.url,
            text=str(folder / "sentences.jsonl"),
            questions=["demo"],
            limit=num_questions,
            concurrency=16,
        )
        (summary,) = evaluate(settings).servers
        assert summary.perplexity is not None
        right = summary.categories[0].share.estimate
        side.accuracy = [f"{summary.perplexity.estimate:.4f}", f"{100 * right:.1f} %"]


def compared(sides: Sequence[Side], progress: Progress) -> None:
    """Set after how many tokens of a text each server has the same likeliest token as the one in float32."""
    reference: list[TokenScore] | None = None
    for side in sides:
        progress.begin(f"{side.format.name}, tokens of a text")
        scores = asyncio.run(_scores(side.server.url))
        if side.format.dtype == "float32":
            reference = scores
        share = None if reference is None else same_likeliest(reference, scores)
        side.accuracy = ["-" if share is None else f"{100 * share:.1f} %"]


async def _scores(url: str) -> list[TokenScore]:
    text = (ROOT / "LICENSE").read_text()[:NUM_CHARACTERS]
    async with ModelClient(url, None, concurrency=2) as client:
        await client.find_model()
        token_ids = await client.encode(text, special=False)
        parts = [token_ids[begin : begin + WINDOW] for begin in range(0, len(token_ids), WINDOW)]
        return [score for part in parts if len(part) > 1 for score in await client.score(part, 1)]


# -- the table ---------------------------------------------------------------------------------------------------------


def ratio(side: Side, baseline: Side, num_clients: int) -> float:
    """Return the rate of tokens beside the baseline's, the median over pairs of neighbouring rounds."""
    pairs = zip(side.rounds[num_clients], baseline.rounds[num_clients], strict=True)
    return statistics.median(
        ours.full.output_tokens_per_s / max(theirs.full.output_tokens_per_s, 1e-9) for ours, theirs in pairs
    )


def row(side: Side, baseline: Side, num_bytes: float) -> str:
    clients = sorted(side.rounds)

    def each(of: Callable[[int], str]) -> str:
        return " / ".join(of(number) for number in clients)

    def time_of(of: Callable[[Figures], Distribution | None]) -> str:
        return each(lambda number: as_time(median_of(side.rounds[number], p50(of))))

    cells = [
        side.format.name,
        time_of(lambda figures: figures.itl_s),
        time_of(lambda figures: figures.ttft_s),
        each(lambda number: as_number(median_of(side.rounds[number], lambda figures: figures.output_tokens_per_s))),
        each(lambda number: f"{ratio(side, baseline, number):.2f}"),
        f"{num_bytes / MB:,.1f}",
        "" if side.load.weights is None else f"{side.load.weights / MB:,.1f}",
        f"{side.load.after / MB:,.0f}",
        f"{side.load.peak / MB:,.0f}",
        *side.accuracy,
    ]
    return f"| {' | '.join(cells)} |"


def head(clients: Sequence[int], baseline: Side, accuracy: Sequence[str]) -> list[str]:
    of_clients = " / ".join(map(str, clients)) + " clients"
    heads = [
        "format",
        f"between tokens, p50, {of_clients}",
        "TTFT, p50",
        "tokens/s",
        f"tokens/s beside {baseline.format.name}",
        "weights by arithmetic, MB",
        "weights in memory, MB",
        "worker, MB",
        "worker while loading, MB",
        *accuracy,
    ]
    return [f"| {' | '.join(heads)} |", f"|---|{'---:|' * (len(heads) - 1)}"]


# -- the run -----------------------------------------------------------------------------------------------------------


class Model(Struct, frozen=True):
    """A model that is measured."""

    title: str
    accuracy: list[str]  # heads of columns
    source: Callable[[Path], Path]  # makes the unquantized checkpoint in a folder, or finds it


MODELS = {
    "demo": Model("the demo model", ["perplexity", "right answers"], lambda _: DEMO_MODEL_PATH),
    "llama": Model("a Llama of 0.4 billion random weights", ["likeliest token as in float32"], make_random_llama),
}


def measure(name: str, folder: Path, arguments: argparse.Namespace) -> list[str]:
    """Measure a model in all formats. Returns the lines of its table."""
    model, clients = MODELS[name], arguments.clients
    folder.mkdir(parents=True, exist_ok=True)
    source = model.source(folder)
    config = LlamaConfig.from_pretrained(source)
    matrices, group_size = matrices_of(config), group_size_of(config.to_dict())
    text = " ".join(VOCABULARY)
    characters_per_token = len(text) / len(Tokenizer.from_file(str(source / "tokenizer.json")).encode(text).ids)
    formats = [FORMATS[each] for each in arguments.formats if FORMATS[each].model in (None, name)]
    num_steps = len(formats) * (2 + len(clients) * arguments.rounds)
    with ExitStack() as stack, Progress(f"{name} model", num_steps) as progress:
        sides: list[Side] = []
        for format_ in formats:
            progress.begin(f"{format_.name}, start")
            sides.append(stack.enter_context(started(format_, source, folder)))
        if name == "demo":
            evaluated(sides, folder, NUM_QUICK_QUESTIONS if arguments.quick else NUM_QUESTIONS, progress)
        else:
            compared(sides, progress)
        for number in range(arguments.rounds):
            for num_clients in clients:
                num_requests = num_clients if arguments.quick else NUM_REQUESTS.get(num_clients, 2 * num_clients)
                for side in sides[number % len(sides) :] + sides[: number % len(sides)]:
                    progress.begin(f"{side.format.name}, {num_clients} clients")
                    play(side, num_clients, num_requests, 100 * number + num_clients, characters_per_token)
        baseline = next((side for side in sides if side.format is FORMATS["bfloat16"]), sides[0])
        rows = [row(side, baseline, num_bytes_of(matrices, side.format.bits, group_size)) for side in sides]
    num_weights = sum(each.num_outputs * each.num_inputs for each in matrices)
    date = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    return [
        "",
        f"{model.title[0].upper()}{model.title[1:]} ({num_weights / 1e6:,.0f} million, groups of {group_size}), "
        f"{os.cpu_count()} cores ({platform.machine()}), medians of {arguments.rounds} rounds, on {date}.",
        "",
        *head(clients, baseline, model.accuracy),
        *rows,
        "",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=[*MODELS], default=[*MODELS])
    parser.add_argument("--formats", nargs="+", choices=[*FORMATS], default=[*FORMATS])
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round of few requests and few questions")
    parser.add_argument("--directory", type=Path, help="keep the checkpoints there; default: a temporary folder")
    parser.add_argument("--write", action="store_true", help="write the tables into docs/quantization.md")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds = 1
    no_bars_in_files()
    begun_s = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        for name in arguments.models:
            lines = measure(name, (arguments.directory or Path(temporary)) / name, arguments)
            print("\n".join(lines), flush=True)
            if arguments.write:
                PAGE.write_text(with_table(PAGE.read_text(), f"formats-{name}", iter(lines), MAKER))
    print(f"after {(time.monotonic() - begun_s) / 60:.0f} minutes", file=sys.stderr)


if __name__ == "__main__":
    main()
