"""Compare what the methods of `servekit quantize` cost in answers and save in bytes, through real servers.

    python -m benchmarks.quantization_methods [--model demo] [--documents FILE] [--group-size 64]

Every second document calibrates. Perplexity is that of the others, by the code of `servekit eval`. For the demo model,
documents are its questions with their answers. The right answers to the questions of the others are counted, too.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.progress import no_bars_in_files, progress
from servekit.config import DEMO_MODEL
from servekit.engine.model_files import DEMO_MODEL_PATH, find_model
from servekit.evaluation.evaluation import EvaluationSettings, evaluate
from servekit.evaluation.json_lines import decode_lines
from servekit.evaluation.measurement import Summary
from servekit.evaluation.perplexity import Document
from servekit.evaluation.report import table
from tests.support.server_process import serving


@dataclass(frozen=True)
class Row:
    """One row of the table: how the checkpoint is made, and how it is served."""

    name: str
    quantize: tuple[str, ...] = ()  # flags of `servekit quantize`; empty: the model itself is served
    serve: tuple[str, ...] = ()


def rows(group_size: int) -> list[Row]:
    size, four_bits = str(group_size), f"w4a16, groups of {group_size}"
    return [
        Row("unquantized"),
        Row("`--quantization int4`", serve=("--quantization", "int4", "--quantization-group-size", size)),
        *(
            Row(f"{method}, {four_bits}", ("--method", method, "--group-size", size))
            for method in ("rtn", "gptq", "awq")
        ),
        *(
            Row(f"{method}, {four_bits}, symmetric", ("--method", method, "--group-size", size, "--symmetric"))
            for method in ("rtn", "gptq", "awq")
        ),
        Row("rtn, w8a8", ("--method", "rtn", "--scheme", "w8a8")),
    ]


def write_inputs(folder: Path, model: str, documents: Path | None) -> tuple[Path, Path, Path | None]:
    """Write the files of texts that calibrate, of others, and of the questions that belong to the others."""
    questions: list[dict[str, str]] = []
    if documents is not None:
        texts = [document.text for _, document in decode_lines(documents.read_bytes(), Document, documents.name)]
    elif model == DEMO_MODEL:
        questions = [json.loads(line) for line in (DEMO_MODEL_PATH / "questions.jsonl").read_text().splitlines()]
        texts = [f"{question['prompt']} {question['answer']}" for question in questions]
    else:
        raise SystemExit('give --documents FILE: JSON lines with the field "text"')
    files = []
    for name, chosen in {"calibration": texts[::2], "held_out": texts[1::2]}.items():
        files.append(folder / f"{name}.jsonl")
        files[-1].write_text("".join(json.dumps({"text": text}) + "\n" for text in chosen))
    asked = None
    if questions:
        asked = folder / "questions.jsonl"
        asked.write_text("".join(json.dumps(question) + "\n" for question in questions[1::2]))
    return files[0], files[1], asked


def quantize(row: Row, model: str, output: Path, calibration: Path) -> float:
    """Write a checkpoint. Returns the seconds from the command's start to its end, without those of importing torch."""
    command = [sys.executable, "-m", "servekit", "quantize", model, str(output), *row.quantize]
    if "rtn" not in row.quantize:
        command += ["--calibration", str(calibration)]
    started = time.monotonic()
    subprocess.run(command, check=True, capture_output=True)
    whole = time.monotonic() - started
    started = time.monotonic()
    subprocess.run([sys.executable, "-c", "import workers.compression.quantize"], check=True)
    return max(0.0, whole - (time.monotonic() - started))


def num_bytes(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.glob("*.safetensors"))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default=DEMO_MODEL)
    parser.add_argument("--documents", type=Path, help='JSON lines with "text"; not needed for the demo model')
    parser.add_argument("--group-size", type=int, default=64)
    arguments = parser.parse_args()
    no_bars_in_files()
    model_path, chosen = find_model(arguments.model), rows(arguments.group_size)
    cells: list[list[str]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        calibration, held_out, questions = write_inputs(folder, arguments.model, arguments.documents)
        for row in progress(chosen, "formats", lambda row: row.name):
            served, taken = arguments.model, "-"
            if row.quantize:
                output = folder / f"checkpoint-{len(cells)}"
                taken = f"{quantize(row, arguments.model, output, calibration):.1f} s"
                served = str(output)
            with serving("--model", served, *row.serve, log=folder / "log") as server:
                loaded = server.client.get("/info").json()["worker"]["num_weight_bytes"]
                settings = EvaluationSettings(
                    url=server.url, text=str(held_out), questions=[] if questions is None else [str(questions)]
                )
                summary = evaluate(settings).servers[0]
            directory = Path(served) if row.quantize else model_path
            cells.append(
                [row.name, f"{num_bytes(directory) / 1e6:.2f}", f"{loaded / 1e6:.2f}", taken, *scores(summary)]
            )
    print(table(["format", "MB in files", "MB in memory", "time to quantize", "perplexity", "right answers"], cells))


def scores(summary: Summary) -> list[str]:
    assert summary.perplexity is not None
    right = f"{100 * summary.categories[0].share.estimate:.1f} %" if summary.categories else "-"
    return [f"{summary.perplexity.estimate:.3f}", right]


if __name__ == "__main__":
    main()
