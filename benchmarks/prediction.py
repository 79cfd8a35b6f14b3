"""Compare predicted times to the first token with measured ones, on a real engine: a table, and a page with a picture.

The engine serves the demo model. Clients ask questions and let the model end its answers, so the lengths of
answers are not known before. First come requests of another kind, from which the predictor learns. Then come those that
are measured, in random order of arrival, at some parts of the load that the engine can bear. The predictions are made
afterwards, from the journal of the engine: when a request is added there, a predictor sees what the manager was like
then.

    python -m benchmarks.prediction --out build/prediction

It takes about four minutes. Run nothing else meanwhile: another program makes steps longer than they were before.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
from html import escape
from math import log10
from pathlib import Path
from statistics import median

from servekit.embedded.async_llm import AsyncLLM
from servekit.embedded.sampling_params import SamplingParams
from servekit.latency.latency_predictor import LatencyPredictor, Prediction
from servekit.observability.journal import replay_journal
from servekit.protocol.messages import StepPlan
from servekit.scheduler.recording import AddRecord, PlanRecord, Record, ReplayWatcher
from servekit.scheduler.sequence import Sequence
from servekit.scheduler.step import SequenceToken
from servekit.scheduler.workload_manager import WorkloadManager

QUESTIONS = Path(__file__).parents[1] / "servekit/assets/demo_model/questions.jsonl"
MAX_TOKENS = 300
NUM_SLOTS = 8
MAX_ROLL_STEPS = 5000
JOURNAL_BYTES = 2**40
# A journal has no names of requests. So max_tokens is MAX_TOKENS plus the kind of the request, which shows its kind.
# The kind of a measured request is its load in percent.
LEARNED, CAPACITY = 1, 2


class Watcher(ReplayWatcher):
    """Predicts each request of a journal when it is added, and notes when its first token came."""

    def __init__(self) -> None:
        self.predictor = LatencyPredictor()
        self.outcomes: list[tuple[int, Prediction, float]] = []  # kind, prediction, measured seconds
        self._open: dict[int, tuple[int, Prediction]] = {}
        self._is_idle = False  # the manager, before the sequence that is being added
        self._came_to_idle: list[Sequence] = []

    def before(self, manager: WorkloadManager, record: Record) -> None:
        """Predict what came to an idle manager: a journal dates it with the plan that followed."""
        if isinstance(record, AddRecord):
            self._is_idle = not manager.has_work
        elif isinstance(record, PlanRecord):
            for sequence in self._came_to_idle:
                self._predict(manager, sequence, record.now_s)
            self._came_to_idle.clear()

    def added(self, manager: WorkloadManager, sequence: Sequence) -> None:
        if self._is_idle or self._came_to_idle:
            self._came_to_idle.append(sequence)
        else:
            self._predict(manager, sequence, max(sequence.arrival_s, manager.log.now_s))

    def _predict(self, manager: WorkloadManager, sequence: Sequence, now_s: float) -> None:
        prediction = self.predictor.predict(manager, sequence.sequence_id, now_s, MAX_ROLL_STEPS)
        if prediction is not None:
            self._open[sequence.sequence_id] = sequence.sampling.max_tokens - MAX_TOKENS, prediction

    def planned(self, manager: WorkloadManager, plan: StepPlan, now_s: float) -> None:
        self.predictor.planned(manager, plan, now_s)

    def committed(self, manager: WorkloadManager, tokens: list[SequenceToken], now_s: float) -> None:
        self.predictor.committed(manager, tokens, now_s)
        for token in tokens:
            found = self._open.pop(token.sequence.sequence_id, None)
            if found is not None:
                kind, prediction = found
                self.predictor.measured(prediction, now_s)
                self.outcomes.append((kind, prediction, now_s - prediction.predicted_s))


async def ask(llm: AsyncLLM, prompt: str, kind: int) -> None:
    params = SamplingParams(max_tokens=MAX_TOKENS + kind, temperature=1.0)
    async for _ in llm.generate(prompt, params, stream=False):
        pass


async def flood(llm: AsyncLLM, prompts: list[str], kind: int, seconds: float) -> float:
    """Ask with twice as many clients as slots; return the answers per second."""
    loop, num_ended = asyncio.get_running_loop(), 0
    until_s = loop.time() + seconds

    async def client(number: int) -> None:
        nonlocal num_ended
        rng = random.Random(number)
        while loop.time() < until_s:
            await ask(llm, rng.choice(prompts), kind)
            num_ended += loop.time() < until_s

    await asyncio.gather(*map(client, range(2 * NUM_SLOTS)))
    return num_ended / seconds


async def arrive(llm: AsyncLLM, prompts: list[str], kind: int, rate: float, seconds: float) -> None:
    """Ask at random times, with a mean of `rate` requests per second."""
    rng, tasks, at_s = random.Random(kind), [], 0.0
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    while (at_s := at_s + rng.expovariate(rate)) < seconds:
        await asyncio.sleep(max(0.0, began_s + at_s - loop.time()))
        tasks.append(asyncio.create_task(ask(llm, rng.choice(prompts), kind)))
    await asyncio.gather(*tasks)


async def serve(journal: Path, model: str, loads: list[float], seconds: float) -> float:
    questions = [json.loads(line)["prompt"] for line in QUESTIONS.read_text().splitlines()]
    others = [" ".join(questions[index : index + 3]) for index in range(0, len(questions) - 3, 3)]
    async with AsyncLLM(
        model, max_num_seqs=NUM_SLOTS, scheduling_policy="fcfs", journal=str(journal), journal_max_bytes=JOURNAL_BYTES
    ) as llm:
        await flood(llm, others, LEARNED, seconds)
        rate = await flood(llm, questions, CAPACITY, seconds)
        for load in loads:
            await arrive(llm, questions, round(100 * load), load * rate, seconds)
    return rate


def as_page(title: str, outcomes: list[tuple[int, Prediction, float]], rows: list[list[str]]) -> str:
    """Draw measured against predicted times, both logarithmic, and the band of each prediction."""
    kinds = sorted({kind for kind, _, _ in outcomes})
    values = [value for _, each, measured_s in outcomes for value in (each.first_token.median_s, measured_s)]
    low, high = log10(min(values)) - 0.1, log10(max(values)) + 0.1

    def at(seconds: float) -> float:
        return 400.0 * (log10(max(seconds, 10**low)) - low) / (high - low)

    marks = []
    for kind, each, measured_s in outcomes:
        x, band = at(each.first_token.median_s), each.first_token
        is_inside = band.low_s <= measured_s <= band.high_s
        hue = 220 - 70 * kinds.index(kind)
        marks.append(
            f'<g stroke="hsl({hue} 65% 50%)"><line x1="{x:.1f}" x2="{x:.1f}" y1="{400 - at(band.low_s):.1f}" '
            f'y2="{400 - at(band.high_s):.1f}" opacity=".25"/><circle cx="{x:.1f}" cy="{400 - at(measured_s):.1f}" '
            f'r="2.5" fill="{f"hsl({hue} 65% 50%)" if is_inside else "none"}"/></g>'
        )
    ticks = []
    for exponent in range(-4, 4):
        for digit in (1, 3):
            seconds = digit * 10.0**exponent
            if low <= log10(seconds) <= high:
                label = f"{seconds:g} s" if seconds >= 1 else f"{1e3 * seconds:g} ms"
                ticks.append(
                    f'<text x="{at(seconds):.1f}" y="416" text-anchor="middle">{label}</text>'
                    f'<text x="-6" y="{404 - at(seconds):.1f}" text-anchor="end">{label}</text>'
                )
    table = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    names = " ".join(
        f'<span style="color: hsl({220 - 70 * index} 65% 50%)">● load {kind / 100:g}</span>'
        for index, kind in enumerate(kinds)
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title><style>
:root {{ color-scheme: light dark; }}
body {{ margin: 0 auto; padding: 1rem; max-width: 50rem; font: 15px/1.5 system-ui, sans-serif; }}
svg {{ width: 100%; }} svg text {{ fill: currentColor; font-size: 11px; }} h1 {{ font-size: 1.25rem; }}
td {{ padding: .25rem .6rem; border-bottom: 1px solid color-mix(in srgb, currentColor 25%, transparent); }}
</style></head><body><h1>{escape(title)}</h1>
<p>Time to the first token. Across: predicted when the request was added. Up: measured. A line is the 80 % band of a
prediction; a hollow dot is outside of its band. {names}</p>
<svg viewBox="-55 -10 470 450"><path d="M0 0V400H400M0 400L400 0" fill="none" stroke="currentColor" opacity=".4"/>
{"".join(ticks)}{"".join(marks)}
<text x="400" y="432" text-anchor="end">predicted</text><text x="0" y="-2">measured</text></svg>
<table>{table}</table></body></html>
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.3, 0.6, 0.85, 1.1])
    parser.add_argument("--seconds", type=float, default=40.0, help="of each part")
    parser.add_argument("--out", type=Path, help="folder for the page")
    options = parser.parse_args()
    watcher = Watcher()
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder) / "journal"
        rate = asyncio.run(serve(journal, options.model, options.loads, options.seconds))
        result = replay_journal(journal, watcher)
    assert result.difference is None, result.difference
    rows = [["load", "requests", "median error", "in the 80 % band", "median wait until the first token"]]
    for load in options.loads:
        found = [(each, measured_s) for kind, each, measured_s in watcher.outcomes if kind == round(100 * load)]
        errors = [abs(each.first_token.median_s / measured_s - 1.0) for each, measured_s in found]
        inside = [each.first_token.low_s <= measured_s <= each.first_token.high_s for each, measured_s in found]
        rows.append(
            [
                f"{load:g}",
                f"{len(found)}",
                f"{100 * median(errors):.1f} %",
                f"{100 * sum(inside) / len(inside):.0f} %",
                f"{1e3 * median(measured_s for _, measured_s in found):.0f} ms",
            ]
        )
    print(f"capacity: {rate:.1f} requests/s; step times: {watcher.predictor.model.info()}\n")
    for row in rows:
        print("| " + " | ".join(row) + " |")
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        measured = [outcome for outcome in watcher.outcomes if outcome[0] > CAPACITY]
        path = options.out / "prediction.html"
        path.write_text(as_page("Predicted and measured times to the first token", measured, rows))
        print(f"\nwritten: {path}")


if __name__ == "__main__":
    main()
